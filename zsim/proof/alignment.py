"""Alignment: shards, and the data of collectives, start where layouts promise.

Proved for every layout that promises an alignment of more than one element: each rank's segment
starts at a multiple of it, and so does each rank's part of every block; and every view of a buffer
of that layout in a collective starts at a multiple on every rank, slots of gathers and
reduce-scatters included. A contract that names its strategy promises the alignment of its runtime.

Assumed: the allocator starts blocks at larger multiples, as CUDA's does (512 bytes). Unaligned
sends and copies of elements by kernels are allowed: they are only slower.

Cost: linear in the number of cuts of such layouts, and of collectives.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from zsim.network.volume import communications
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Mesh
from zsim.schedule.operation import CollectiveOperation, Communication, View
from zsim.schedule.schedule import Program, Schedule

INVARIANT = "alignment"


def examine(context: Context) -> list[Finding]:
    """Find every layout that breaks its promise or promises too little, and unaligned views."""
    schedule = context.schedule
    found = [finding for layout in schedule.layouts for finding in _layout(schedule.mesh, layout)]
    found += _contract(schedule)
    if any(layout.alignment > 1 for layout in schedule.layouts):
        for each in context.programs:
            for _, numbered in each.parts:
                for number in numbered.communications:
                    for member in communications(numbered.operations[number]):
                        found += _views(schedule, each.program, member)
    return found


def _finding(role: str, where: str, why: str) -> Finding:
    return Finding(invariant=INVARIANT, role=role, operation=where, why=why)


def _layout(mesh: Mesh, layout: Layout) -> Iterator[Finding]:
    """Find the first rank with an unaligned part of the layout."""
    least = layout.alignment
    if least == 1 or layout.axis is None:
        return
    count = mesh.axis_size(layout.axis)
    starts: Iterable[tuple[int, int]]
    if layout.cuts is not None:
        starts = enumerate(layout.cuts[:-1])
    else:  # with equal parts, the first two determine all others
        ends = pairwise((*(layout.blocks or (0,)), layout.elements))
        ranks = range(min(2, count))
        starts = (
            (rank, low + rank * (high - low) // count) for low, high in ends for rank in ranks
        )
    for rank, start in starts:
        if start % least:
            why = f"promises multiples of {least} elements, rank {rank} begins at {start}"
            yield _finding("", layout.name, why)
            return


def _contract(schedule: Schedule) -> Iterator[Finding]:
    """Find layouts of model states that promise less than the runtime does."""
    strategy = schedule.contract.strategy
    if strategy is None or strategy.zero.emulate is None:
        return
    runtime, stage = strategy.zero.emulate, strategy.zero.stage
    dense, experts = (
        runtime.alignment(stage=stage, data=data)
        for data in (strategy.parallel.data, strategy.expert_data)
    )
    sharded = {
        buffer.layout
        for program in schedule.programs
        for buffer in program.buffers
        if buffer.shard is not None and buffer.name in program.persistent
    }
    for layout in schedule.layouts:
        needed = experts if layout.axis == "expert_data" else dense
        if layout.name in sharded and layout.alignment % needed:
            why = f"promises multiples of {layout.alignment} elements, its runtime of {needed}"
            yield _finding("", layout.name, why)


def _views(schedule: Schedule, program: Program, member: Communication) -> Iterator[Finding]:
    """Find views of a collective that are unaligned on some rank."""
    for view, step in _taken(member):
        name = program.by_name[view.buffer].layout
        least = 1 if name is None else schedule.layout_by_name[name].alignment
        for what, place in (("begins at", view.start), ("has parts of", step)):
            if place % least:
                why = f"{view.buffer} {what} {place}, {name} promises multiples of {least} elements"
                yield _finding(program.role, member.id, why)
                return


def _taken(member: Communication) -> Iterator[tuple[View, int]]:
    """Yield views, and the distance in them from one rank's slot to the next, 0 for none."""
    match member:
        case CollectiveOperation(part=View() as part, whole=whole):
            yield part, 0 if part.axis is None else part.size
            yield whole, part.size
        case _:
            for view in (member.reads, member.writes):
                if view is not None:
                    yield view, 0 if view.axis is None else view.size
