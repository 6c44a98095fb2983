"""Scalars: hosts count updates and change the loss scale as training does, from any state.

Changes of host scalars are piecewise linear. So they are run as floats from every combination of
values at and next to each of their clamps and of the multiples of each counter, with and without
overflow, and compared with `zsim.specification.host`. The readers of a scalar define its meaning:
updates read the number of the update, kernels that scale gradients the loss scale, branches the
remaining steps of a warm-up.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import product

from msgspec.structs import replace

from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.issue_order import set_scalar, taken
from zsim.schedule.operation import (
    Action,
    Allocate,
    Branch,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Read,
    SetScalar,
    Write,
    walk,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.specification.host import HIGHEST, HostState
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.strategy.train import LossScale

INVARIANT = "scalars"

SCALERS = (Action.UNSCALE, Action.CLIP)
"""Actions that read the loss scale."""

SILENT = frozenset({Allocate, Free, HostWait, Copy, Read, Write})
"""Operations without scalars, the majority of a step."""

STEPS, SCALE, SINCE = 1_000_003.0, 12_289.0, 17.0
"""A generic state: not at a clamp, and with different numbers."""


@dataclass(slots=True)
class Uses:
    """Scalars of a program by their meaning, with the first operation that reads each."""

    updates: dict[str, str] = field(default_factory=dict[str, str])
    scale: dict[str, str] = field(default_factory=dict[str, str])
    counters: dict[str, str] = field(default_factory=dict[str, str])
    warm_up: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def first(self) -> dict[str, str]:
        """The first operation that reads each scalar."""
        return self.warm_up | self.updates | self.scale | self.counters

    @classmethod
    def of(cls, program: Program) -> "Uses":
        """Find the uses of scalars in a step."""
        found = cls()
        changes: list[SetScalar] = []
        for operation in program.step_work:
            if type(operation) in SILENT:
                continue
            match operation:
                case Compute(
                    action=Action.UPDATE, rule=Optimizer(counts_steps=True), scalars=names
                ):
                    for name in names[:1]:
                        found.updates.setdefault(name, operation.id)
                case Compute(action=action, scalars=names) if action in SCALERS:
                    for name in names[:1]:
                        found.scale.setdefault(name, operation.id)
                case Fill(scalar=str(name)):
                    found.scale.setdefault(name, operation.id)
                case SetScalar():
                    changes.append(operation)
                case Branch(scalar=str(name)):
                    found.warm_up.setdefault(name, operation.id)
                case _:
                    pass
        for change in changes:
            if change.counter is not None and change.scalar in found.scale:
                found.counters.setdefault(change.counter, change.id)
        return found


def generic(schedule: Schedule) -> dict[str, float]:
    """Return a generic state of the host, in which no number is at a clamp."""
    found: dict[str, float] = {"updates": STEPS}
    uses = [Uses.of(program) for program in schedule.programs]
    for place, scalar in enumerate(schedule.scalars):
        found[scalar.name] = 1009.0 + 2 * place
        if any(scalar.name in each.scale for each in uses):
            found[scalar.name] = SCALE
        elif any(scalar.name in each.counters for each in uses):
            found[scalar.name] = SINCE
        elif any(scalar.name in each.updates for each in uses):
            found[scalar.name] = STEPS
    return found


def examine(context: Context) -> list[Finding]:
    """Find every program whose host does not count as training does."""
    schedule = context.schedule
    strategy = schedule.contract.strategy
    law = None
    if strategy is not None and strategy.train.precision is Precision.FP16:
        law = strategy.train.loss_scale
    given = {scalar.name for scalar in schedule.scalars if scalar.given}
    found: list[Finding] = []
    for each in context.programs:
        initial = {scalar.name: scalar.initial for scalar in schedule.scalars}
        for operation in walk(each.program.setup):
            if isinstance(operation, SetScalar):
                set_scalar(operation, initial)
        counted = _Counted(each.program, initial, law, given=given, strategy=strategy)
        found += counted.examine()
    trains = any(not each.frozen for each in schedule.contract.parameters)
    if (
        law is not None
        and trains
        and not any(Uses.of(each.program).scale for each in context.programs)
    ):
        why = "reads no loss scale, and the strategy trains in fp16"
        found.append(Finding(invariant=INVARIANT, role="", operation="step", why=why))
    return found


class _Counted:
    """Checks the scalars of one program."""

    def __init__(
        self,
        program: Program,
        initial: Mapping[str, float],
        law: LossScale | None,
        *,
        given: Set[str],
        strategy: Strategy | None,
    ) -> None:
        self.program = program
        self.initial = initial
        self.law = law
        self.judges = strategy is not None
        self.warm_up = 0 if strategy is None else strategy.offload.warm_up_steps
        self.given = given
        self.uses = Uses.of(program)
        self.step = _counting(program.step)
        self.changes = [each for each in walk(self.step) if isinstance(each, SetScalar)]

    def _finding(self, operation: str, why: str, *witness: str) -> Finding:
        return Finding(
            invariant=INVARIANT,
            role=self.program.role,
            operation=operation,
            why=why,
            witness=witness,
        )

    def examine(self) -> Iterator[Finding]:
        """Yield the first fault of each scalar."""
        uses = self.uses
        if not uses.first:
            return
        for name, user in uses.warm_up.items() if self.judges else ():
            if self.initial.get(name) != self.warm_up:
                why = f"decides on {name}, which begins at {self.initial.get(name)}"
                yield self._finding(user, why, f"the strategy says {self.warm_up}")
        for name, user in uses.scale.items():
            if name in self.given:
                yield self._finding(user, f"scales by {name}, which the caller gives: any number")
        for name, user in uses.updates.items():
            if self.initial.get(name) != 0.0:
                why = f"reads {name}, which begins at {self.initial.get(name)} and not at 0"
                yield self._finding(user, why)
        if self.law is not None:
            for name, user in uses.scale.items():
                if self.initial.get(name) != self.law.initial:
                    why = f"reads {name}, which begins at {self.initial.get(name)}"
                    yield self._finding(user, why, f"the strategy says {self.law.initial}")
            for name in uses.counters:
                if self.initial.get(name) != 0.0:
                    why = f"{name} begins at {self.initial.get(name)} and not at 0"
                    yield self._finding(uses.counters[name], why)
        yield from self._conditions()
        yield from self._steps()

    def _conditions(self) -> Iterator[Finding]:
        """Yield changes that depend on multiples that training does not have."""
        uses = self.uses
        for change in self.changes:
            if change.counter is None or change.every == 1:
                continue
            if change.scalar in uses.updates | uses.counters | uses.warm_up:
                why = f"changes {change.scalar} only at multiples of {change.every}"
                yield self._finding(change.id, why)
            elif self._is_off(change):
                why = f"moves {change.scalar} every {change.every} steps"
                yield self._finding(change.id, why, "the strategy says otherwise")

    def _is_off(self, change: SetScalar) -> bool:
        """Return True if the loss scale changes at multiples of another interval."""
        if self.law is None or change.scalar not in self.uses.scale:
            return False
        return change.every != self.law.interval

    def _steps(self) -> Iterator[Finding]:
        """Run a step from every state at or next to a clamp or a multiple."""
        seen: set[str] = set()
        ways = (False, True) if self.law is not None else (False,)
        for state in self._states():
            for overflows in ways:
                for name, operation, why, witness in self._differences(state, overflows=overflows):
                    if name not in seen:
                        seen.add(name)
                        yield self._finding(operation, why, *witness)

    def _points(self, name: str, generic: float) -> list[float]:
        """Return values of a scalar at which its changes may differ, and values next to them."""
        found = {generic}
        for change in self.changes:
            if change.scalar == name:
                for clamp in (change.minimum, change.maximum):
                    found |= {clamp, clamp / 2, clamp * 2, clamp + 1, clamp - 1}
            if change.counter == name:
                every = change.every
                found |= {float(k * every + d) for k in (1, 2) for d in (-2, -1, 0, 1)}
        if self.law is not None and name in self.uses.counters:
            found |= {float(self.law.interval + d) for d in (-2, -1, 0)}
        if self.law is not None and name in self.uses.scale:
            found |= {self.law.minimum, self.law.minimum * 2, self.law.initial}
        low = self.law.minimum if self.law is not None and name in self.uses.scale else 0.0
        return sorted(each for each in found if low <= each <= HIGHEST)

    def _states(self) -> Iterator[HostState]:
        updates = {p for name in self.uses.updates for p in self._points(name, STEPS)} or {STEPS}
        scales = {p for name in self.uses.scale for p in self._points(name, SCALE)} or {SCALE}
        counts = {p for name in self.uses.counters for p in self._points(name, SINCE)} | {SINCE}
        if self.law is not None:
            counts |= {float(self.law.interval + each) for each in (-2, -1, 0)} - {-1.0}
        left = {p for name in self.uses.warm_up for p in (*self._points(name, SINCE), 0.0, 1.0)}
        every = product(sorted(updates), sorted(scales), sorted(counts), sorted(left or {0.0}))
        for updated, scale, since, warm_up in every:
            yield HostState(updates=updated, scale=scale, since=since, warm_up=warm_up)

    def _differences(
        self, state: HostState, *, overflows: bool
    ) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
        """Yield scalars with wrong values after a step from `state`, or when kernels read them."""
        uses = self.uses
        scalars = dict.fromkeys(self.initial, 1009.0)
        scalars |= dict.fromkeys(uses.updates, state.updates)
        scalars |= dict.fromkeys(uses.counters, state.since)
        scalars |= dict.fromkeys(uses.scale, state.scale)
        scalars |= dict.fromkeys(uses.warm_up, state.warm_up)
        last: dict[str, str] = {}
        wanted = state.after(self.law, overflows=overflows)
        what = "after an overflow" if overflows else "after an update"
        for operation in taken(self.step, overflows=overflows, scalars=scalars):
            match operation:
                case SetScalar():
                    last[operation.scalar] = operation.id
                case Compute(
                    action=Action.UPDATE, rule=Optimizer(counts_steps=True), scalars=(name, *_)
                ):
                    if scalars[name] != wanted.updates:
                        why = f"takes {name} = {scalars[name]:g} for update {wanted.updates:g}"
                        yield name, operation.id, why, ()
                case Compute(action=action, scalars=(name, *_)) if action in SCALERS:
                    if scalars[name] != state.scale:
                        why = f"takes {name} = {scalars[name]:g} for gradients that were scaled"
                        yield name, operation.id, why, (f"they begin with {state.scale:g}",)
                case Fill(scalar=str(name)) if scalars[name] != state.scale:
                    why = f"takes {name} = {scalars[name]:g} in a step that began otherwise"
                    yield name, operation.id, why, (f"the step begins with {state.scale:g}",)
                case _:
                    pass
        expected = dict.fromkeys(uses.updates, wanted.updates)
        if self.judges:
            expected |= dict.fromkeys(uses.scale, wanted.scale)
            expected |= dict.fromkeys(uses.counters, wanted.since)
            expected |= dict.fromkeys(uses.warm_up, wanted.warm_up)
        for name, value in expected.items():
            if scalars[name] != value:
                before = f"{state.updates:g} updates, scale {state.scale:g}, {state.since:g} since"
                yield (
                    name,
                    last.get(name) or uses.first[name],
                    f"leaves {name} at {scalars[name]:g} {what}, not at {value:g}",
                    (f"the step began with {before}",),
                )


def _counting(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return branches, and operations that read or change a scalar.

    Of equal reads without a change between them, only the first is kept: if it is right in every
    state, so are the others, and if not, one finding is enough.
    """
    found: list[Operation] = []
    read: set[tuple[object, ...]] = set()
    for operation in operations:
        if type(operation) in SILENT:
            continue
        if isinstance(operation, Branch):
            then, otherwise = _counting(operation.then), _counting(operation.otherwise)
            found.append(replace(operation, then=then, otherwise=otherwise))
            read.clear()
        elif isinstance(operation, SetScalar):
            found.append(operation)
            read.clear()
        elif (key := _reads(operation)) is not None and key not in read:
            found.append(operation)
            read.add(key)
    return tuple(found)


def _reads(operation: Operation) -> tuple[object, ...] | None:
    """Return the scalars that an operation reads, and their use; None if it reads none."""
    match operation:
        case Fill(scalar=str(name)):
            return Fill, name
        case Compute(scalars=names) if names:
            return operation.action, type(operation.rule), names
        case _:
            return None
