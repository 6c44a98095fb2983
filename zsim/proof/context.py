"""The context of a proof: a schedule, its numbered programs, and their cached order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from zsim.model.model import Model
from zsim.proof.finding import Finding
from zsim.schedule.happens_before import OUTCOMES_MAX, Timeline, drained, outcomes, settled, unknown
from zsim.schedule.program_index import Numbered
from zsim.schedule.schedule import Program, Schedule

SETUP, STEP = "setup", "step"


class NumberedProgram:
    """One role's program: setup and step with numbers, and happens-before in them."""

    def __init__(self, program: Program, setup: Numbered, step: Numbered) -> None:
        self.program = program
        self.setup = setup
        self.step = step

    @property
    def parts(self) -> tuple[tuple[str, Numbered], tuple[str, Numbered]]:
        """Both parts with their names."""
        return ((SETUP, self.setup), (STEP, self.step))

    @cached_property
    def crowded(self) -> dict[str, int]:
        """The number of paths through each part whose branches have too many outcomes."""
        ways = {part: outcomes(numbered, numbered.items) for part, numbered in self.parts}
        return {part: count for part, count in ways.items() if count > OUTCOMES_MAX}

    @cached_property
    def setup_order(self) -> Timeline:
        """Happens-before of setup."""
        return Timeline(self.setup, drained(self.setup))

    @cached_property
    def step_order(self) -> Timeline:
        """Happens-before of a step, given only the order of streams for earlier steps."""
        return Timeline(self.step, unknown(self.step))

    @cached_property
    def settled_order(self) -> Timeline:
        """Happens-before of a step, given everything known of earlier steps."""
        return settled(self.step)

    def proved(self, examine: Callable[[Timeline], list[Finding]]) -> list[Finding]:
        """Return the findings of `examine` in a step, with `settled_order` if needed."""
        return examine(self.step_order) and examine(self.settled_order)


@dataclass(frozen=True, eq=False)
class Context:
    """A schedule, its programs with numbers, and the model that it trains if known."""

    schedule: Schedule
    programs: tuple[NumberedProgram, ...]
    model: Model | None

    @classmethod
    def of(cls, schedule: Schedule, model: Model | None = None) -> "Context":
        """Return the context of a schedule, with every program numbered."""
        return cls(
            schedule,
            tuple(
                NumberedProgram(
                    program,
                    Numbered(program, program.setup, schedule.streams),
                    Numbered(program, program.step, schedule.streams),
                )
                for program in schedule.programs
            ),
            model,
        )
