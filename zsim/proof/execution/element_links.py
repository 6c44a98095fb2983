"""Links between corresponding elements of views, as defined by every operation, before cutting."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import TypeGuard, assert_never

from zsim.model.model import Model, Segment, Value
from zsim.proof.execution.grid import Grid, RankArray
from zsim.proof.execution.inferred_model import CONTEXT, TENSOR, expert_axes
from zsim.proof.execution.pieces import Key
from zsim.proof.execution.tensors import Tensors
from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import (
    BACKWARDS,
    MAKES_GRADIENTS,
    Action,
    AllToAll,
    Branch,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Fill,
    Operation,
    PointToPoint,
    ReadCounts,
    Role,
    View,
)
from zsim.specification.step import losses

ROWS = (Role.INPUT, Role.OUTPUT, Role.SAVED, Role.OUTPUT_GRADIENT, Role.INPUT_GRADIENT)
"""Roles of operands that hold rows in a segment of experts."""


class ElementLinks:
    """Cuts the spaces of a schedule at the ends of its views, and links them."""

    def __init__(self, tensors: Tensors, model: Model) -> None:
        self.tensors = tensors
        self.grid: Grid = tensors.grid
        self.model = model
        self._segments = {unit.name: unit.segments for unit in model.units}
        self._parameters = {each.name: each.elements for each in model.parameters}
        self._experts = {each.name: each.experts for each in tensors.schedule.counts}
        self._sloped = {*losses(model)} | {
            name
            for unit in model.units
            for segment in unit.segments
            for name in segment.inputs
            if model.values[name].requires_gradient
        }
        self._done: set[tuple[object, ...]] = set()
        self._viewed: set[tuple[int, int]] = set()
        self._linked: set[tuple[int, int, Key]] = set()
        self._saved: dict[tuple[str, str, int], int] = {}
        self.misfits: list[tuple[str, str, str]] = []
        for value in model.values.values():
            self.tensors.spaces.space(("value", value.name), value.elements)
            if value.tensor_sharded:
                self._join(("whole", value.name), value, TENSOR)
        self._is_shared = CONTEXT in self.grid.tracked
        if self._is_shared:
            for name in {part.shared_input for unit in model.units for part in unit.segments}:
                if name is not None:
                    self._join(("shared", name), model.values[name], CONTEXT)
        axes = expert_axes(tensors.mesh)
        for unit in model.units:
            for segment in unit.segments:
                read = segment.inputs if segment.reads_all else ()
                made = segment.outputs if segment.adds_all else ()
                for name in (*read, *(value.name for value in made)):
                    self._join(("joined", name), model.values[name], *axes)
        for name, elements in self._parameters.items():
            self.tensors.spaces.space(("parameter", name), elements)
        for name, load in model.loads.items():
            self._follow(name, model.values[load])

    def _follow(self, bias: str, load: Value) -> None:
        """Cut a bias of experts and the load that it follows at the same places."""
        if self._parameters[bias] == load.elements:
            places = ("parameter", bias), ("value", load.name)
            self.tensors.spaces.link((places[0], 0), (places[1], 0), load.elements)
        else:
            what = f"{bias} has {self._parameters[bias]} elements, its load {load.elements}"
            self.misfits.append(("", "step", what))

    def _join(self, key: Key, value: Value, *axes: str) -> None:
        """Add a space for the values of all ranks along axes, each rank's in its own part."""
        tensors, size = self.tensors, value.elements
        tensors.spaces.space(key, size * prod(map(tensors.mesh.axis_size, axes)))
        tensors.split(key, 0, size, axes)
        for rank, _ in tensors.run(axes):
            own = (("value", value.name), 0)
            tensors.spaces.link(own, (key, rank * size), size, own=True)

    def add(self) -> None:
        """Add the links of all programs."""
        for ranks in self.grid.classes:
            self._cut_rows(ranks)
            for operation in ranks.program.patterns:
                self._add(ranks, operation)
        for operations in self._meetings():
            self._across(operations)

    def _cut_rows(self, ranks: RankArray) -> None:
        """Cut buffers of counted rows at every place, since each has its own expert."""
        for buffer in ranks.program.buffers:
            if buffer.rows is not None:
                key = self.tensors.key(ranks.program, buffer.name)
                self.tensors.spaces.cut(key, *range(buffer.elements))

    def _add(self, ranks: RankArray, operation: Operation) -> None:
        match operation:
            case Compute():
                for operand in operation.operands:
                    if self._is_new(ranks, operand.view):
                        self.tensors.cut(ranks, operand.view)
                self._compute(ranks, operation)
            case Copy(source=source, target=target):
                self.tensors.cut(ranks, source)
                self.tensors.cut(ranks, target)
                if not operation.by_parameter:
                    self._link(ranks, source, target)
            case Fill(target=view) | Branch(value=View() as view) | ReadCounts(source=view):
                self.tensors.cut(ranks, view)
            case Communication():
                self._communication(ranks, operation)
            case _:
                pass  # touches no buffer

    def _is_new(self, ranks: RankArray, view: View) -> bool:
        """Return True if a view has not been added before."""
        seen = len(self._viewed)
        self._viewed.add((ranks.index, id(view)))
        return len(self._viewed) > seen

    def _link(self, ranks: RankArray, one: View, other: View) -> None:
        key = (self.tensors.kind(ranks, one), self.tensors.kind(ranks, other))
        if key not in self._done and one.size == other.size:
            self._done.add(key)
            self.tensors.link(ranks, one, other)

    def _communication(self, ranks: RankArray, member: Communication) -> None:
        part = member.part if isinstance(member, CollectiveOperation) else None
        if part is not None:
            self._parts(ranks, member.group, part, member.whole)
            return
        for view in (member.reads, member.writes):
            if view is not None:
                self.tensors.cut(ranks, view)
        if isinstance(member, AllToAll):
            self._blocks(ranks, member)
        elif _keeps_places(member):
            self._link(ranks, member.source, member.target)

    def _parts(self, ranks: RankArray, name: str, part: View, whole: View) -> None:
        """Link the part of each member with its place in the whole."""
        key = (name, self.tensors.kind(ranks, part), self.tensors.kind(ranks, whole))
        if key in self._done:
            return
        self._done.add(key)
        tensors, group = self.tensors, self.tensors.schedule.group_by_name[name]
        program = ranks.program
        here = tensors.key(program, part.buffer)
        there = tensors.key(program, whole.buffer)
        more = frozenset(group.axes) | tensors.varies(program, whole)
        own = not frozenset(group.axes) <= tensors.varies(program, part)
        axes = tuple(axis.name for axis in tensors.mesh.axes if axis.name in group.axes)
        is_whole = group.size(tensors.mesh) == prod(tensors.mesh.axis_size(axis) for axis in axes)
        for at, start, size in tensors.places(ranks, part, more):
            low = tensors.place(program, whole, at)[0]
            member = group.index(tensors.mesh, at)
            tensors.spaces.cut(here, start, start + size)
            tensors.spaces.link((here, start), (there, low + member * part.size), size, own=own)
            if is_whole:
                tensors.split(there, low, part.size, axes)

    def _blocks(self, ranks: RankArray, member: AllToAll) -> None:
        """Cut all blocks of an exchange at the same places: each may come from any member."""
        tensors, program = self.tensors, ranks.program
        count = tensors.schedule.group_by_name[member.group].size(tensors.mesh)
        size = member.source.size // count
        first: tuple[Key, int] | None = None
        for view in (member.source, member.target):
            key = tensors.key(program, view.buffer)
            for _, start, _ in tensors.places(ranks, view):
                for number in range(count):
                    here = (key, start + number * size)
                    first = first or here
                    tensors.spaces.link(first, here, size, own=True)

    def _compute(self, ranks: RankArray, compute: Compute) -> None:
        match compute.action:
            case (
                Action.FORWARD
                | Action.RECOMPUTE
                | Action.BACKWARD
                | Action.BACKWARD_INPUT
                | Action.BACKWARD_WEIGHT
            ):
                segments = self._segments.get(compute.unit, ())
                if compute.segment < len(segments):
                    self._segment(ranks, compute, segments[compute.segment])
            case Action.UPDATE:
                views = [each.view for each in compute.operands]
                for view in views[1:]:
                    self._link(ranks, views[0], view)
            case Action.LOAD:
                for each in compute.operands:
                    self._tensor(ranks, compute.id, each.view, ("value", self.model.batch.name))
            case (
                Action.NORM
                | Action.UNSCALE
                | Action.CLIP
                | Action.FINITE
                | Action.AMAX
                | Action.INITIALIZE
                | Action.COMPRESS
                | Action.DECOMPRESS
                | Action.RESIDUAL
            ):
                pass
            case _:
                assert_never(compute.action)

    def _segment(self, ranks: RankArray, compute: Compute, segment: Segment) -> None:
        values = self.model.values
        wanted = [name for name in segment.inputs if values[name].requires_gradient]
        trained = self.model.trained_of(segment)
        outputs = [value.name for value in segment.outputs]
        made_of = partial(self._made, segment)
        read = segment.kept_inputs if compute.action in BACKWARDS else segment.inputs
        names: dict[Role, list[Key]] = {
            Role.INPUT: [self._read(segment, name) for name in read],
            Role.OUTPUT: [made_of(name) for name in outputs],
            Role.OUTPUT_GRADIENT: [made_of(name) for name in outputs if name in self._sloped],
            Role.INPUT_GRADIENT: [self._read(segment, name) for name in wanted],
            Role.PARAMETER: [("parameter", name) for name in segment.parameters],
            Role.GRADIENT: [("parameter", name) for name in trained],
        }
        made = sum(each.role is Role.GRADIENT for each in compute.operands)
        if compute.action in MAKES_GRADIENTS and made != len(trained):
            what = f"makes {made} gradients of parameters, where {len(trained)} are trained"
            self.misfits.append((ranks.program.role, compute.id, what))
        saved = sum(each.view.size for each in compute.operands if each.role is Role.SAVED)
        due = self._saved.setdefault((ranks.program.role, compute.unit, compute.segment), saved)
        if saved not in (0, due) and due:
            what = f"{saved} saved elements, where another run of the segment has {due}"
            self.misfits.append((ranks.program.role, compute.id, what))
        # with expert ranks in plain training, its segments mix rows of all sources as well
        apart = not self.tensors.schedule.contract.expert_axes
        has_rows = (apart and bool(self._experts)) or segment.experts is not None
        fault = self._fault_of_rows(ranks, compute, segment) if has_rows else ""
        if fault:
            self.misfits.append((ranks.program.role, compute.id, fault))
        seen: dict[Role, int] = defaultdict(int)
        for operand in compute.operands:
            place = seen[operand.role]
            seen[operand.role] += 1
            keys = names.get(operand.role, [])
            if place < len(keys) and segment.experts and keys[place][0] == "parameter":
                self._weights(ranks, compute.id, operand.view, (keys[place], segment.experts))
            elif place < len(keys):
                self._tensor(ranks, compute.id, operand.view, keys[place])

    def _fault_of_rows(self, ranks: RankArray, compute: Compute, segment: Segment) -> str:
        """Return the reason why a segment cannot run on its rows, or ""."""
        for operand in compute.operands:
            buffer = ranks.program.by_name[operand.view.buffer]
            rows = buffer.rows
            if segment.experts is None:
                if rows is not None and rows.own is RowIndex.EXPERT:
                    return f"runs on {buffer.name}, rows of several sources, which it may mix"
            elif operand.role in ROWS:
                if rows is None:
                    return f"runs experts on {buffer.name}, whose rows are not counted"
                if (found := self._experts[rows.count]) != segment.experts:
                    return f"has {found} experts of {rows.count}, the model has {segment.experts}"
        return ""

    def _weights(
        self, ranks: RankArray, operation: str, view: View, stack: tuple[Key, int]
    ) -> None:
        """Cut the weights of all experts at the same places, in the parameter and in a view.

        `stack` is the parameter, and the number of experts whose weights it stacks.
        """
        key, experts = stack
        same = (ranks.index, id(view), key)
        if same in self._linked:
            return
        self._linked.add(same)
        tensors, size = self.tensors, self._parameters[key[1]] // experts
        if self._parameters[key[1]] % experts or not size or view.size % size:
            what = f"{view.buffer} has {view.size} elements, an expert of {key[1]} has {size}"
            self.misfits.append((ranks.program.role, operation, what))
            return
        tensors.cut(ranks, view)
        there = tensors.key(ranks.program, view.buffer)
        for expert in range(1, experts):
            tensors.spaces.link((key, 0), (key, expert * size), size, own=True)
        for _, start, count in tensors.places(ranks, view):
            for place in range(start, start + count, size):
                tensors.spaces.link((key, 0), (there, place), size, own=True)

    def _read(self, segment: Segment, name: str) -> Key:
        """Return the space of an input as a segment reads it."""
        if self._is_shared and name == segment.shared_input:
            return ("shared", name)
        if segment.reads_all:
            return ("joined", name)
        return self._value(name, whole=segment.reads_gathered)

    def _made(self, segment: Segment, name: str) -> Key:
        """Return the space of an output as a segment makes it."""
        return ("joined", name) if segment.adds_all else self._value(name, whole=segment.sums)

    def _value(self, name: str, *, whole: bool) -> Key:
        return ("whole" if whole and self.model.values[name].tensor_sharded else "value", name)

    def _tensor(self, ranks: RankArray, operation: str, view: View, key: Key) -> None:
        """Link a view with the tensor that it must hold, if the sizes agree."""
        same = (ranks.index, id(view), key)
        if same in self._linked:
            return
        self._linked.add(same)
        done = (self.tensors.kind(ranks, view), self.tensors.spaces.by_key[key].key)
        if done in self._done:
            return
        self._done.add(done)
        size = self.tensors.spaces.by_key[key].size
        if size != view.size or view.layout is not None:
            what = f"{view.buffer} has {view.size} elements, the {key[0]} {key[1]} has {size}"
            self.misfits.append((ranks.program.role, operation, what))
        else:
            self.tensors.link_to(ranks, view, key)

    def _meetings(self) -> Iterator[Sequence[tuple[RankArray, Communication]]]:
        """Yield communications that classes of different programs issue together, in order."""
        queues: dict[tuple[object, ...], dict[int, list[tuple[RankArray, Communication]]]] = {}
        by_name = self.tensors.schedule.group_by_name
        if len(self.grid.classes) == 1:
            return
        for ranks in self.grid.classes:
            for member in ranks.program.patterns:
                if not isinstance(member, Communication):
                    continue
                group = by_name[member.group]
                row = tuple(each.index for each in self.grid.row(ranks, group))
                route = None
                if isinstance(member, PointToPoint):
                    route = self.grid.route(ranks, member)
                queue = queues.setdefault((group.name, row, route), {})
                queue.setdefault(ranks.index, []).append((ranks, member))
        for by_class in queues.values():
            if len(by_class) > 1:
                yield from zip(*by_class.values(), strict=False)

    def _across(self, together: Sequence[tuple[RankArray, Communication]]) -> None:
        """Link views of different programs that are combined place by place, or are equal."""
        (first, one), *others = together
        for ranks, other in others:
            pairs = [(_whole(one), _whole(other))]
            if _keeps_places(one) and _keeps_places(other):
                pairs.append((one.target, other.target))
            for mine, theirs in pairs:
                if mine.size == theirs.size:
                    here, there = self._start(first, mine), self._start(ranks, theirs)
                    self.tensors.spaces.link(here, there, mine.size)

    def _start(self, ranks: RankArray, view: View) -> tuple[Key, int]:
        """Return the space of a view and its start there, on the first rank of a class."""
        at = self.grid.at(ranks, (0,) * len(ranks.shape))
        start = self.tensors.place(ranks.program, view, at)[0]
        return self.tensors.key(ranks.program, view.buffer), start


def _whole(member: Communication) -> View:
    """Return the view of a member that corresponds to that of the other members."""
    return member.whole


def _keeps_places(member: Communication) -> TypeGuard[CollectiveOperation]:
    """Return True if each place of the source is moved to the same place of the target."""
    return isinstance(member, CollectiveOperation) and not (member.splits or member.joins)
