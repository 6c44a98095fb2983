"""What is checked: a schedule, with each program numbered once for all families."""

from dataclasses import dataclass

from zsim.model import Model
from zsim.numbered import Numbered
from zsim.schedule import Program, Schedule


@dataclass(frozen=True, slots=True)
class NumberedProgram:
    """One role's program, setup and step numbered."""

    program: Program
    setup: Numbered
    step: Numbered

    @property
    def parts(self) -> tuple[tuple[str, Numbered], tuple[str, Numbered]]:
        """Both parts with their names."""
        return (("setup", self.setup), ("step", self.step))


@dataclass(frozen=True, slots=True)
class Subject:
    """A schedule, its programs with numbers, and the model that it trains where it is known."""

    schedule: Schedule
    programs: tuple[NumberedProgram, ...]
    model: Model | None

    @classmethod
    def of(cls, schedule: Schedule, model: Model | None = None) -> "Subject":
        """Number every program."""
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
