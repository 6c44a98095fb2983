"""Skip path: a step that overflows leaves everything as a step that updates, but for the update.

A branch of which one list updates and the other does not is a test for overflow; the other list is
the way that skips. Proved for every such branch:

* the way that skips writes no parameter, master or moment;
* any other persistent buffer whose value a step takes over from the one before is written on both
  ways or on neither: what is cleared after an update is cleared after a skip;
* a counter that an update reads is changed where the update is, and not where it is skipped;
* a scale that the gradient starts with is changed where the step is skipped: else the next one
  overflows as well.

Cost: one look at each operation of such branches.
"""

from collections.abc import Iterable, Iterator

from zsim.access import accesses
from zsim.check.finding import Finding
from zsim.check.subject import NumberedProgram, Subject
from zsim.numbered import READ, UPDATE, Numbered
from zsim.operation import Action, Branch, Compute, Fill, Operation, SetScalar, walk
from zsim.schedule import MODEL_STATE, Kind

INVARIANT = "skip path"
UPDATED = tuple(kind for kind in MODEL_STATE if kind is not Kind.GRADIENT)


def examine(subject: Subject) -> list[Finding]:
    """Everything that a skipped step leaves in another state."""
    found: list[Finding] = []
    for each in subject.programs:
        for branch in sorted(each.step.sides):
            operation = each.step.operations[branch]
            assert isinstance(operation, Branch)
            sides = [list(walk(side)) for side in (operation.then, operation.otherwise)]
            updates = [[op for op in side if _updates(op)] for side in sides]
            if bool(updates[0]) != bool(updates[1]):
                skips, goes_on = sides if updates[1] else reversed(sides)
                found += _Skip(each, operation, skips, goes_on).examine()
    return found


def _updates(operation: Operation) -> bool:
    return isinstance(operation, Compute) and operation.action is Action.UPDATE


class _Skip:
    """A branch with a way that skips the update and one that goes on."""

    def __init__(
        self,
        each: NumberedProgram,
        branch: Branch,
        skips: list[Operation],
        goes_on: list[Operation],
    ) -> None:
        self.program = each.program
        self.numbered = each.step
        self.branch = branch
        self.skips = skips
        self.goes_on = goes_on

    def examine(self) -> Iterator[Finding]:
        """What the two ways leave in different states."""
        yield from self._buffers()
        yield from self._scalars()

    def _finding(self, operation: str, why: str, *witness: str) -> Finding:
        return Finding(
            invariant=INVARIANT,
            role=self.program.role,
            operation=operation,
            why=why,
            witness=witness,
        )

    def _buffers(self) -> Iterator[Finding]:
        written, other = _written(self.skips), _written(self.goes_on)
        for name in self.program.persistent:
            if self.program.by_name[name].kind in UPDATED:
                if name in written:
                    yield self._finding(
                        written[name],
                        f"writes {name} on the way that skips the update",
                        f"{self.branch.id} has a list that updates nothing",
                    )
            elif (name in written) is not (name in other) and _is_taken_over(self.numbered, name):
                where = written.get(name) or other[name]
                ways = ("skips", "updates") if name in written else ("updates", "skips")
                yield self._finding(
                    self.branch.id,
                    f"leaves {name} in different states: one list writes it, the other does not",
                    f"the way that {ways[0]}: {where} writes it",
                    f"the way that {ways[1]}: nothing writes it",
                )

    def _scalars(self) -> Iterator[Finding]:
        skipped = {each.scalar: each.id for each in self.skips if isinstance(each, SetScalar)}
        updated = {each.scalar for each in self.goes_on if isinstance(each, SetScalar)}
        inside = {operation.id for operation in (*self.skips, *self.goes_on)}
        always = {
            each.scalar: each.id
            for each in walk(self.program.step)
            if isinstance(each, SetScalar) and each.id not in inside
        }
        for name, user in _counters(self.goes_on).items():
            at = skipped.get(name) or always.get(name)
            if at is not None:
                why = f"counts {name} where nothing is updated"
                yield self._finding(at, why, f"{user} reads {name}")
            elif name not in updated:
                yield self._finding(user, f"reads {name}, which nothing counts where it updates")
        for name, user in _scales(self.program.step).items():
            if name not in skipped:
                yield self._finding(
                    self.branch.id,
                    f"does not change {name} where the step is skipped: the next one overflows too",
                    f"{user} starts the gradient with it",
                )


def _written(operations: Iterable[Operation]) -> dict[str, str]:
    """The first operation that writes each buffer."""
    found: dict[str, str] = {}
    for operation in operations:
        for access in accesses(operation):
            if access.writes:
                found.setdefault(access.view.buffer, operation.id)
    return found


def _is_taken_over(numbered: Numbered, name: str) -> bool:
    """Whether the first access of a step to a buffer reads what the one before left."""
    history = numbered.history.get(name)
    return history is not None and history.codes[0] in (READ, UPDATE)


def _counters(operations: Iterable[Operation]) -> dict[str, str]:
    """Scalars that updates read, with one that does."""
    return {
        name: operation.id
        for operation in operations
        if isinstance(operation, Compute) and operation.action is Action.UPDATE
        for name in operation.scalars
    }


def _scales(step: Iterable[Operation]) -> dict[str, str]:
    """Scalars that values are made of, with an operation that does."""
    return {
        operation.scalar: operation.id
        for operation in walk(step)
        if isinstance(operation, Fill) and operation.scalar is not None
    }
