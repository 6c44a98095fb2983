"""Settings among which the best one is sought: groups with common bounds, and knobs inside them.

A group says what a lower bound depends on: runtime, stage, degrees, offload, checkpointing and the
micro-batch. Knobs of the runtime make the settings of a group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

Changes = Mapping[str, object]
"""Values by key of a scenario: `{"zero.stage": 3}`."""

CHECKPOINTING = ("none", "operations", "full")
"""With flash attention, `selective` keeps what `none` does."""

STATES_ON_DRIVES: Changes = {"zero.deepspeed.sub_group_size": 100_000_000}
SHARDS_ON_DRIVES: Changes = {
    "zero.deepspeed.offload_param.buffer_count": 10,
    "zero.deepspeed.offload_param.buffer_size": 200_000_000,
}
"""Buffers for drives: the default sub-group takes 16 GB of host memory a rank, and five slots of
100 million elements are too few and too small for the embeddings of today."""

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
"""States further out than the device, by runtime and stage."""


SLOW = frozenset({"deepspeed", "nanotron"})
"""Runtimes whose schedules take several times as long to simulate as others."""


TENSOR_MODES: Mapping[str, Changes] = {
    "megatron": {"zero.megatron.sequence_parallel": True},
    "nanotron": {"zero.nanotron.tp_mode": "reduce_scatter"},
}
"""How a runtime cuts hidden states by tokens over the tensor axis, which takes less memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpace:
    """What a runtime can be asked for, as far as a search varies it.

    Attributes:
        name: as `zero.emulate` has it.
        stages: ZeRO stages that it has.
        has_replicas: whether states may be sharded over a node and replicated over the others.
        has_pipeline: whether it has stages of a pipeline.
    """

    name: str
    stages: Sequence[int]
    has_replicas: bool = False
    has_pipeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """GPUs of one kind: how many, how many of them are on a node, and the changes that say so."""

    gpus: int
    gpus_per_node: int
    changes: Changes = field(default_factory=dict[str, object])

    @property
    def nodes(self) -> int:
        """Nodes that the GPUs are on."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingGroup:
    """Settings that differ in knobs of their runtime alone.

    Attributes:
        fleet: what they run on.
        changes: what is common, without the fleet's.
        knobs: what each setting has on top; the first has the defaults.
    """

    fleet: Fleet
    changes: Changes
    knobs: tuple[Changes, ...]

    @property
    def larger(self) -> tuple[frozenset[int], ...]:
        """For each setting those of the same knobs and others that only add to its memory."""
        pairs = [set(each.items()) for each in self.knobs]
        return tuple(
            frozenset(
                number
                for number, other in enumerate(pairs)
                if own < other and all(key.partition(".")[2] in ADDS for key, _ in other - own)
            )
            for own in pairs
        )

    def setting(self, number: int) -> dict[str, object]:
        """Return all changes of one of its settings."""
        return {**self.fleet.changes, **self.changes, **self.knobs[number]}

    @property
    def moves_states(self) -> bool:
        """True if some states are not on the device."""
        return any("offload" in key for key in self.changes)

    @property
    def family(self) -> str:
        """Name of the groups whose times are as far above their bounds: those of like traffic."""
        runtime, stage = self.changes["zero.emulate"], self.changes["zero.stage"]
        axes = [self.changes[f"parallel.{axis}"] != 1 for axis in ("tensor", "pipeline")]
        return f"{runtime} {stage} {axes} {self.moves_states}"

    @property
    def likely(self) -> float:
        """How far times are above their bounds, as a rule of thumb: it only orders the search.

        Sums over a tensor axis and copies to hosts are exposed more than others. Schedules of many
        operations take long to simulate and are put off a little.
        """
        found = 1.03
        found += 0.25 if self.changes["parallel.tensor"] != 1 else 0.0
        found += 0.1 if self.changes["parallel.pipeline"] != 1 else 0.0
        found += 0.25 if self.moves_states else 0.0
        return found + (0.03 if self.changes["zero.emulate"] in SLOW else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSettings:
    """Settings that cannot be, in one line why, and how many they are."""

    why: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpace:
    """All settings that are considered.

    Attributes:
        runtimes: among which is chosen.
        fleets: GPUs that may be used.
        sequences: of a step, over all replicas.
        fixed: values by key that are not sought.
    """

    runtimes: Sequence[RuntimeSpace]
    fleets: Sequence[Fleet]
    sequences: int
    fixed: Changes

    def groups(self) -> Iterator[SettingGroup | RefusedSettings]:
        """Yield every group, and what cannot be because of the batch."""
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
                for replicate in replicas:
                    degrees = (tensor, pipeline, replicate)
                    knobs = self._knobs(fleet, runtime.name, stage, degrees)
                    base = {"zero.emulate": runtime.name, "zero.stage": stage}
                    for offload, mode in product(offloads, self._modes_of(runtime.name, tensor)):
                        changes = {**base, **offload, **mode}
                        yield from self._of_degrees(fleet, changes, degrees, knobs)

    def _of_degrees(
        self,
        fleet: Fleet,
        base: Changes,
        degrees: tuple[int, int, int],
        knobs: tuple[Changes, ...],
    ) -> Iterator[SettingGroup | RefusedSettings]:
        tensor, pipeline, replicate = degrees
        modes = self._modes()
        each = tensor * pipeline * replicate
        if fleet.gpus % each:
            return
        data = fleet.gpus // each
        if replicate > 1 and data == 1:  # nothing would be sharded
            return
        replicas = data * replicate
        if self.sequences % replicas:
            count = len(modes) * len(knobs)
            why = f"a batch of {self.sequences:,} sequences is no multiple of {replicas:,} replicas"
            yield RefusedSettings(why=why, count=count)
            return
        share = self.sequences // replicas
        micros = self._numbers("train.micro_batch_size", powers(share, share))
        parallel: dict[str, object] = {
            "parallel.tensor": tensor,
            "parallel.pipeline": pipeline,
            "parallel.replicate": replicate,
            "parallel.data": data,
        }
        for mode, micro in product(modes, micros):
            if share % micro:
                continue
            changes = {
                **base,
                **parallel,
                "activations.checkpointing": mode,
                "train.micro_batch_size": micro,
                "train.gradient_accumulation_steps": share // micro,
            }
            yield SettingGroup(fleet=fleet, changes=changes, knobs=knobs)

    def _modes_of(self, runtime: str, tensor: int) -> Sequence[Changes]:
        """Return the ways in which a tensor axis works, unless a setting says which."""
        cut = TENSOR_MODES.get(runtime, {})
        if tensor == 1 or not cut or any(key in self.fixed for key in cut):
            return ({},)
        return ({}, cut)

    def _pipelines(self, fleet: Fleet, runtime: RuntimeSpace) -> Sequence[int]:
        return powers(fleet.gpus, fleet.gpus // 2) if runtime.has_pipeline else (1,)

    def _knobs(
        self, fleet: Fleet, runtime: str, stage: int, degrees: tuple[int, int, int]
    ) -> tuple[Changes, ...]:
        """Return every choice of the knobs, those that change least first."""
        found = KNOBS.get(runtime, _no_knobs)(fleet, stage, degrees)
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
    """Tell whether knobs go together: Megatron-LM gathers ahead only where it reduces so."""
    gathers, reduces = (
        choice.get(f"zero.megatron.overlap_{name}", False)
        for name in ("param_gather", "grad_reduce")
    )
    return bool(reduces) or not gathers


def powers(of: int, most: int) -> tuple[int, ...]:
    """Return the powers of two that divide `of` and are no more than `most`, 1 first."""
    found = [1]
    while found[-1] * 2 <= most and of % (found[-1] * 2) == 0:
        found.append(found[-1] * 2)
    return tuple(found)


def _replicates(fleet: Fleet, runtime: RuntimeSpace, stage: int) -> Sequence[int]:
    """Return 1, and where the shards are those of a node the number of nodes."""
    hybrid = runtime.has_replicas and stage and fleet.nodes > 1
    return (1, fleet.nodes) if hybrid else (1,)


Knobs = Mapping[str, Sequence[object]]
"""Values of options by name; the first is the default, which is not written down."""


def _no_knobs(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    del fleet, stage, degrees
    return {}


def _fsdp1(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    del fleet, stage, degrees
    return {
        "sharding_strategy": ("full_shard", "shard_grad_op"),
        "forward_prefetch": (False, True),
        "limit_all_gathers": (True, False),
        "no_sync": (False, True),
    }


def _fsdp2(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    del stage
    tensor, _, replicate = degrees
    inner = fleet.gpus_per_node // tensor
    spreads = fleet.nodes > 1 and replicate == 1 and inner > 1
    return {
        "reshard_after_forward": (True, False, *((inner,) if spreads else ())),
        "gradient_sync": ("every", "last"),
        "forward_prefetch": (0, 1, 2),
    }


def _deepspeed(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    found: dict[str, Sequence[object]] = {"reduce_bucket_size": (500_000_000, 50_000_000)}
    inner = fleet.gpus_per_node // degrees[0]
    if stage < 3:
        return {**found, "overlap_comm": (False, True)}
    if fleet.nodes > 1 and inner > 1:
        found["zero_hpz_partition_size"] = (1, inner)
    return {
        **found,
        "stage3_prefetch_bucket_size": (50_000_000, 500_000_000),
        "stage3_max_live_parameters": (1_000_000_000, 5_000_000_000),
        "stage3_max_reuse_distance": (1_000_000_000, 5_000_000_000),
    }


def _megatron(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    del fleet, stage, degrees
    return {"overlap_grad_reduce": (False, True), "overlap_param_gather": (False, True)}


def _nanotron(fleet: Fleet, stage: int, degrees: tuple[int, int, int]) -> Knobs:
    del fleet, stage
    if degrees[0] == 1:
        return {}
    return {"tp_recompute_allgather": (True, False)}


ADDS = frozenset(
    {
        "fsdp2.reshard_after_forward",
        "fsdp2.gradient_sync",
        "fsdp2.forward_prefetch",
        "nanotron.tp_recompute_allgather",
    }
)
"""Options whose other values keep more in memory, or for longer, than their defaults do.

The peak of a small model may come out less than a thousandth lower all the same. What fits by so
little is at the edge of memory, which is ranked last.
"""


KNOBS: Mapping[str, Callable[[Fleet, int, tuple[int, int, int]], Knobs]] = {
    "deepspeed": _deepspeed,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
    "nanotron": _nanotron,
}
"""Options of each runtime that a search varies; one that is not here has its defaults."""
