"""What lives from step to step: parameters, masters, moments; and setup, which fills them."""

from dataclasses import dataclass

from zsim.dtype import DType
from zsim.schedule.operation import Action, Compute, Fill, Operand, Role, View
from zsim.schedule.schedule import Kind, Scalar
from zsim.strategy.strategy import Precision, Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.writer import COMPUTE, DATA, Draft

LOSS_SCALE = "loss_scale"
GOOD_STEPS = "good_steps"
SKIPPED_STEPS = "skipped_steps"
STEP = "step"


def scalars(strategy: Strategy) -> tuple[Scalar, ...]:
    """Return the numbers of every host: steps taken; with fp16, the loss scale and its counters.

    The learning rate stands beside them if it is given anew for each step.
    """
    steps = [Scalar(name=STEP, initial=0.0)]
    rules = (strategy.optimizer, *(group.rule for group in strategy.groups))
    rates = dict.fromkeys(rule.learning_rate for rule in rules)
    steps += [Scalar(name=rate, initial=0.0, given=True) for rate in rates if isinstance(rate, str)]
    if strategy.precision is not Precision.FP16:
        return tuple(steps)
    return (
        *steps,
        Scalar(name=LOSS_SCALE, initial=strategy.loss_scale.initial),
        Scalar(name=GOOD_STEPS, initial=0.0),
        Scalar(name=SKIPPED_STEPS, initial=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What ranks hold of every bucket, in which format, and whether whole or as shards.

    Attributes:
        parameter: format of the parameters; what is trained, without masters.
        optimizer: format of masters and moments.
        has_master: whether masters are kept beside the parameters.
        moments: how many the optimizer keeps.
        frozen: format of parameters that are not trained, where it is another.
    """

    parameter: DType
    parameter_sharded: bool
    optimizer: DType
    optimizer_sharded: bool
    has_master: bool
    moments: int
    frozen: DType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """Names of a bucket's persistent buffers.

    Attributes:
        parameter: the rank's shard or the whole bucket, as its `Holding` says.
        master: master weights, where there are some; frozen parameters have none.
        moments: as many as the optimizer keeps; none for frozen parameters.
    """

    parameter: str
    master: str | None
    moments: tuple[str, ...]


def declare(draft: Draft, bucket: Bucket, holding: Holding) -> BucketState:
    """Declare what persists of a bucket."""

    def buffer(name: str, dtype: DType, kind: Kind, *, sharded: bool) -> str:
        return draft.buffer(
            f"{bucket.name}/{name}",
            bucket.shard if sharded else bucket.padded,
            dtype,
            kind,
            layout=bucket.layout.name if sharded else bucket.plain.name,
            shard=DATA if sharded else None,
        )

    sharded, optimizer = holding.optimizer_sharded, holding.optimizer
    if bucket.frozen:
        dtype, cut = holding.frozen or holding.parameter, holding.parameter_sharded
        name = buffer("parameter", dtype, Kind.PARAMETER, sharded=cut)
        return BucketState(parameter=name, master=None, moments=())
    return BucketState(
        parameter=buffer(
            "parameter", holding.parameter, Kind.PARAMETER, sharded=holding.parameter_sharded
        ),
        master=buffer("master", optimizer, Kind.MASTER, sharded=sharded)
        if holding.has_master
        else None,
        moments=tuple(
            buffer(f"moment{number}", optimizer, Kind.MOMENT, sharded=sharded)
            for number in range(1, holding.moments + 1)
        ),
    )


def own_view(draft: Draft, bucket: Bucket, buffer: str) -> View:
    """The rank's own shard of a buffer, which holds the shard alone or the whole bucket."""
    if draft.buffers[buffer].shard is not None:
        return draft.all(buffer)
    return View(buffer=buffer, size=bucket.shard, axis=DATA)


def updated_view(draft: Draft, bucket: Bucket, buffer: str, strategy: Strategy) -> View:
    """What a rank updates of a buffer: everything in stage 0, its own shard otherwise."""
    return draft.all(buffer) if strategy.stage == 0 else own_view(draft, bucket, buffer)


def update_path(bucket: Bucket, strategy: Strategy) -> str:
    """The id of the operation that writes a bucket's updated parameters."""
    return f"step/update/{bucket.name}/{'cast' if strategy.precision.has_master else 'update'}"


def gather_path(bucket: Bucket) -> str:
    """The id of the gather of a bucket's updated parameters (stages 1 and 2)."""
    return f"step/update/{bucket.name}/gather"


def write_setup(draft: Draft, buckets: Buckets, holding: Holding) -> tuple[BucketState, ...]:
    """Allocate and fill everything that is persistent; what there is, by bucket."""
    states: list[BucketState] = []
    for bucket in buckets.all:
        draft.prefix = f"setup/{bucket.name}"
        state = declare(draft, bucket, holding)
        states.append(state)
        draft.persist(state.parameter)
        _initialize(draft, state.parameter, Role.PARAMETER)
        if state.master is not None:
            draft.persist(state.master)
            _initialize(draft, state.master, Role.MASTER)
        for moment in state.moments:
            draft.persist(moment)
            draft.add(
                Fill(
                    id=draft.path(f"zero/{moment}"),
                    stream=COMPUTE,
                    target=draft.all(moment),
                    value=0.0,
                )
            )
    return tuple(states)


def _initialize(draft: Draft, buffer: str, role: Role) -> None:
    draft.add(
        Compute(
            id=draft.path(f"initialize/{role}"),
            stream=COMPUTE,
            action=Action.INITIALIZE,
            operands=(Operand(role=role, view=draft.all(buffer)),),
        )
    )
