"""docs/evidence.md, from the table of published runs: `python tests/support/evidence_page.py`.

Sections between marks are made from what ships; the lines around them are written by hand.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median

from fit_sources import rests_on
from generated_sections import made, table

from zsim.files.installed import fitted_kernels, network_profiles
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.runtimes.lookup import host_costs_of, runtimes
from zsim_lab.answer.choice_validation import validate_best
from zsim_lab.answer.error_validation import validate_error
from zsim_lab.verdict.verdict import errors_of

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
COMMAND = "python tests/support/evidence_page.py"
COLUMNS = ("rows:", "median:", "90th percentile:", "worst:", "median, signed:")
SLOW = {"coverage": "zsim validate error", "choices": "zsim validate best"}
"""Sections with the output of a command that takes seconds."""

SINGLE = "Nanotron"
"""Runtime of one publication whose pipelines are far off: it has lines of its own."""

CLASSES = {1: "1", 4: "2 to 4", 16: "5 to 16", 64: "17 to 64"}
"""Classes of nodes by their upper bound."""

MORE = max(CLASSES) + 1
"""Key of the class of all larger numbers of nodes."""


def errors(found: Sequence[float]) -> tuple[str, ...]:
    """Return the cells of `COLUMNS` for relative errors."""
    size = errors_of([abs(each) for each in found])
    shares = (f"{each * 100:.1f} %" for each in (size.median, size.p90, size.most))
    return (f"{size.rows:,}", *shares, f"{median(found) * 100:+.1f} %")


def by_publication(error: Callable[[JudgedRun], float | None]) -> str:
    """Return the table of an error by publication, with fitted rows on a line of their own."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in judged_runs():
        value = error(run)
        if value is not None:
            found[f"{run.publication}, fitted" if run.fitted else run.publication].append(value)
    rows = [(name, *errors(found[name])) for name in sorted(found, key=str.casefold)]
    everything = [value for values in found.values() for value in values]
    return table(("publication", *COLUMNS), [*rows, ("all", *errors(everything))])


def by_kind(titles: Sequence[str], kind: Callable[[JudgedRun], tuple[int, str, str]]) -> str:
    """Return the table of errors of step times by kind: its place among kinds, and two cells."""
    found: defaultdict[tuple[int, str, str], list[float]] = defaultdict(list)
    for run in judged_runs():
        found[kind(run)].append(run.step_error)
    rows = [(*each[1:], *errors(found[each])) for each in sorted(found)]
    return table((*titles, *COLUMNS), rows)


def by_runtime() -> str:
    """Return the table of errors by runtime, with and without a pipeline."""
    return by_kind(
        ("runtime", "pipeline"),
        lambda run: (0, run.features.runtime, "yes" if run.features.pipeline > 1 else "no"),
    )


def by_tensor_degree() -> str:
    """Return the table of errors by tensor degree."""
    return by_kind(
        ("tensor ranks:", "runtime"),
        lambda run: (run.features.tensor, str(run.features.tensor), runtime_of(run)),
    )


def by_nodes() -> str:
    """Return the table of errors by the number of nodes."""

    def kind(run: JudgedRun) -> tuple[int, str, str]:
        most = next((most for most in CLASSES if run.features.nodes <= most), MORE)
        return most, CLASSES.get(most, f"more than {max(CLASSES)}"), runtime_of(run)

    return by_kind(("nodes:", "runtime"), kind)


def runtime_of(run: JudgedRun) -> str:
    """Return nanotron, or the name for all other runtimes."""
    return "nanotron" if run.features.runtime == SINGLE else "all others"


def of_one_publication() -> str:
    """Return the table of constants that were fitted to one publication."""
    hosts = {name: host_costs_of(name).rests_on for name in runtimes()}
    found = rests_on(fitted_kernels().values(), network_profiles().values(), hosts)
    rows = sorted((name, of[0]) for name, of in found.items() if len(of) == 1)
    return table(("constants", "fitted to"), rows)


def block(command: str, text: str) -> str:
    """Return a block with a command and the text that it prints."""
    return f"```text\n$ {command}\n{text}\n```\n"


@cache
def makers() -> dict[str, Callable[[], str]]:
    """Return the function that makes each section of the page, by its name."""
    return {
        "step time": partial(by_publication, lambda run: run.step_error),
        "runtimes": by_runtime,
        "tensor ranks": by_tensor_degree,
        "nodes": by_nodes,
        "peaks": partial(by_publication, lambda run: run.peak_error),
        "coverage": lambda: block(SLOW["coverage"], validate_error().text()),
        "choices": lambda: block(SLOW["choices"], validate_best().text()),
        "constants": of_one_publication,
    }


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text("utf-8"), makers()), "utf-8")
