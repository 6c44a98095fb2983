"""Placements through collectives: what each is given, and what it makes of it."""

from dataclasses import dataclass, field
from math import prod
from typing import assert_never

from zsim.check.ledger import Ledger
from zsim.check.placed import (
    COMPLETE,
    EVERY,
    MIXED,
    PARTS,
    REPLICATE,
    SHARD,
    SUMMANDS,
    VERDICTS,
    WRITTEN,
    Placement,
    Rule,
)
from zsim.check.routine import Made, Routines
from zsim.check.tensor import SAME, How, Tensors
from zsim.operation import AllGather, AllReduce, Broadcast, ReduceScatter, Reduction, View
from zsim.schedule import Schedule

Collective = AllGather | ReduceScatter | AllReduce | Broadcast


@dataclass(slots=True)
class _Manner:
    """What a kind of collective needs along the axes, what it makes of that, and divides by.

    `placed` has what became of placements along the axes, `made` of whole ones.
    """

    rule: Rule
    after: int
    verb: str
    divisor: int
    placed: dict[Placement, Placement] = field(default_factory=dict[Placement, Placement])
    made: Made = field(default_factory=Made)


class Collectives:
    """The collectives of one program, with a rule for each kind and group."""

    def __init__(
        self, schedule: Schedule, ledger: Ledger, tensors: Tensors, routines: Routines
    ) -> None:
        self.schedule = schedule
        self.ledger = ledger
        self.tensors = tensors
        self.routines = routines
        self.ranks = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self._along: dict[str, list[int]] = {}
        self._axes: dict[str, tuple[str, ...] | None] = {}
        self._rules: dict[tuple[str, frozenset[int]], Rule] = {}
        self._hows: dict[tuple[str, type[Collective]], How] = {}
        self._manners: dict[tuple[type[Collective], str, Reduction | None], _Manner] = {}

    def apply(self, operation: Collective) -> None:
        """Read the source, and write the target as the collective makes it."""
        kind = type(operation)
        reduction = None
        if isinstance(operation, (AllReduce, ReduceScatter)):
            reduction = operation.reduction
        key = (kind, operation.group, reduction)
        manner = self._manners.get(key)
        if manner is None:
            manner = self._manners[key] = self._manner(operation)
        self._run(operation, manner, operation.source, operation.target)

    def _run(self, operation: Collective, manner: _Manner, source: View, target: View) -> None:
        """The collective, or a part of it, between two views."""
        routine = self.routines.between(source, target, manner.made)
        if routine is not None and self.routines.again(routine):
            return
        ledger = self.ledger
        noted = ledger.noted
        self._same_tensor(operation, source, target)
        if routine is not None and not routine.fits and ledger.noted == noted:
            routine.fits = routine.described  # then what others made of the same is known
            if self.routines.again(routine):
                return
        given = ledger.need(operation.id, source, manner.rule, manner.verb)
        if given[-1] == MIXED and isinstance(operation, (AllReduce, Broadcast)):
            parts = ledger.cut(source, target)
            if len(parts) > 1:
                for part, other in parts:
                    self._run(operation, manner, part, other)
                return
        axes = given[:-1]
        after = manner.placed.get(axes)
        if after is None:
            along = self._along_group(operation.group)
            after = manner.placed[axes] = ledger.with_codes(axes, along, EVERY, manner.after)
        how = self._how(operation)
        code = self.tensors.carried(operation.id, (source, target), given[-1], how)
        placement = (*after, ledger.contents.divided(code, manner.divisor))
        ledger.write(ledger.origin(operation.id, source), target, placement)
        if routine is not None and ledger.noted == noted:
            self.routines.learn(routine, given, placement)

    def _manner(self, operation: Collective) -> _Manner:
        """What all collectives of one kind and group need, and make."""
        group, divisor = operation.group, 1
        match operation:
            case AllGather():
                rule, after, verb = self._rule(group, PARTS, "Shard"), REPLICATE, "gathers"
            case AllReduce(reduction=Reduction.MAX) | ReduceScatter(reduction=Reduction.MAX):
                rule = self._rule(group, VERDICTS, "a verdict or Replicate")
                after = REPLICATE if isinstance(operation, AllReduce) else SHARD
                verb = "takes the maximum of"
            case AllReduce() | ReduceScatter():
                rule, verb = self._rule(group, SUMMANDS, "Partial"), "reduces"
                after = REPLICATE if isinstance(operation, AllReduce) else SHARD
                divisor = self.ranks[group] if operation.reduction is Reduction.AVERAGE else 1
            case Broadcast():
                rule, after, verb = self._rule(group, COMPLETE, "whole"), REPLICATE, "sends"
            case _:
                assert_never(operation)
        return _Manner(rule, after, verb, divisor)

    def _how(self, operation: Collective) -> How:
        """What becomes of the parts that ranks bring."""
        key = (operation.group, type(operation))
        if key not in self._hows:
            axes = self._axes[operation.group] or ()
            self._hows[key] = SAME
            if axes and isinstance(operation, AllGather):
                self._hows[key] = How(gathers=axes)
            elif axes and isinstance(operation, ReduceScatter):
                self._hows[key] = How(scatters=axes)
        return self._hows[key]

    def _same_tensor(self, operation: Collective, source: View, target: View) -> None:
        """A finding if the target is not what the ranks have of the source."""
        group = operation.group
        if group not in self._axes:
            along = self._along_group(group)
            names = tuple(self.ledger.axes[axis] for axis in along)
            whole = prod(self.ledger.span[axis] for axis in names) == self.ranks[group]
            self._axes[group] = names if whole else None
        axes = self._axes[group]
        if axes is None:
            return  # some of the coordinates of an axis: no layout says what they have together
        match operation:
            case AllGather():
                self.tensors.same(operation.id, source, target, gathers=axes)
            case ReduceScatter():
                self.tensors.same(operation.id, target, source, gathers=axes)
            case AllReduce() | Broadcast():
                self.tensors.same(operation.id, source, target)
                self.tensors.alike(operation.id, source, axes)
            case _:
                assert_never(operation)

    def _along_group(self, name: str) -> list[int]:
        """Axes of which a communicator of the group has every coordinate."""
        if name not in self._along:
            group = self.schedule.group_by_name[name]
            limits = self.schedule.mesh.limits(group.where)
            self._along[name] = [
                number
                for number, axis in enumerate(self.ledger.axes)
                if axis in group.axes and len(limits[axis]) == self.ledger.size[axis]
            ]
        return self._along[name]

    def _rule(self, group: str, allowed: frozenset[int], needs: str) -> Rule:
        """`allowed` along the axes of the group, any value along the others."""
        key = (group, allowed)
        if key not in self._rules:
            along = self._along_group(group)
            self._rules[key] = Rule(
                [allowed if axis in along else WRITTEN for axis in range(len(self.ledger.axes))],
                f"{needs} over {' and '.join(self.ledger.axes[axis] for axis in along)}",
            )
        return self._rules[key]
