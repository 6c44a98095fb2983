"""Exit codes, and options that several commands of `zsim` share.

Exit codes: 0 success; 1 a negative answer (findings, does not fit); 2 a mistake of the user; 3 the
run failed; 4 success, but a file could not be written; 130 interrupted.
"""

from collections.abc import Callable
from enum import IntEnum
from importlib import import_module
from typing import Annotated, Final

import typer

from zsim.units import UnitError, parse_size

DIGITS: Final = 100
"""Maximum number of digits of an integer option."""

LONGEST_S: Final = 1e6
"""Exclusive upper bound of `more_than_nothing`; in seconds, about a week and a half."""


class Code(IntEnum):
    """Exit code of the process."""

    DONE = 0
    NO = 1
    MISTAKE = 2
    FAILED = 3
    UNWRITTEN = 4
    INTERRUPTED = 130


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser for an integer option that must be at least `minimum`."""

    def parse(given: str | int) -> int:
        text = str(given)  # typer passes a default unparsed
        if len(text) > DIGITS:
            raise typer.BadParameter(f"must have at most {DIGITS} digits, has {len(text)}")
        if not text.isdecimal() or int(text) < minimum:
            raise typer.BadParameter(f"{text!r} must be a whole number, at least {minimum}")
        return int(text)

    return parse


def more_than_nothing(given: str | float) -> float:
    """Parse an option as a number between 0 and `LONGEST_S`, both excluded."""
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number < LONGEST_S:
        raise typer.BadParameter(
            f"{str(given)!r} must be a number of more than 0 and less than {LONGEST_S:g}"
        )
    return number


def size(given: str | int) -> int:
    """Parse an option as a positive size and return its bytes."""
    try:
        found = given if isinstance(given, int) else parse_size(given)
    except UnitError as error:
        raise typer.BadParameter(str(error)) from error
    if found < 1:
        raise typer.BadParameter(f"{given!r} must be more than 0 B")
    return found


def completed(names: str) -> Callable[[str], list[str]]:
    """Return a shell completion over the names that `zsim.api.shipped.<names>()` returns."""

    def complete(begun: str) -> list[str]:
        known: Callable[[], list[str]] = getattr(import_module("zsim.api.shipped"), names)
        return [name for name in known() if name.startswith(begun)]

    return complete


def completed_keys(begun: str) -> list[str]:
    """Return the scenario keys that start with `begun`, each followed by "="."""
    from zsim.api.scenario import setting_keys

    return [f"{key}=" for key in setting_keys() if key.startswith(begun)]


Scenario = Annotated[
    str,
    typer.Argument(
        help="A scenario that ships (zsim list), or a file.",
        show_default=False,
        autocompletion=completed("scenario_names"),
    ),
]
Schedulish = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|FILE.json",
        help="A scenario that ships (zsim list), a file, or a schedule in JSON.",
        show_default=False,
        autocompletion=completed("scenario_names"),
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the scenario: zero.stage=3; none takes a key away. Many are allowed.",
        autocompletion=completed_keys,
    ),
]
Node = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Run on this node, with as many ranks as it has: a file that zsim measure wrote.",
    ),
]
Topology = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A system or node that ships (zsim list), or a file.",
        show_default=False,
        autocompletion=completed("topology_names"),
    ),
]
Nodes = Annotated[int, typer.Option(metavar="N", parser=at_least(1), help="Number of nodes.")]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Tokens of a training: its days, money and energy (15T)."),
]
Price = Annotated[
    float | None,
    typer.Option(metavar="PRICE", help="Price of a GPU for an hour.", parser=more_than_nothing),
]
Prices = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with prices of GPUs, and their date.")
]
Reliable = Annotated[
    list[str] | None,
    typer.Option(
        "--reliability",
        metavar="KEY=VALUE",
        help="Failures of GPUs: failures=2e-5 (per GPU and hour), checkpoint=60s, storage=20GB/s, "
        "restart=10min, interval=1h, repair=2days, spares=2, goodput=95%. Many are allowed.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
