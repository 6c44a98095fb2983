"""`zsim compare`: two scenarios, schedules or traces side by side, largest difference first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.backend import BackendError, NoWayError
from zsim.comparison import Comparison, Difference, Measure, compare, counts, sort_of
from zsim.document import DocumentError, decode_trace
from zsim.shell.answer import print_json
from zsim.shell.mistake import MistakeError, file_fault, mistakes
from zsim.shell.source import Changes, Source, read
from zsim.trace import Trace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: what it is called, and what happened."""

    name: str
    trace: Trace


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
    found = compare(sides[0].trace, sides[1].trace)
    if request.as_json:
        print_json(_object(sides, found))
    else:
        _print(sides, found)


def _side(name: str, settings: tuple[str, ...], but: tuple[str, ...]) -> Side:
    trace = _trace(name)
    if trace is None:
        source = read(name, Changes(settings=(*settings, *but)))
        changed = ", ".join((*settings, *but))
        return Side(name=f"{name} with {changed}" if changed else name, trace=_simulated(source))
    for option, given in (("--set", settings), ("--but", but)):
        if given:
            raise MistakeError(f"{option}: {name} is a trace; settings are for scenarios")
    return Side(name=name, trace=trace)


def _trace(name: str) -> Trace | None:
    """The trace in the file `name`, or None if it is something else."""
    path = Path(name)
    if path.suffix != ".json":
        return None
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise file_fault(name, error) from None
    except UnicodeDecodeError:
        raise MistakeError(f"{name}: not text: traces and schedules are JSON") from None
    if '"zsim": "job"' in text[:200]:
        return None
    with mistakes(DocumentError, prefix=f"{name}: "):
        return decode_trace(text)


def _simulated(source: Source) -> Trace:
    job = source.job()
    with mistakes(BackendError, NoWayError, prefix=f"{source.title}: "):
        return source.simulation().run(job, seed=0)


def _object(sides: tuple[Side, Side], found: Comparison) -> dict[str, object]:
    return {
        "first": sides[0].name,
        "second": sides[1].name,
        "step_time_s": _entry(found.step),
        "step_time_differs_by_more_than_error": _differ(sides, found.step),
        "figures": [_entry(each) for each in found.figures],
        "sorts": [_entry(each) for each in found.sorts],
        "operations": [_entry(each) for each in found.operations],
        "operations_only_in_first": found.only_first,
        "operations_only_in_second": found.only_second,
    }


def _entry(each: Difference) -> dict[str, object]:
    return {
        "name": each.name,
        f"first_{each.measure}": each.first,
        f"second_{each.measure}": each.second,
        "relative": each.relative,
    }


def _print(sides: tuple[Side, Side], found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    print(f"A: {sides[0].name} ({sides[0].trace.backend})")
    print(f"B: {sides[1].name} ({sides[1].trace.backend})")
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
    verdict = _verdict(sides, found.step)
    if verdict:
        print(verdict)


def _verdict(sides: tuple[Side, Side], step: Difference) -> str:
    """How sure it is that steps of two simulations differ; nothing of what was measured."""
    if not step.relative or any(each.trace.backend != "sim" for each in sides):
        return ""
    differ = _differ(sides, step)
    if differ is None:
        return (
            "No measurement has judged predictions like these: nobody knows how far off they are."
        )
    error = max(each.trace.error or 0.0 for each in sides)
    how = "more" if differ else "less"
    return f"The steps differ by {how} than the error of the prediction, {error:.1%}."


def _differ(sides: tuple[Side, Side], step: Difference) -> bool | None:
    """Whether the steps differ by more than predictions are off; None where nobody knows that."""
    return counts(step.relative or 0.0, [each.trace.error for each in sides])


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
