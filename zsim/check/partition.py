"""Partition: every parameter is held exactly once, and every shard is a part of exactly one tensor.

Proved of layouts and persistent buffers, with sizes of zero and fewer elements than ranks included:

* the pieces of a layout lie inside it and do not overlap; its cuts begin at 0 and end at its size;
* every parameter of the contract lies in exactly one parameter layout, with all its elements, and
  no parameter layout holds anything else; the contract has the parameters of the model, if given;
* of each parameter layout a role holds one persistent parameter buffer (the whole, or the rank's
  shard), one master if any layout has one, and as many moments as the others;
* where ranks hold a layout as shards, every rank along the axis holds its own;
* what is initialized has a layout that says with what;
* a segment that reads a parameter out of a whole layout reads all of one piece; with the model
  given, its parameters in the order of the unit.

A parameter layout is one that a persistent buffer of kind parameter holds. That segments divide a
layout evenly, and that buffers are as large as their segments, holds of every schedule that exists.

Cost: one look at each piece and each persistent buffer.
"""

from collections import Counter
from collections.abc import Iterator

from zsim.check.cell import cells, communicators
from zsim.check.finding import Finding
from zsim.check.subject import Subject
from zsim.layout import Layout
from zsim.mesh import Group
from zsim.operation import Action, Compute, Role, View, walk
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
        for operation in each.setup.operations:
            if isinstance(operation, Compute) and operation.action is Action.INITIALIZE:
                found += _without_layout(each.program, operation)
        found += _Reads(subject, each.program).inspect()
    return found


def _finding(role: str, where: str, why: str, *witness: str) -> Finding:
    return Finding(invariant=INVARIANT, role=role, operation=where, why=why, witness=witness)


def _inspect(layout: Layout) -> Iterator[Finding]:
    end, before = 0, None
    for piece in sorted(layout.pieces, key=lambda piece: (piece.start, piece.end)):
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
    if layout.cuts and (layout.cuts[0], layout.cuts[-1]) != (0, layout.elements):
        first, last = layout.cuts[0], layout.cuts[-1]
        why = f"its cuts go from {first} to {last}, not from 0 to {layout.elements}"
        yield _finding("", layout.name, why)


def _parameter_layouts(schedule: Schedule) -> list[Layout]:
    """Layouts that a persistent parameter buffer of some role holds."""
    held = {
        buffer.layout
        for program in schedule.programs
        for buffer in _persistent(program)
        if buffer.kind is Kind.PARAMETER
    }
    return [layout for layout in schedule.layouts if layout.name in held]


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
    for layout in _parameter_layouts(schedule):
        for piece in layout.pieces:
            if piece.parameter in held:
                held[piece.parameter][layout.name] += piece.size
            else:
                why = f"holds {piece.parameter}, which the contract does not name"
                yield _finding("", layout.name, why)
    for name, layouts in held.items():
        if len(layouts) != 1:
            where = " and ".join(layouts) or "no parameter layout"
            yield _finding("", name, f"lies in {where}, and must lie in exactly one")
        elif sum(layouts.values()) != promised[name]:
            ((where, size),) = layouts.items()
            yield _finding("", name, f"has {promised[name]} elements, {where} holds {size}")


def _elements(count: int | None) -> str:
    return "nothing" if count is None else f"{count} elements"


def _holdings(schedule: Schedule, program: Program) -> Iterator[Finding]:
    """Persistent model states of each parameter layout, compared with those of the others."""
    names: dict[tuple[str, Kind], list[str]] = {}
    for buffer in _persistent(program):
        if buffer.layout is not None:
            names.setdefault((buffer.layout, buffer.kind), []).append(buffer.name)
    layouts = [layout for layout, kind in names if kind is Kind.PARAMETER]
    needed = {
        kind: max((len(names.get((layout, kind), ())) for layout in layouts), default=0)
        for kind in (Kind.MASTER, Kind.MOMENT)
    }
    needed[Kind.MASTER] = min(needed[Kind.MASTER], 1)
    needed[Kind.PARAMETER] = 1
    for layout in layouts:
        for kind, count in needed.items():
            held = names.get((layout, kind), [])
            if len(held) != count:
                yield _finding(
                    program.role,
                    layout,
                    f"is held by {len(held)} persistent buffers of kind {kind}, not {count}",
                    *held,
                )


def _missing_shards(schedule: Schedule) -> Iterator[Finding]:
    """Ranks without their shard of what other ranks along the axis hold as shards."""
    among = cells(schedule)
    holds = {
        program.role: {
            buffer.layout: buffer
            for buffer in _persistent(program)
            if buffer.kind is Kind.PARAMETER and buffer.layout is not None
        }
        for program in schedule.programs
    }
    told: set[tuple[str, str]] = set()
    for layout in _parameter_layouts(schedule):
        if layout.axis is None:
            continue
        lines = communicators(schedule.mesh, Group(name="", axes=(layout.axis,)), among)
        for line in lines:
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


class _Reads:
    """Whether segments read the parameters that they are about."""

    def __init__(self, subject: Subject, program: Program) -> None:
        self.program = program
        self.pieces = {
            layout.name: {(piece.start, piece.size): piece.parameter for piece in layout.pieces}
            for layout in subject.schedule.layouts
        }
        self.needed = {
            (unit.name, number): segment.parameters
            for unit in (subject.model.units if subject.model is not None else ())
            for number, segment in enumerate(unit.segments)
        }
        self.names: dict[int, str | None] = {}

    def inspect(self) -> Iterator[Finding]:
        """Every operation that reads something else."""
        segments = (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD)
        for operation in walk(self.program.step):
            if isinstance(operation, Compute) and operation.action in segments:
                yield from self._operation(operation)

    def _operation(self, compute: Compute) -> Iterator[Finding]:
        views = [each.view for each in compute.operands if each.role is Role.PARAMETER]
        names = [self._name(view) for view in views]
        for view, name in zip(views, names, strict=True):
            if name is None:
                why = f"computes with a part of {view.buffer} that is no parameter"
                where = f"elements {view.start} to {view.start + view.size}"
                yield _finding(self.program.role, compute.id, why, where)
        needed = self.needed.get((compute.unit, compute.segment))
        if needed is None or None in names:
            return
        known = len(names) == len(needed)
        if not known or any(name and name != due for name, due in zip(names, needed, strict=True)):
            yield _finding(
                self.program.role,
                compute.id,
                f"computes with other parameters than segment {compute.segment} of "
                f"{compute.unit} has",
                f"reads {', '.join(name or 'something' for name in names)}",
                f"needs {', '.join(needed)}",
            )

    def _name(self, view: View) -> str | None:
        """The parameter that `view` is; nothing if it is none, "" where no layout can say."""
        key = id(view)
        if key not in self.names:
            layout = self.program.by_name[view.buffer].layout
            whole = layout is not None and view.axis is None and view.layout is None
            if not whole or view.size == 0 or layout is None:
                self.names[key] = ""
            else:
                self.names[key] = self.pieces[layout].get((view.start, view.size))
        return self.names[key]
