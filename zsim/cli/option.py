"""What the commands of `zsim` share: exit codes, and options that several of them have.

Exit codes: 0 done; 1 the answer is no (findings, does not fit); 2 the caller's mistake; 3 the run
itself failed; 4 done and answered, but a file could not be written; 130 interrupted.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final

import typer

LONGEST_S: Final = 1e6
"""A week and a half."""


class Code(IntEnum):
    """What the process returns."""

    DONE = 0
    NO = 1
    MISTAKE = 2
    FAILED = 3
    UNWRITTEN = 4
    INTERRUPTED = 130


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers from `minimum` on, for an option."""

    def parse(given: str | int) -> int:
        text = str(given)  # a default comes as it is
        if not text.isdecimal() or int(text) < minimum:
            raise typer.BadParameter(f"{text!r} must be a whole number, at least {minimum}")
        return int(text)

    return parse


def more_than_nothing(given: str | float) -> float:
    """A number of more than 0, for an option."""
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number < LONGEST_S:
        raise typer.BadParameter(
            f"{str(given)!r} must be a number of more than 0 and less than {LONGEST_S:g}"
        )
    return number


def scenario_names(begun: str) -> list[str]:
    """Return the scenarios that ship whose names begin so, for completion."""
    from zsim.files.installed import scenarios

    return [name for name in scenarios() if name.startswith(begun)]


def study_names(begun: str) -> list[str]:
    """Return the studies that ship whose names begin so."""
    from zsim.files.installed import studies

    return [name for name in studies() if name.startswith(begun)]


def backend_names(begun: str) -> list[str]:
    """Return the backends that are installed whose names begin so."""
    from zsim.backend.backend import names

    return [name for name in names() if name.startswith(begun)]


def topology_names(begun: str) -> list[str]:
    """Return the systems and nodes that ship whose names begin so."""
    from zsim.cluster.files import Part
    from zsim.files.installed import part_names

    names = (*part_names(Part.SYSTEM), *part_names(Part.NODE))
    return [name for name in names if name.startswith(begun)]


def shown_names(begun: str) -> list[str]:
    """Return all names that ship which begin so."""
    from zsim.files.source import shipped_names

    return [name for name in shipped_names() if name.startswith(begun)]


def setting_keys(begun: str) -> list[str]:
    """Return the keys of a scenario that begin so, with what stands behind them."""
    from zsim.scenario.tables import Scenario as Tables
    from zsim.scenario.tables import Table

    keys: list[str] = []
    for name, field in Tables.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, Table):
            keys += [f"{name}.{key}=" for key in table.model_fields]
    return [key for key in keys if key.startswith(begun)]


Scenario = Annotated[
    str,
    typer.Argument(
        help="A scenario that ships (zsim list), or a file.",
        show_default=False,
        autocompletion=scenario_names,
    ),
]
Schedulish = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|FILE.json",
        help="A scenario that ships (zsim list), a file, or a schedule in JSON.",
        show_default=False,
        autocompletion=scenario_names,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the scenario: zero.stage=3; none takes a key away. Many are allowed.",
        autocompletion=setting_keys,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
