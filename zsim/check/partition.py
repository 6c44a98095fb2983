"""Partition: every parameter is held exactly once, and every shard is a part of exactly one tensor.

Proved of layouts and persistent buffers, with sizes of zero and fewer elements than ranks included:

* the pieces of a layout lie inside it and do not overlap, each in one block; its cuts begin at 0
  and end at its size;
* every parameter of the contract lies in exactly one parameter layout, with all its elements, and
  no parameter layout holds anything else; the contract has the parameters of the model, if given;
* of each parameter a role holds one persistent parameter buffer (the whole, or the rank's shard),
  one master if any has one, and as many moments as the others, in the parameter layout or others;
* any other layout that names a parameter holds all of it once, and nothing else: gathered whole,
  sharded otherwise for a while, or as gradients without padding;
* where ranks hold a layout as shards, every rank along the axis holds its own;
* what is initialized has a layout that says with what;
* a segment that reads a parameter out of a whole layout reads all of one piece, and not where the
  ranks' parts of it stand apart; gradients that it writes are as large as pieces; with the model
  given, its parameters in the order of the unit.

A parameter layout is one that a persistent buffer of kind parameter holds; of kind master if there
is none. That segments divide a layout evenly, and that buffers are as large as their segments,
holds of every schedule that exists.

Cost: one look at each piece and each persistent buffer.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator

from zsim.check.cell import cells, communicators
from zsim.check.finding import Finding
from zsim.check.form import STARTS
from zsim.check.reads import Reads
from zsim.check.subject import Subject
from zsim.layout import Layout
from zsim.mesh import Group
from zsim.operation import Action, Compute
from zsim.schedule import Buffer, Kind, Program, Schedule

INVARIANT = "partition"


def examine(subject: Subject) -> list[Finding]:
    """Every layout, parameter and buffer that breaks the partition."""
    schedule = subject.schedule
    found = [finding for layout in schedule.layouts for finding in _inspect(layout)]
    found += _parameters(subject)
    for program in schedule.programs:
        found += _holdings(schedule, program)
    if len(schedule.roles) > 1:
        found += _missing_shards(schedule)
    for each in subject.programs:
        for number in each.setup.computes:
            operation = each.setup.operations[number]
            if isinstance(operation, Compute) and operation.action is Action.INITIALIZE:
                found += _without_layout(each.program, operation)
        found += Reads(subject, each, INVARIANT).inspect()
    return found


def _finding(role: str, where: str, why: str, *witness: str) -> Finding:
    return Finding(invariant=INVARIANT, role=role, operation=where, why=why, witness=witness)


def _inspect(layout: Layout) -> Iterator[Finding]:
    end, before = 0, None
    for piece in sorted(layout.pieces, key=STARTS):
        if piece.end > layout.elements:
            why = f"{piece.parameter} ends at {piece.end}, past its {layout.elements} elements"
            yield _finding("", layout.name, why)
        if piece.start < end and piece.size:
            yield _finding(
                "",
                layout.name,
                f"{piece.parameter} overlaps {before}",
                f"{before} ends at {end}",
                f"{piece.parameter} starts at {piece.start}",
            )
        if piece.end > end:
            end, before = piece.end, piece.parameter
    begins = (layout.blocks or ())[1:]
    cut: list[tuple[int, int, str]] = []
    for number, piece in enumerate(layout.pieces if begins else ()):
        inside = range(bisect_right(begins, piece.start), bisect_left(begins, piece.end))
        cut += [(block, number, piece.parameter) for block in inside]
    for block, _, parameter in sorted(cut):
        why = f"{parameter} lies in two blocks"
        yield _finding("", layout.name, why, f"a block begins at {begins[block]}")
    if layout.cuts and (layout.cuts[0], layout.cuts[-1]) != (0, layout.elements):
        first, last = layout.cuts[0], layout.cuts[-1]
        why = f"its cuts go from {first} to {last}, not from 0 to {layout.elements}"
        yield _finding("", layout.name, why)


def _parameter_layouts(schedule: Schedule) -> list[Layout]:
    """Layouts that persistent parameters of some role are in: masters, if there are no others."""
    held: dict[Kind, set[str | None]] = {Kind.PARAMETER: set(), Kind.MASTER: set()}
    for program in schedule.programs:
        for buffer in _persistent(program):
            if buffer.kind in held:
                held[buffer.kind].add(buffer.layout)
    names = held[Kind.PARAMETER] or held[Kind.MASTER]
    return [layout for layout in schedule.layouts if layout.name in names]


def _persistent(program: Program) -> list[Buffer]:
    return [program.by_name[name] for name in program.persistent]


def _parameters(subject: Subject) -> Iterator[Finding]:
    schedule = subject.schedule
    promised = {each.name: each.elements for each in schedule.contract.parameters}
    if subject.model is not None:
        trained = {each.name: each.elements for each in subject.model.parameters}
        for name in sorted(promised.keys() | trained.keys()):
            if promised.get(name) != trained.get(name):
                why = (
                    f"the contract has {_elements(promised.get(name))} of {name}, "
                    f"the model {_elements(trained.get(name))}"
                )
                yield _finding("", "contract", why)
    if not promised:
        return
    held: dict[str, Counter[str]] = {name: Counter() for name in promised}
    layouts = _parameter_layouts(schedule)
    for layout in layouts:
        for piece in layout.pieces:
            if piece.parameter in held:
                held[piece.parameter][layout.name] += piece.size
            else:
                why = f"holds {piece.parameter}, which the contract does not name"
                yield _finding("", layout.name, why)
    for name, found in held.items():
        if len(found) != 1:
            where = " and ".join(found) or "no parameter layout"
            yield _finding("", name, f"lies in {where}, and must lie in exactly one")
        elif sum(found.values()) != promised[name]:
            ((where, size),) = found.items()
            yield _finding("", name, f"has {promised[name]} elements, {where} holds {size}")
    names = {layout.name for layout in layouts}
    for layout in schedule.layouts:
        if layout.name not in names:
            yield from _other(layout, promised)


def _other(layout: Layout, promised: dict[str, int]) -> Iterator[Finding]:
    """What a layout of parameters that is no parameter layout does not hold as it must."""
    sizes: Counter[str] = Counter()
    for piece in layout.pieces:
        sizes[piece.parameter] += piece.size
    if not sizes.keys() & promised.keys():
        return  # of something else
    for name, size in sizes.items():
        if name not in promised:
            why = f"holds {name}, which the contract does not name"
            yield _finding("", layout.name, why)
        elif size != promised[name]:
            why = f"holds {size} elements of {name}, which has {promised[name]}"
            yield _finding("", layout.name, why)


def _elements(count: int | None) -> str:
    return "nothing" if count is None else f"{count} elements"


def _holdings(schedule: Schedule, program: Program) -> Iterator[Finding]:
    """Persistent model states of each parameter, compared with those of the others."""
    names: dict[Kind, dict[str, list[str]]] = {
        kind: {} for kind in (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)
    }
    for buffer in _persistent(program):
        if buffer.layout is not None and buffer.kind in names:
            names[buffer.kind].setdefault(buffer.layout, []).append(buffer.name)
    parameters = names[Kind.PARAMETER] or names[Kind.MASTER]
    for kind, by_layout in names.items():
        needed = max(map(len, by_layout.values()), default=0)
        needed = needed if kind is Kind.MOMENT else min(needed, 1)
        due, held = parameters, by_layout
        if by_layout.keys() - parameters.keys():
            due, held = _by_parameter(schedule, parameters), _by_parameter(schedule, by_layout)
        for what in dict.fromkeys((*due, *held)):
            buffers = held.get(what, [])
            if len(buffers) != needed:
                count = len(buffers)
                why = f"is held by {count} persistent buffers of kind {kind}, not {needed}"
                yield _finding(program.role, what, why, *buffers)


def _by_parameter(schedule: Schedule, held: dict[str, list[str]]) -> dict[str, list[str]]:
    """Buffers by parameter, of buffers by layout."""
    found: dict[str, list[str]] = {}
    for layout, names in held.items():
        for piece in schedule.layout_by_name[layout].pieces:
            found.setdefault(piece.parameter, []).extend(names)
    return found


def _missing_shards(schedule: Schedule) -> Iterator[Finding]:
    """Ranks without their shard of what other ranks along the axis hold as shards."""
    among = cells(schedule)
    holds = {
        program.role: {
            buffer.layout: buffer
            for kind in (Kind.MASTER, Kind.PARAMETER)
            for buffer in _persistent(program)
            if buffer.kind is kind and buffer.layout is not None
        }
        for program in schedule.programs
    }
    told: set[tuple[str, str]] = set()
    for layout in _parameter_layouts(schedule):
        if layout.axis is None:
            continue
        along = Group(name="", axes=schedule.mesh.parts(layout.axis))
        for line in communicators(schedule.mesh, along, among):
            held = {role: holds[role].get(layout.name) for role in line.roles}
            shards = [role for role, buffer in held.items() if buffer and buffer.shard]
            for role, buffer in held.items():
                if shards and buffer is None and (role, layout.name) not in told:
                    told.add((role, layout.name))
                    why = f"holds no shard, and ranks of {shards[0]} hold no more than theirs"
                    yield _finding(role, layout.name, why)


def _without_layout(program: Program, initialize: Compute) -> Iterator[Finding]:
    for operand in initialize.operands:
        buffer = program.by_name[operand.view.buffer]
        if buffer.layout is None:
            why = f"initializes {buffer.name}, which has no layout that says with what"
            yield _finding(program.role, initialize.id, why)
