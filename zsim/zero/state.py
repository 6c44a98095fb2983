"""What lives from step to step: parameters, masters, moments; and setup, which fills them."""

from zsim.operation import Action, Compute, Fill, Operand, Role, View
from zsim.rule import Adam
from zsim.schedule import Kind, Scalar
from zsim.strategy import Precision, Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.draft import COMPUTE, Draft

LOSS_SCALE = "loss_scale"
GOOD_STEPS = "good_steps"
SKIPPED_STEPS = "skipped_steps"
STEP = "step"


def scalars(strategy: Strategy) -> tuple[Scalar, ...]:
    """What every host counts: steps taken and, with fp16, the loss scale and what moves it."""
    steps = (Scalar(name=STEP, initial=0.0),)
    if strategy.precision is not Precision.FP16:
        return steps
    return (
        *steps,
        Scalar(name=LOSS_SCALE, initial=strategy.loss_scale.initial),
        Scalar(name=GOOD_STEPS, initial=0.0),
        Scalar(name=SKIPPED_STEPS, initial=0.0),
    )


def parameter_buffer(draft: Draft, bucket: Bucket, strategy: Strategy) -> str:
    """Parameters in the compute format: the rank's shard in stage 3, whole otherwise."""
    sharded = strategy.stage == 3
    return draft.buffer(
        f"{bucket.name}/parameter",
        bucket.shard if sharded else bucket.padded,
        strategy.precision.compute,
        Kind.PARAMETER,
        layout=bucket.name,
        shard="data" if sharded else None,
    )


def master_buffer(draft: Draft, bucket: Bucket, strategy: Strategy) -> str:
    """fp32 master weights: the rank's shard, or whole in stage 0."""
    return _optimizer_buffer(draft, bucket, strategy, name="master", kind=Kind.MASTER)


def moment_buffers(draft: Draft, bucket: Bucket, strategy: Strategy) -> tuple[str, ...]:
    """First and second moments for Adam, nothing for SGD."""
    if not isinstance(strategy.optimizer, Adam):
        return ()
    return tuple(
        _optimizer_buffer(draft, bucket, strategy, name=f"moment{number}", kind=Kind.MOMENT)
        for number in (1, 2)
    )


def _optimizer_buffer(
    draft: Draft, bucket: Bucket, strategy: Strategy, *, name: str, kind: Kind
) -> str:
    sharded = strategy.stage > 0
    return draft.buffer(
        f"{bucket.name}/{name}",
        bucket.shard if sharded else bucket.padded,
        strategy.precision.optimizer,
        kind,
        layout=bucket.name,
        shard="data" if sharded else None,
    )


def own_view(draft: Draft, bucket: Bucket, buffer: str) -> View:
    """The rank's own shard of a buffer, which holds the shard alone or the whole bucket."""
    if draft.buffers[buffer].shard is not None:
        return draft.all(buffer)
    return View(buffer=buffer, size=bucket.shard, axis="data")


def updated_view(draft: Draft, bucket: Bucket, buffer: str, strategy: Strategy) -> View:
    """What a rank updates of a buffer: everything in stage 0, its own shard otherwise."""
    return draft.all(buffer) if strategy.stage == 0 else own_view(draft, bucket, buffer)


def update_path(bucket: Bucket, strategy: Strategy) -> str:
    """The id of the operation that writes a bucket's updated parameters."""
    return f"step/update/{bucket.name}/{'cast' if strategy.precision.has_master else 'update'}"


def gather_path(bucket: Bucket) -> str:
    """The id of the gather of a bucket's updated parameters (stages 1 and 2)."""
    return f"step/update/{bucket.name}/gather"


def write_setup(draft: Draft, strategy: Strategy, buckets: Buckets) -> None:
    """Allocate and fill everything that is persistent."""
    for bucket in buckets.all:
        draft.prefix = f"setup/{bucket.name}"
        parameter = parameter_buffer(draft, bucket, strategy)
        _persist(draft, parameter)
        _initialize(draft, parameter, Role.PARAMETER)
        if strategy.precision.has_master:
            master = master_buffer(draft, bucket, strategy)
            _persist(draft, master)
            _initialize(draft, master, Role.MASTER)
        for moment in moment_buffers(draft, bucket, strategy):
            _persist(draft, moment)
            draft.add(
                Fill(
                    id=draft.path(f"zero/{moment}"),
                    stream=COMPUTE,
                    target=draft.all(moment),
                    value=0.0,
                )
            )


def _persist(draft: Draft, buffer: str) -> None:
    draft.persistent.append(buffer)
    draft.allocate(buffer)


def _initialize(draft: Draft, buffer: str, role: Role) -> None:
    draft.add(
        Compute(
            id=draft.path(f"initialize/{role}"),
            stream=COMPUTE,
            action=Action.INITIALIZE,
            operands=(Operand(role=role, view=draft.all(buffer)),),
        )
    )
