"""Settings that a search considers: groups with a common lower bound, and knobs inside them.

A group fixes the values that its lower bound depends on: runtime, stage, degrees, offload,
checkpointing and micro-batch. Knobs of the runtime distinguish the settings of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

from zsim.planner.fleet import Changes, Degrees, Fleet
from zsim.planner.knob_effects import ADDS, GATHERING_LESS, LEANER
from zsim.planner.pipeline_orders import goes_with, order_of, orders
from zsim.planner.runtime_knobs import KNOBS, no_knobs

CHECKPOINTING = ("none", "operations", "full")
"""With flash attention, `selective` keeps the same activations as `none`."""

STATES_ON_DRIVES: Changes = {"zero.deepspeed.sub_group_size": 100_000_000}
SHARDS_ON_DRIVES: Changes = {
    "zero.deepspeed.offload_param.buffer_count": 10,
    "zero.deepspeed.offload_param.buffer_size": 200_000_000,
}
"""Buffers for drives: the default sub-group uses 16 GB of host memory per rank, and five slots of
100 million elements are too few and too small for current embeddings."""

OFFLOADS: Mapping[tuple[str, int], tuple[Changes, ...]] = {
    ("fsdp2", 3): ({"zero.fsdp2.offload_policy": "cpu"},),
    ("deepspeed", 1): ({"zero.deepspeed.offload_optimizer.device": "cpu"},),
    ("deepspeed", 2): ({"zero.deepspeed.offload_optimizer.device": "cpu"},),
    ("deepspeed", 3): tuple(
        {
            "zero.deepspeed.offload_optimizer.device": optimizer,
            "zero.deepspeed.offload_param.device": parameters,
            **(STATES_ON_DRIVES if optimizer == "nvme" else {}),
            **(SHARDS_ON_DRIVES if parameters == "nvme" else {}),
        }
        for optimizer, parameters in (
            ("cpu", "none"),
            ("cpu", "cpu"),
            ("nvme", "none"),
            ("nvme", "cpu"),
            ("nvme", "nvme"),
        )
    ),
}
"""States on the host or on drives, by runtime and stage; no runtime supports them in a pipeline."""


CHECKPOINTS_ON_HOST: Mapping[str, Changes] = {
    "fsdp1": {"zero.fsdp1.offload_wrapper": True},
    "fsdp2": {"zero.fsdp2.offload_wrapper": True},
    "deepspeed": {"zero.deepspeed.cpu_checkpointing": True},
}
"""Options of a runtime for checkpoints of blocks in host memory.

A search tries them without a pipeline, and with default knobs: they are for settings that otherwise
do not fit, and their copies cost more than any knob.
"""


SLOW = frozenset({"deepspeed", "nanotron"})
"""Runtimes whose schedules take several times as long to simulate as others."""


BESIDE_PRODUCTS: Changes = {"zero.megatron.async_tensor_model_parallel_allreduce": True}
"""Default of Megatron-LM."""

TENSOR_MODES: Mapping[str, tuple[Changes, ...]] = {
    "megatron": (
        BESIDE_PRODUCTS,
        {"zero.megatron.sequence_parallel": True, **BESIDE_PRODUCTS},
        {"zero.megatron.sequence_parallel": True, "zero.megatron.tp_comm_overlap": True},
    ),
    "nanotron": ({}, {"zero.nanotron.tp_mode": "reduce_scatter"}),
}
"""Modes of the tensor axis: hidden states whole, or cut by tokens, which needs less memory; and
products that overlap their collectives."""

COMPILED_TENSOR_MODES: Mapping[str, tuple[Changes, ...]] = {
    "fsdp2": ({"zero.fsdp2.enable_async_tensor_parallel": True},),
}
"""Additional modes of the tensor axis if blocks are compiled."""


CONTEXTS = (2, 4, 8)
"""Numbers of ranks that may share a sequence; set `parallel.context` for more."""

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
    """

    name: str
    stages: Sequence[int]
    has_replicas: bool = False
    has_pipeline: bool = False
    has_context: bool = False


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
        pairs = [set(each.items()) for each in self.knobs]
        return tuple(
            frozenset(
                number
                for number, other in enumerate(pairs)
                if own < other and all(key.partition(".")[2] in ADDS for key, _ in other - own)
            )
            for own in pairs
        )

    @property
    def leaner(self) -> tuple[int, ...]:
        """Settings with one knob that may communicate, copy or slow kernels less than default."""
        return self._with_one_of(LEANER)

    @property
    def gathering_less(self) -> tuple[int, ...]:
        """Settings with one knob that may gather less over the tensor axis."""
        return self._with_one_of(GATHERING_LESS)

    def _with_one_of(self, options: frozenset[str]) -> tuple[int, ...]:
        return tuple(
            number
            for number, knobs in enumerate(self.knobs)
            if len(knobs) == 1 and all(key.partition(".")[2] in options for key in knobs)
        )

    def together(self, numbers: Sequence[int]) -> int | None:
        """Return the index of the setting with all knobs of `numbers`; None if there is none."""
        asked = {key: value for number in numbers for key, value in self.knobs[number].items()}
        return self.knobs.index(asked) if asked in self.knobs else None

    def setting(self, number: int) -> dict[str, object]:
        """Return all changes of one of its settings."""
        return {**self.fleet.changes, **self.changes, **self.knobs[number]}

    @property
    def moves_states(self) -> bool:
        """True if some states or checkpoints are not on the device."""
        moved = {key for each in CHECKPOINTS_ON_HOST.values() for key in each}
        return any("offload" in key or key in moved for key in self.changes)

    @property
    def family(self) -> str:
        """Key of groups with similar traffic, whose times exceed bounds by similar factors."""
        runtime, stage = self.changes["zero.emulate"], self.changes["zero.stage"]
        known = ("tensor", "pipeline", "context")
        axes = [self.changes.get(f"parallel.{axis}", 1) != 1 for axis in known]
        return f"{runtime} {stage} {axes} {order_of(self.changes)} {self.moves_states}"

    @property
    def likely(self) -> float:
        """Expected ratio of the step time to its bound, a rule of thumb to order the search.

        Reductions over a tensor axis and copies to hosts are exposed more than other communication;
        bounds exclude exchanges of keys and values. Schedules of many operations take long to
        simulate and get a slightly lower priority.
        """
        found = 1.03
        found += 0.25 if self.changes["parallel.tensor"] != 1 else 0.0
        found += 0.1 if self.changes["parallel.pipeline"] != 1 else 0.0
        found += 0.1 if self.changes.get("parallel.context", 1) != 1 else 0.0
        found += 0.25 if self.moves_states else 0.0
        return found + (0.03 if self.changes["zero.emulate"] in SLOW else 0.0)


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
        compiles: True if blocks are compiled, which some modes of a tensor axis need.
        fixed: values by key that the search does not vary.
    """

    runtimes: Sequence[RuntimeSpace]
    fleets: Sequence[Fleet]
    sequences: int
    sequence_length: int
    layers: int
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
        offloads: tuple[Changes, ...] = ({}, *OFFLOADS.get((runtime.name, stage), ()))
        if any(key in self.fixed for each in offloads for key in each):
            offloads = ({},)
        for tensor in self._numbers("parallel.tensor", powers(fleet.gpus_per_node, fleet.gpus)):
            for pipeline in self._numbers("parallel.pipeline", self._pipelines(fleet, runtime)):
                replicas = self._numbers("parallel.replicate", _replicates(fleet, runtime, stage))
                contexts = self._numbers("parallel.context", self._contexts(runtime))
                for replicate, context in product(replicas, contexts):
                    degrees = Degrees(
                        tensor=tensor, pipeline=pipeline, replicate=replicate, context=context
                    )
                    every = self._knobs(fleet, runtime.name, stage, degrees)
                    base = {"zero.emulate": runtime.name, "zero.stage": stage}
                    outer = offloads if pipeline == 1 else offloads[:1]
                    inner = orders(
                        runtime.name, pipeline=pipeline, layers=self.layers, fixed=self.fixed
                    )
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
        for mode, micro in product(modes, micros):
            if share % micro or not goes_with(base, checkpoints=mode, context=degrees.context):
                continue
            changes = {
                **base,
                **parallel,
                "activations.checkpointing": mode,
                "train.micro_batch_size": micro,
                "train.gradient_accumulation_steps": share // micro,
            }
            yield SettingGroup(fleet=fleet, changes=changes, knobs=knobs)
            moved = self._on_host(str(base["zero.emulate"]), mode, degrees)
            if moved:
                yield SettingGroup(fleet=fleet, changes={**changes, **moved}, knobs=knobs[:1])

    def _on_host(self, runtime: str, mode: str, degrees: Degrees) -> Changes:
        """Return the options for checkpoints on the host; empty if there are none or fixed ones."""
        moved = CHECKPOINTS_ON_HOST.get(runtime, {})
        is_said = any(key in self.fixed for key in moved)
        return {} if mode != "full" or degrees.pipeline > 1 or is_said else moved

    def _not_dealt_out(self, fleet: Fleet, count: int) -> Iterator[RefusedSettings]:
        """Yield a refusal if fixed degrees do not divide the GPUs."""
        degrees = {
            axis: self._numbers(f"parallel.{axis}", (1,))[0]
            for axis in ("tensor", "pipeline", "replicate", "context")
        }
        if Degrees(**degrees).data(fleet.gpus) is None:
            said = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
            why = f"{fleet.gpus:,} GPUs cannot be dealt out to {said}"
            yield RefusedSettings(why=why, count=count)

    def _modes_of(self, runtime: str, tensor: int) -> Sequence[Changes]:
        """Return the modes of a tensor axis; only the default if a fixed value selects one."""
        modes = TENSOR_MODES.get(runtime, ({},))
        if self.compiles:
            modes = (*modes, *COMPILED_TENSOR_MODES.get(runtime, ()))
        if tensor == 1 or any(key in self.fixed for each in modes for key in each):
            return ({},)
        return modes

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

    def _knobs(
        self, fleet: Fleet, runtime: str, stage: int, degrees: Degrees
    ) -> tuple[Changes, ...]:
        """Return all combinations of knob values, those with the fewest changes first."""
        found = KNOBS.get(runtime, no_knobs)(fleet, stage, degrees)
        axes = {
            f"zero.{runtime}.{name}": values
            for name, values in found.items()
            if f"zero.{runtime}.{name}" not in self.fixed
        }
        choices: list[dict[str, object]] = []
        for values in product(*axes.values()):
            pairs = zip(axes.items(), values, strict=True)
            choices.append({key: value for (key, known), value in pairs if value != known[0]})
        return tuple(sorted(filter(_may_be, choices), key=len))

    def _modes(self) -> Sequence[str]:
        mode = self.fixed.get("activations.checkpointing")
        return CHECKPOINTING if mode is None else (str(mode),)

    def _numbers(self, key: str, values: Sequence[int]) -> Sequence[int]:
        return (int(cast("int", self.fixed[key])),) if key in self.fixed else values


def _may_be(choice: Changes) -> bool:
    """Return True if knobs are compatible: overlap_param_gather needs overlap_grad_reduce."""
    gathers, reduces = (
        choice.get(f"zero.megatron.overlap_{name}", False)
        for name in ("param_gather", "grad_reduce")
    )
    return bool(reduces) or not gathers


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
