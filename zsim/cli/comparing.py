"""`zsim compare`: two scenarios, schedules or traces side by side, largest difference first."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.analysis.compare import Comparison, Difference, Measure, sort_of
from zsim.api.comparison import ComparisonResult, compare, is_trace
from zsim.api.scenario import LoadedScenario, find_scenario
from zsim.cli.answer import print_json
from zsim.cli.spinner import spinner
from zsim.files.source import Changes
from zsim.mistake import MistakeError
from zsim.units import format_bytes, format_seconds

FIGURES, SORTS, OPERATIONS = 10, 6, 8
"""Rows that are shown of each; `--json` has all."""

NOTHING = 1e-6
"""No row is shown of a difference of a smaller share of the step, or of all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line of `zsim compare` asks for."""

    first: str
    second: str | None
    settings: tuple[str, ...]
    but: tuple[str, ...]
    as_json: bool


def compare_runs(request: Request) -> None:
    """Print how the two differ.

    Raises:
        MistakeError: one of them cannot be read or simulated.
    """
    if request.second is None and not request.but:
        raise MistakeError("B: missing; give a second run, or with --but what changes in the first")
    second = request.first if request.second is None else request.second
    sides = (
        _side(request.first, request.settings, ()),
        _side(second, request.settings, request.but),
    )
    with spinner("two runs"):
        result = compare(*sides)
    if request.as_json:
        print_json(result.to_dict())
    else:
        _print(result)


def _side(name: str, settings: tuple[str, ...], but: tuple[str, ...]) -> str | LoadedScenario:
    """Return what is compared under `name`: a trace by its name, or a scenario."""
    if not is_trace(name):
        return find_scenario(name).but(Changes(settings=(*settings, *but)))
    for option, given in (("--set", settings), ("--but", but)):
        if given:
            raise MistakeError(f"{option}: {name} is a trace; settings are for scenarios")
    return name


def _print(result: ComparisonResult) -> None:
    from rich.console import Console
    from rich.table import Table

    found = result.found
    for letter, side in (("A", result.first), ("B", result.second)):
        print(f"{letter}: {side.name} ({side.trace.backend})")
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("A", "B", "B - A", ""):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*_row(found.step))
    for title, rows, most in (
        ("", found.figures, FIGURES),
        ("time of operations, by sort", found.sorts, SORTS),
        ("of each sort the operation that differs most", _firsts(found.operations), OPERATIONS),
    ):
        shown = [each for each in rows if each.weight > NOTHING][:most]
        if title and shown:
            table.add_section()
            table.add_row(title)
        for each in shown:
            table.add_row(*_row(each))
    Console(width=100, highlight=False).print(table)
    print(_rest(found))
    verdict = _verdict(result)
    if verdict:
        print(verdict)


def _verdict(result: ComparisonResult) -> str:
    """Return how sure it is that steps of two simulations differ; nothing of measured ones."""
    traces = (result.first.trace, result.second.trace)
    if not result.found.step.relative or any(each.backend != "sim" for each in traces):
        return ""
    if result.steps_differ is None:
        return (
            "No measurement has judged predictions like these: nobody knows how far off they are."
        )
    error = max(each.error or 0.0 for each in traces)
    how = "more" if result.steps_differ else "less"
    return f"The steps differ by {how} than the error of the prediction, {error:.1%}."


def _firsts(operations: Sequence[Difference]) -> list[Difference]:
    """The first operation of each sort."""
    found: dict[str, Difference] = {}
    for each in operations:
        found.setdefault(sort_of(each.name), each)
    return list(found.values())


def _row(each: Difference) -> Sequence[str]:
    shown = format_seconds if each.measure is Measure.SECONDS else _bytes
    sign = "-" if each.change < 0 else "+" if each.change > 0 else ""
    change = f"{sign}{shown(abs(each.change))}"
    return each.name, shown(each.first), shown(each.second), change, _relative(each)


def _relative(each: Difference) -> str:
    """In percent, or from ten times as much on as a factor."""
    if each.relative is None:
        return ""
    if each.relative < 9:
        return f"{each.relative:+.1%}"
    return f"x {each.second / each.first:,.0f}"


def _bytes(amount: float) -> str:
    return format_bytes(int(amount))


def _rest(found: Comparison) -> str:
    """What is not in the table: how many operations are the same, and how many have no peer."""
    count = len(found.operations)
    same = sum(not each.change for each in found.operations)
    text = f"{count:,} operations are in both"
    text += f", {same:,} of them equal" if same else ""
    for side, alone in (("A", found.only_first), ("B", found.only_second)):
        text += f"; {alone:,} in {side} alone" if alone else ""
    return f"{text}."
