"""Model states, which persist from step to step, and the setup that fills them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zsim.dtype import DType
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind, Scalar
from zsim.schedule.schedule_writer import (
    CPU,
    HOST_POOL,
    NVME_POOL,
    NVME_WRITE,
    POOL,
    ScheduleWriter,
)
from zsim.strategy.offload import MemoryTier
from zsim.strategy.optimizer_rule import scale_elements
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets

LOSS_SCALE = "loss_scale"
GOOD_STEPS = "good_steps"
SKIPPED_STEPS = "skipped_steps"
STEP = "step"
WARM_UP = "warm_up"

KEPT = {
    MemoryTier.DEVICE: (POOL, COMPUTE),
    MemoryTier.HOST: (HOST_POOL, CPU),
    MemoryTier.NVME: (NVME_POOL, NVME_WRITE),
}
"""Pool and home stream of buffers kept in a tier."""


def scalars(strategy: Strategy) -> tuple[Scalar, ...]:
    """Return the host's scalars: the step count; with fp16, the loss scale and its counters.

    Learning rates are added if they are set for each step, and the remaining warm-up steps if
    updates are delayed.
    """
    steps = [Scalar(name=STEP, initial=0.0)]
    rules = (strategy.train.optimizer, *(group.rule for group in strategy.train.groups))
    rates = dict.fromkeys(rule.learning_rate for rule in rules)
    steps += [Scalar(name=rate, initial=0.0, given=True) for rate in rates if isinstance(rate, str)]
    if strategy.offload.warm_up_steps:
        steps.append(Scalar(name=WARM_UP, initial=float(strategy.offload.warm_up_steps)))
    if strategy.train.precision is not Precision.FP16:
        return tuple(steps)
    return (
        *steps,
        Scalar(name=LOSS_SCALE, initial=strategy.train.loss_scale.initial),
        Scalar(name=GOOD_STEPS, initial=0.0),
        Scalar(name=SKIPPED_STEPS, initial=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Dtypes of the persistent buffers of every bucket, and whether each is whole or a shard.

    Attributes:
        parameter: dtype of the parameters, which are updated in place if there are no masters.
        parameter_sharded: True if a rank holds only its shard of the parameters.
        optimizer_sharded: True if a rank holds only its shard of masters and moments, which are in
            the optimizer's dtype.
        has_master: True if masters are kept in addition to the parameters.
        parameter_tier: tier of the parameters.
        optimizer_tier: tier of masters and moments.
        frozen: dtype of frozen parameters if it differs.
        file_elements: masters and moments of smaller shards are kept on the host, not in files.
        host_parameters: buckets whose parameters are kept on the host, not in files.
        narrow_parameters: buckets whose parameters are in 8 bits.
        shards: buckets of whose parameters a rank holds only its shard.
        device_optimizer: buckets whose masters and moments stay on the device in spite of the tier.
    """

    parameter: DType
    parameter_sharded: bool = False
    optimizer_sharded: bool = True
    has_master: bool = False
    frozen: DType | None = None
    parameter_tier: MemoryTier = MemoryTier.DEVICE
    optimizer_tier: MemoryTier = MemoryTier.DEVICE
    file_elements: int = 0
    host_parameters: frozenset[int] = frozenset()
    narrow_parameters: frozenset[int] = frozenset()
    shards: frozenset[int] = frozenset()
    device_optimizer: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """Names of a bucket's persistent buffers.

    Attributes:
        parameter: the rank's shard or the whole bucket, as set in its `Holding`.
        master: master weights, or None; frozen parameters have none.
        moments: one for each moment of the optimizer; empty for frozen parameters.
        tier: where masters and moments are kept and updated.
        scales: scales of blocks, if moments are in 8 bits.
    """

    parameter: str
    master: str | None
    moments: tuple[str, ...]
    tier: MemoryTier
    scales: tuple[str, ...] = ()


@dataclass(slots=True)
class Reduced:
    """A bucket's reduced gradients: the buffer, and the operation that completes it."""

    buffer: str
    operation: str


def declare(
    writer: ScheduleWriter, strategy: Strategy, bucket: Bucket, holding: Holding
) -> BucketState:
    """Declare the persistent buffers of a bucket."""

    def buffer(name: str, dtype: DType, kind: Kind, *, sharded: bool, tier: MemoryTier) -> str:
        pool, home = KEPT[tier]
        if sharded:
            return bucket.shard_buffer(writer, name, dtype, kind, pool=pool, home=home)
        return bucket.buffer(writer, name, dtype, kind, layout=bucket.plain, pool=pool, home=home)

    sharded, kept = holding.optimizer_sharded, strategy.kept_formats
    at, updated_at = holding.parameter_tier, holding.optimizer_tier
    if bucket.index in holding.device_optimizer:
        updated_at = MemoryTier.DEVICE
    if updated_at is MemoryTier.NVME and bucket.shard < holding.file_elements:
        updated_at = MemoryTier.HOST
    if at is MemoryTier.NVME and bucket.index in holding.host_parameters:
        at = MemoryTier.HOST
    dtype = holding.frozen if bucket.frozen and holding.frozen else holding.parameter
    if bucket.index in holding.narrow_parameters:
        dtype = DType.FP8
    if bucket.quantized is not None:
        dtype = DType.NF4
    is_cut = holding.parameter_sharded or bucket.index in holding.shards
    name = buffer("parameter", dtype, Kind.PARAMETER, sharded=is_cut, tier=at)
    if bucket.frozen:
        scales = _frozen_scales(writer, bucket)
        return BucketState(parameter=name, master=None, moments=(), tier=updated_at, scales=scales)
    master = None
    if holding.has_master:
        master = buffer("master", kept.master, Kind.MASTER, sharded=sharded, tier=updated_at)
    quantized = strategy.train.optimizer.quantized
    moments = tuple(
        buffer(
            f"moment{number}",
            DType.INT8 if quantized else dtype,
            Kind.MOMENT,
            sharded=sharded,
            tier=updated_at,
        )
        for number, dtype in enumerate(kept.moments, 1)
    )
    scales = _scales(writer, bucket, moments, sharded=sharded) if quantized else ()
    return BucketState(
        parameter=name, master=master, moments=moments, tier=updated_at, scales=scales
    )


def _frozen_scales(writer: ScheduleWriter, bucket: Bucket) -> tuple[str, ...]:
    """Declare the scales of weights in 4 bits, if these are."""
    if bucket.quantized is None:
        return ()
    size_bytes = sum(bucket.quantized.scale_bytes(piece.size) for piece in bucket.layout.pieces)
    name = f"{bucket.name}/scales"
    return (writer.buffer(name, size_bytes, DType.INT8, Kind.PARAMETER),)


def _scales(
    writer: ScheduleWriter, bucket: Bucket, moments: tuple[str, ...], *, sharded: bool
) -> tuple[str, ...]:
    """Declare the scales of 8-bit moments, of a rank's shard or of each parameter."""
    tensors = [bucket.shard] if sharded else [piece.size for piece in bucket.layout.pieces]
    elements = scale_elements(tensors)
    return tuple(
        writer.buffer(f"{moment}/scales", elements, DType.FP32, Kind.MOMENT) for moment in moments
    )


def own_view(writer: ScheduleWriter, bucket: Bucket, buffer: str) -> View:
    """Return the view of the rank's shard in a buffer of the shard or of the whole bucket."""
    if writer.buffers[buffer].shard is not None:
        return writer.all(buffer)
    return View(buffer=buffer, size=bucket.shard, axis=bucket.axis)


def updated_view(writer: ScheduleWriter, bucket: Bucket, buffer: str, strategy: Strategy) -> View:
    """Return the view that a rank updates: the whole buffer in stage 0, otherwise its shard."""
    return writer.all(buffer) if strategy.zero.stage == 0 else own_view(writer, bucket, buffer)


def update_path(
    bucket: Bucket,
    strategy: Strategy,
    *,
    has_master: bool | None = None,
    tier: MemoryTier | None = None,
) -> str:
    """Return the id of the operation that writes a bucket's updated parameters to their tier.

    It is the move to that tier if masters are updated in another tier, else the cast if there are
    masters, else the update. `has_master` and `tier`, where masters are updated, default to the
    values of `strategy`.
    """
    casts = strategy.keeps_master if has_master is None else has_master
    verb = "cast" if casts else "update"
    updated_at = strategy.offload.optimizer if tier is None else tier
    if strategy.offload.parameters is MemoryTier.NVME:
        verb = "write"
    elif updated_at is not strategy.offload.parameters is MemoryTier.DEVICE:
        verb = "upload"
    return f"step/update/{bucket.name}/{verb}"


def gather_path(bucket: Bucket) -> str:
    """Return the id of the gather of a bucket's updated parameters (stages 1 and 2)."""
    return f"step/update/{bucket.name}/gather"


def write_setup(
    writer: ScheduleWriter, strategy: Strategy, buckets: Buckets, holding: Holding
) -> tuple[BucketState, ...]:
    """Allocate and fill all persistent buffers; return the state of each bucket."""
    states: list[BucketState] = []
    for bucket in buckets.all:
        writer.prefix = f"setup/{bucket.name}"
        state = declare(writer, strategy, bucket, holding)
        states.append(state)
        _initialize(writer, state.parameter, Role.PARAMETER)
        if state.master is not None:
            _initialize(writer, state.master, Role.MASTER)
        for moment in state.moments:
            _persist(writer, moment, partial(_zeros, writer, f"zero/{moment}"))
        for scales in state.scales:
            persist_zeros(writer, scales, scales)
    return tuple(states)


def persist_zeros(writer: ScheduleWriter, buffer: str, name: str) -> None:
    """Allocate a buffer that persists through all steps, and fill it with zeros."""
    writer.fill(f"zero/{name}", writer.persist(buffer), 0.0)


def _initialize(writer: ScheduleWriter, buffer: str, role: Role) -> None:
    def fill(name: str, stream: str) -> str:
        operands = [(role, writer.all(name))]
        return writer.compute(f"initialize/{role}", Action.INITIALIZE, operands, stream=stream)

    _persist(writer, buffer, fill)


def _zeros(writer: ScheduleWriter, path: str, name: str, stream: str) -> str:
    return writer.fill(path, name, 0.0, stream=stream)


def _persist(writer: ScheduleWriter, name: str, fill: Callable[[str, str], str]) -> None:
    """Allocate a persistent buffer and `fill` it; a file is filled through host memory."""
    kept = writer.buffers[name]
    writer.persist(name)
    if kept.pool != NVME_POOL:
        fill(name, CPU if kept.pool == HOST_POOL else COMPUTE)
        return
    first = writer.buffer(
        f"{name}/first",
        kept.elements,
        kept.dtype,
        kept.kind,
        pool=HOST_POOL,
        home=CPU,
        layout=kept.layout,
        shard=kept.shard,
    )
    writer.allocate(first)
    filled = fill(first, CPU)
    written = writer.write_file(f"write/{name}", first, name, stream=NVME_WRITE, after=(filled,))
    writer.free(first, uses=(written,))
