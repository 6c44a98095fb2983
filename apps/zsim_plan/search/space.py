"""Settings that a search considers: groups with a common lower bound, and knobs inside them.

A group fixes the values that its lower bound depends on: runtime, stage, degrees, offload,
checkpointing and micro-batch. Knobs of the runtime distinguish the settings of a group.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

from zsim.runtimes.lookup import search_of
from zsim.runtimes.search import Options, SearchedAxes, SearchSpace
from zsim_plan.search.fleet import Changes, Degrees, Fleet

CHECKPOINTING = ("none", "operations", "full")
"""With flash attention, `selective` keeps the same activations as `none`."""

CONTEXTS = (2, 4, 8)
"""Numbers of ranks that may share a sequence; set `parallel.context` for more."""

BUSIEST = 1.1
"""Copies of tokens that the busiest rank of experts receives, in multiples of the mean.

Routers that are trained with an auxiliary loss or a bias keep loads near the mean. With exactly the
mean, a search would prefer too many expert ranks.
"""

LEAST_PART = 4_096
"""Minimum tokens of each rank that shares a sequence.

In NVIDIA's recipes for Llama 3 70B, 2 ranks share 8,192 tokens, and 2 share 16,384 (NeMo 2.0,
`llama3_70b.py` and `llama3_70b_16k.py`). Others share less: Llama 3 405B was trained without
sharing at 8,192 tokens, and with 16 ranks at 131,072 (arXiv 2407.21783, table 4), and Llama 2 7B is
fastest without sharing up to 16,384 tokens on H100 (NeMo 24.03, "Long Sequence Performance").
Sharing saves activations, which grow with the sequence; it costs exchanges of keys and values,
which are hidden less the fewer tokens a rank has.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpace:
    """The features of a runtime that a search varies.

    Attributes:
        name: name of the runtime in `zero.emulate`.
        stages: ZeRO stages of the runtime.
        has_replicas: True if states may be sharded over a node and replicated over nodes.
        has_pipeline: True if it supports pipeline stages.
        has_context: True if it supports ranks that share a sequence.
        has_experts: True if it distributes experts over ranks.
    """

    name: str
    stages: Sequence[int]
    has_replicas: bool = False
    has_pipeline: bool = False
    has_context: bool = False
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingGroup:
    """Settings that differ only in knobs of their runtime.

    Attributes:
        fleet: the GPUs.
        changes: values common to all settings, without those of the fleet.
        knobs: additional values of each setting; the first setting has the defaults.
    """

    fleet: Fleet
    changes: Changes
    knobs: tuple[Changes, ...]

    @property
    def larger(self) -> tuple[frozenset[int], ...]:
        """For each setting, the indices of those with additional knobs that only add kept memory.

        A rank that shards nothing keeps its gradient in fp32 if it reduces every time, and in the
        format of kernels if it reduces once.
        """
        if self.changes["parallel.data"] == 1:
            return tuple(frozenset[int]() for _ in self.knobs)
        adds = self._keys(self._search.adds)
        pairs = [set(each.items()) for each in self.knobs]
        return tuple(
            frozenset(
                number
                for number, other in enumerate(pairs)
                if own < other and all(key in adds for key, _ in other - own)
            )
            for own in pairs
        )

    @property
    def leaner(self) -> tuple[int, ...]:
        """Settings with one knob that may exchange, copy or slow less than its default does."""
        return self._with_one_of(self._search.leaner)

    @property
    def lighter(self) -> tuple[int, ...]:
        """Settings with one knob that may keep less memory than its default does."""
        return self._with_one_of(self._search.lighter)

    @property
    def gathering_less(self) -> tuple[int, ...]:
        """Settings with one knob that may gather less over the tensor axis."""
        return self._with_one_of(self._search.gathers_less)

    def _with_one_of(self, options: frozenset[str]) -> tuple[int, ...]:
        keys = self._keys(options)
        return tuple(
            number
            for number, knobs in enumerate(self.knobs)
            if len(knobs) == 1 and knobs.keys() <= keys
        )

    @property
    def runtime(self) -> str:
        """Name of the runtime."""
        return str(self.changes["zero.emulate"])

    @property
    def degrees(self) -> tuple[object, object]:
        """Tensor and pipeline degrees."""
        return self.changes["parallel.tensor"], self.changes["parallel.pipeline"]

    @property
    def comes_first(self) -> bool:
        """True if every answer shows a plain setting of its runtime."""
        return self._search.comes_first

    @property
    def _search(self) -> SearchSpace:
        return search_of(self.runtime)

    def _keys(self, options: Iterable[str]) -> frozenset[str]:
        """Return the keys of options of the runtime."""
        return frozenset(f"zero.{self.runtime}.{name}" for name in options)

    def together(self, numbers: Sequence[int]) -> int | None:
        """Return the index of the setting with all knobs of `numbers`; None if there is none."""
        asked = {key: value for number in numbers for key, value in self.knobs[number].items()}
        return self.knobs.index(asked) if asked in self.knobs else None

    def setting(self, number: int) -> dict[str, object]:
        """Return all changes of one of its settings."""
        return {**self.fleet.changes, **self.changes, **self.knobs[number]}

    @property
    def moves_states(self) -> bool:
        """True if some states are not on the device, or checkpoints are not."""
        moved = self._keys(self._search.checkpoints_on_host)
        return any("offload" in key or key in moved for key in self.changes)

    @property
    def order(self) -> object:
        """Name of the order of the pipeline; None for the default."""
        option = self._search.order_option
        return None if option is None else self.changes.get(f"zero.{self.runtime}.{option}")

    @property
    def model_key(self) -> Hashable:
        """Key of groups whose models differ only in the micro-batch."""
        modes = (*self._search.tensor_modes, *self._search.compiled_tensor_modes)
        known = self._keys(name for mode in modes for name in mode)
        chosen = [(key, value) for key, value in self.changes.items() if key in known]
        sizes = [
            self.changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "context", "expert")
        ]
        fleet = self.fleet.gpus, *self.fleet.changes.items()
        is_split = self.changes["parallel.pipeline"] != 1
        return self.runtime, fleet, *sizes, is_split, *chosen

    @property
    def without_chunks(self) -> Changes:
        """The changes without the option that sets the layers of a chunk."""
        left_out = f"zero.{self.runtime}.{self._search.chunk_option}"
        return {key: value for key, value in self.changes.items() if key != left_out}

    @property
    def family(self) -> str:
        """Key of groups with similar traffic, whose times exceed bounds by similar factors."""
        runtime, stage = self.runtime, self.changes["zero.stage"]
        known = ("tensor", "pipeline", "context", "expert")
        axes = [self.changes.get(f"parallel.{axis}", 1) != 1 for axis in known]
        return f"{runtime} {stage} {axes} {self.order} {self.moves_states}"

    @property
    def likely(self) -> float:
        """Expected ratio of the step time to its bound, a rule of thumb to order the search.

        Bounds exclude most waits for collectives of a tensor axis, for keys and values, for tokens
        of experts, and for copies to hosts.
        """
        found = 1.02
        found += 0.02 if self.changes["parallel.tensor"] != 1 else 0.0
        found += 0.01 if self.changes["parallel.pipeline"] != 1 else 0.0
        found += 0.02 if self.changes.get("parallel.context", 1) != 1 else 0.0
        found += 0.02 if self.changes.get("parallel.expert", 1) != 1 else 0.0
        found += 0.25 if self.moves_states else 0.0
        return found + (0.05 if self._search.is_slow else 0.0)

    @property
    def cost(self) -> float:
        """Expected operations of a simulation, in multiples of one micro-batch.

        Of a pipeline more micro-batches are simulated, and of one with several chunks still more.
        Ranks that share a sequence exchange keys and values one by one.
        """
        stages = int(cast("int", self.changes["parallel.pipeline"]))
        context = int(cast("int", self.changes.get("parallel.context", 1)))
        steps = int(cast("int", self.changes["train.gradient_accumulation_steps"]))
        few = 3 if stages == 1 else stages + 1 if self.order is None else 3 * stages
        return min(few, steps) * (1 + 0.15 * (context - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSettings:
    """Settings that cannot run: the reason in one line, and their number."""

    why: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpace:
    """All settings that a search considers.

    Attributes:
        runtimes: the candidate runtimes.
        fleets: the candidate numbers of GPUs.
        sequences: sequences of a step, over all replicas.
        sequence_length: tokens of a sequence.
        layers: layers of the model, which the chunks of a stage must divide.
        experts: routed experts of a block; 0 for a dense model.
        compiles: True if blocks are compiled, which some modes of a tensor axis need.
        fixed: values by key that the search does not vary.
    """

    runtimes: Sequence[RuntimeSpace]
    fleets: Sequence[Fleet]
    sequences: int
    sequence_length: int
    layers: int
    experts: int = 0
    compiles: bool = False
    fixed: Changes

    def groups(self) -> Iterator[SettingGroup | RefusedSettings]:
        """Yield every group, and the settings that the batch rules out."""
        for fleet, runtime in product(self.fleets, self.runtimes):
            for stage in self._numbers("zero.stage", runtime.stages):
                yield from self._of_stage(fleet, runtime, stage)

    def _of_stage(
        self, fleet: Fleet, runtime: RuntimeSpace, stage: int
    ) -> Iterator[SettingGroup | RefusedSettings]:
        search = search_of(runtime.name)
        moves = (_keyed(runtime.name, each) for each in search.offloads.get(stage, ()))
        offloads: tuple[Changes, ...] = ({}, *moves)
        if any(key in self.fixed for each in offloads for key in each):
            offloads = ({},)
        for tensor in self._numbers("parallel.tensor", self._tensors(fleet, runtime)):
            for pipeline in self._numbers("parallel.pipeline", self._pipelines(fleet, runtime)):
                replicas = self._numbers("parallel.replicate", _replicates(fleet, runtime, stage))
                contexts = self._numbers("parallel.context", self._contexts(runtime))
                experts = self._numbers("parallel.expert", self._experts(fleet, runtime, pipeline))
                for replicate, context, expert in product(replicas, contexts, experts):
                    degrees = Degrees(
                        tensor=tensor,
                        pipeline=pipeline,
                        replicate=replicate,
                        context=context,
                        expert=expert,
                    )
                    if degrees.cuts_axes and "parallel.expert" not in self.fixed:
                        continue
                    every = self._knobs(fleet, runtime.name, stage, degrees)
                    base = {"zero.emulate": runtime.name, "zero.stage": stage}
                    outer = offloads if pipeline == 1 else offloads[:1]
                    inner = self._orders(runtime.name, pipeline)
                    modes = self._modes_of(runtime.name, tensor)
                    for offload, mode, order in product(outer, modes, inner):
                        changes = {**base, **offload, **mode, **order}
                        knobs = tuple(each for each in every if not each.keys() & order.keys())
                        yield from self._of_degrees(fleet, changes, degrees, knobs)

    def _of_degrees(
        self,
        fleet: Fleet,
        base: Changes,
        degrees: Degrees,
        knobs: tuple[Changes, ...],
    ) -> Iterator[SettingGroup | RefusedSettings]:
        modes = self._modes()
        if (data := degrees.data(fleet.gpus)) is None:
            yield from self._not_dealt_out(fleet, len(modes) * len(knobs))
            return
        replicas = data // degrees.context * degrees.replicate
        if self.sequences % replicas:
            count = len(modes) * len(knobs)
            why = f"a batch of {self.sequences:,} sequences is no multiple of {replicas:,} replicas"
            yield RefusedSettings(why=why, count=count)
            return
        share = self.sequences // replicas
        shares = degrees.context > 1 and "parallel.context" not in self.fixed
        # Twice the sequences on twice the ranks are the same work for each, plus an exchange.
        most = 1 if shares else share
        micros = self._numbers("train.micro_batch_size", powers(share, most))
        parallel: dict[str, object] = {
            "parallel.tensor": degrees.tensor,
            "parallel.pipeline": degrees.pipeline,
            "parallel.replicate": degrees.replicate,
            "parallel.data": data,
        }
        if shares:
            parallel["parallel.context"] = degrees.context
        parallel |= self._of_experts(degrees)
        runtime = str(base["zero.emulate"])
        options = _options(runtime, base)
        is_modeled = search_of(runtime).is_modeled
        axes = self._axes(fleet, int(cast("int", base["zero.stage"])), degrees)
        for mode, micro in product(modes, micros):
            if share % micro or not is_modeled(options, mode, axes):
                continue
            changes = {
                **base,
                **parallel,
                "activations.checkpointing": mode,
                "train.micro_batch_size": micro,
                "train.gradient_accumulation_steps": share // micro,
            }
            yield SettingGroup(fleet=fleet, changes=changes, knobs=knobs)
            moved = self._on_host(runtime, mode, degrees)
            if moved:
                yield SettingGroup(fleet=fleet, changes={**changes, **moved}, knobs=knobs[:1])

    def _on_host(self, runtime: str, mode: str, degrees: Degrees) -> Changes:
        """Return the options for checkpoints on the host; empty if there are none or fixed ones."""
        moved = _keyed(runtime, search_of(runtime).checkpoints_on_host)
        is_said = any(key in self.fixed for key in moved)
        return {} if mode != "full" or degrees.pipeline > 1 or is_said else moved

    def _not_dealt_out(self, fleet: Fleet, count: int) -> Iterator[RefusedSettings]:
        """Yield a refusal if fixed degrees do not divide the GPUs."""
        degrees = {
            axis: self._numbers(f"parallel.{axis}", (1,))[0]
            for axis in ("tensor", "pipeline", "replicate", "context", "expert")
        }
        if Degrees(**degrees).data(fleet.gpus) is None:
            said = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
            why = f"{fleet.gpus:,} GPUs cannot be dealt out to {said}"
            yield RefusedSettings(why=why, count=count)

    def _modes_of(self, runtime: str, tensor: int) -> Sequence[Changes]:
        """Return the modes of a tensor axis; only the default if a fixed value selects one."""
        search = search_of(runtime)
        compiled = search.compiled_tensor_modes if self.compiles else ()
        modes = [_keyed(runtime, each) for each in (*search.tensor_modes, *compiled)]
        if tensor == 1 or any(key in self.fixed for each in modes for key in each):
            return ({},)
        return modes

    def _orders(self, runtime: str, pipeline: int) -> Sequence[Changes]:
        """Return the orders of a pipeline that are not fixed to others, the default first."""
        search = search_of(runtime)
        if pipeline == 1 or search.order_option is None:
            return ({},)
        known = [_keyed(runtime, each) for each in search.orders(pipeline, self.layers)]
        found = [
            each
            for each in known
            if all(self.fixed.get(key, value) == value for key, value in each.items())
        ]
        is_fixed = f"zero.{runtime}.{search.order_option}" in self.fixed
        return tuple(found) or ({},) if is_fixed else ({}, *found)

    def _pipelines(self, fleet: Fleet, runtime: RuntimeSpace) -> Sequence[int]:
        return powers(fleet.gpus, fleet.gpus // 2) if runtime.has_pipeline else (1,)

    def _contexts(self, runtime: RuntimeSpace) -> Sequence[int]:
        """Return the numbers of ranks that may share a sequence, starting with 1.

        A rank has a part of each half, so a sequence has twice as many parts as ranks.
        """
        length = self.sequence_length
        found = [
            each for each in CONTEXTS if length % (2 * each) == 0 and length >= each * LEAST_PART
        ]
        return (1, *found) if runtime.has_context else (1,)

    def _tensors(self, fleet: Fleet, runtime: RuntimeSpace) -> Sequence[int]:
        """Return the degrees of the tensor axis, which blocks with experts have in few runtimes."""
        most = 1 if self.experts and not runtime.has_experts else fleet.gpus
        return powers(fleet.gpus_per_node, most)

    def _experts(self, fleet: Fleet, runtime: RuntimeSpace, pipeline: int) -> Sequence[int]:
        """Return the numbers of ranks over which the experts of a block may be distributed."""
        if not (self.experts and runtime.has_experts):
            return (1,)
        most = fleet.gpus // pipeline
        return [each for each in powers(self.experts, most) if most % each == 0]

    def _of_experts(self, degrees: Degrees) -> Changes:
        """Return the changes of expert ranks, whose busiest gets more tokens than the mean.

        With a tensor axis, its ranks have whole experts, as usual with many small ones.
        """
        found: dict[str, object] = {}
        if not self.experts or "parallel.expert" in self.fixed:
            return found
        if degrees.expert > 1:
            found["parallel.expert"] = degrees.expert
        if degrees.tensor > 1 and "parallel.expert_tensor" not in self.fixed:
            found["parallel.expert_tensor"] = 1
        if degrees.expert > 1 and not any(key.startswith("experts.") for key in self.fixed):
            found["experts.busiest"] = BUSIEST
        return found

    def _knobs(
        self, fleet: Fleet, runtime: str, stage: int, degrees: Degrees
    ) -> tuple[Changes, ...]:
        """Return all combinations of knob values, those with the fewest changes first."""
        search = search_of(runtime)
        found = search.knobs(self._axes(fleet, stage, degrees))
        axes = {
            name: values
            for name, values in found.items()
            if f"zero.{runtime}.{name}" not in self.fixed
        }
        choices: list[Options] = []
        for values in product(*axes.values()):
            pairs = zip(axes.items(), values, strict=True)
            choices.append({name: value for (name, known), value in pairs if value != known[0]})
        kept = sorted(filter(search.combines, choices), key=len)
        return tuple(_keyed(runtime, each) for each in kept)

    def _axes(self, fleet: Fleet, stage: int, degrees: Degrees) -> SearchedAxes:
        return SearchedAxes(
            stage=stage,
            nodes=fleet.nodes,
            gpus_per_node=fleet.gpus_per_node,
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            replicate=degrees.replicate,
            context=degrees.context,
            experts=self.experts,
            expert=degrees.expert,
        )

    def _modes(self) -> Sequence[str]:
        mode = self.fixed.get("activations.checkpointing")
        return CHECKPOINTING if mode is None else (str(mode),)

    def _numbers(self, key: str, values: Sequence[int]) -> Sequence[int]:
        return (int(cast("int", self.fixed[key])),) if key in self.fixed else values


def _keyed(runtime: str, options: Options) -> Changes:
    """Return options of a runtime by their keys in a scenario."""
    return {f"zero.{runtime}.{name}": value for name, value in options.items()}


def _options(runtime: str, changes: Changes) -> Options:
    """Return the options of a runtime among changes, by name."""
    prefix = f"zero.{runtime}."
    return {
        key.removeprefix(prefix): value for key, value in changes.items() if key.startswith(prefix)
    }


def powers(of: int, most: int) -> tuple[int, ...]:
    """Return the powers of two that divide `of` and are at most `most`, 1 first."""
    found = [1]
    while found[-1] * 2 <= most and of % (found[-1] * 2) == 0:
        found.append(found[-1] * 2)
    return tuple(found)


def _replicates(fleet: Fleet, runtime: RuntimeSpace, stage: int) -> Sequence[int]:
    """Return 1, and the number of nodes if shards may be those of a node."""
    hybrid = runtime.has_replicas and stage and fleet.nodes > 1
    return (1, fleet.nodes) if hybrid else (1,)
