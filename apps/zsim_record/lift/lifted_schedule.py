"""A recording of one rank as a schedule of all ranks."""

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

from zsim.backend.document import Document
from zsim.cluster.cluster import Cluster
from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Segment, Unit, Value
from zsim.schedule.operation import Action, Allocate, Compute, Fill, Operation, View
from zsim.schedule.schedule import (
    Contract,
    Discipline,
    Place,
    Pool,
    Program,
    RankRole,
    Schedule,
    WireBytes,
)
from zsim_record.lift.communicator_mesh import CommunicatorMesh, mesh_of
from zsim_record.lift.lifted_call import sent
from zsim_record.lift.lifted_step import DEVICE, PINNED, LiftedStep
from zsim_record.lift.repeated_step import RepeatedStep
from zsim_record.lift.step_events import Allocation, Launch, LiftError, StepEvents

ROLE = "all"
HOST_THREAD = "host"


def lift(journal: StepEvents, *, name: str, world: int, rank: int) -> Schedule:
    """Return the repeated step of a recording as a schedule that each of `world` ranks runs.

    Raises:
        LiftError: there is no repeated step, or a schedule cannot express it.
    """
    if journal.unliftable:
        raise LiftError(journal.unliftable[0])
    step = RepeatedStep(journal)
    calls = [
        event.call for event in step.events if isinstance(event, Launch) and event.call is not None
    ]
    mesh = mesh_of(world, rank, {each.communicator: each.ranks for each in calls})
    lifted = LiftedStep(step, mesh, rank)
    buffers = lifted.buffers()
    operations = lifted.operations()
    on_host = [each for each, _ in buffers if each.pool == PINNED]
    threads = (HOST_THREAD,) if on_host else ()
    setup: list[Operation] = []
    for buffer, is_persistent in buffers:
        if is_persistent:
            stream = HOST_THREAD if buffer.pool == PINNED else buffer.home
            whole = View(buffer=buffer.name, size=buffer.elements)
            setup.append(Allocate(id=f"setup/allocate {buffer.name}", buffer=buffer.name))
            setup.append(
                Fill(id=f"setup/fill {buffer.name}", stream=stream, target=whole, value=0.0)
            )
    kept = sum(each.size_bytes for each, stays in buffers if stays and each.pool == DEVICE)
    peak = max(kept, *(each.live_bytes for each in step.events if isinstance(each, Allocation)), 0)
    pools = [Pool(name=DEVICE, discipline=Discipline.CACHING)]
    if on_host:
        pools.append(Pool(name=PINNED, place=Place.HOST))
    return Schedule(
        name=name if step.turns == 1 else f"{name}, {step.turns} repetitions a step",
        mesh=mesh.mesh,
        roles=(RankRole(name=ROLE),),
        groups=tuple(mesh.groups.values()),
        streams=(*journal.streams.values(), *threads),
        host_threads=threads,
        pools=tuple(pools),
        programs=(
            Program(
                role=ROLE,
                buffers=tuple(buffer for buffer, _ in buffers),
                persistent=tuple(buffer.name for buffer, stays in buffers if stays),
                setup=tuple(setup),
                step=tuple(operations),
            ),
        ),
        contract=Contract(
            data_axes=tuple(axis.name for axis in mesh.mesh.axes),
            peak_bytes=((ROLE, DEVICE, peak),),
            wire_bytes=_volume(step, mesh),
        ),
    )


def _volume(step: RepeatedStep, mesh: CommunicatorMesh) -> tuple[WireBytes, ...]:
    total: Counter[tuple[str, str, bool]] = Counter()
    for event in step.events:
        if isinstance(event, Launch) and event.call is not None:
            for each in sent(event.call, mesh.groups[event.call.communicator].name):
                total[each.group, each.collective, each.scalar] += each.bytes * step.turns
    return tuple(
        WireBytes(group=group, collective=kind, bytes=size, scalar=scalar)
        for (group, kind, scalar), size in total.items()
        if size
    )


def document(schedule: Schedule, cluster: Cluster | None = None) -> Document:
    """Return `schedule` as a document that can be checked and, with a cluster, simulated."""
    flops = {Action.FORWARD: 0, Action.BACKWARD: 0}
    turns: set[int] = set()
    for operation in schedule.programs[0].step:
        if isinstance(operation, Compute):
            turns.add(operation.micro_batch)
            flops[operation.action] += sum(
                each.flops for each in operation.kernels if each.kind.multiplies_matrices
            )
    loss = Value(name="loss", elements=1, dtype=DType.FP32)
    unit = Unit(
        name="recorded", parameters=(), segments=(Segment(inputs=(BATCH,), outputs=(loss,)),)
    )
    model = Model(
        name=schedule.name,
        units=(unit,),
        batch=Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False),
        tokens=0,
        forward_flops=flops[Action.FORWARD] // max(1, len(turns)),
        backward_flops=flops[Action.BACKWARD] // max(1, len(turns)),
    )
    return Document(schedule=schedule, model=model, cluster=cluster)


def one_for_all(documents: Mapping[int, Document]) -> Document:
    """Return the document that all recorded ranks share.

    Raises:
        LiftError: two ranks have different schedules.
    """
    (first, document), *others = documents.items()
    for rank, other in others:
        if other.schedule == document.schedule:
            continue
        mine, theirs = document.schedule.programs[0].step, other.schedule.programs[0].step
        pairs = zip_longest(mine, theirs)
        found = next(((one, two) for one, two in pairs if one != two), None)
        what = " and ".join("nothing" if each is None else each.id for each in found or ())
        raise LiftError(
            f"ranks {first} and {rank} run different steps, which no one role says: "
            f"{what or 'their buffers differ'}"
        )
    return document
