"""`zsim best --or`: the best setting on each of several clusters or quotes, compared."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Final, Unpack

from zsim.analysis.run_comparison import counts
from zsim.api.answer import AnswerInFacts
from zsim.api.answer_text import facts_text, table_text, title_text
from zsim.api.error_text import probability_text
from zsim.api.scenario import Changed
from zsim.files.output_file import write
from zsim.mistake import MistakeError
from zsim.report.page import Page, PageTable, Section, number, words
from zsim_plan.answer.best_page import best_page
from zsim_plan.answer.best_question import BestOptions
from zsim_plan.answer.best_report import findings
from zsim_plan.answer.best_result import BestResult
from zsim_plan.answer.best_search import OPERATIONS, SearchOptions, best
from zsim_plan.answer.tried_setting import TriedSetting

QUOTE = re.compile(r"(.+)@([0-9]*\.?[0-9]+)")
"""GPUs and the price of one for an hour, such as 64xb200@4.20."""

MOST: Final = 8
"""Maximum number of clusters of one question: each has its own search."""


def quoted(text: str) -> tuple[str, float | None]:
    """Return the GPUs that `text` names, and the price after @, or None.

    Raises:
        MistakeError: the price is 0.
    """
    match = QUOTE.fullmatch(text.strip())
    if match is None:
        return text, None
    if not (price := float(match[2])):
        raise MistakeError(f"--gpus: {text!r}: the price after @ must be more than 0")
    return match[1], price


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """Result of the search on one cluster; `gpus` is the text that named it."""

    gpus: str
    result: BestResult

    @property
    def best(self) -> TriedSetting | None:
        """The best setting on this cluster; None if none fits."""
        return self.result.best

    @property
    def value(self) -> float | None:
        """The quantity that is minimized, for a token; None if nothing fits.

        Steps may have different numbers of tokens, and for time, cost and energy GPUs fail, so
        the step is stretched by the time that passes.
        """
        if self.best is None or self.best.value is None:
            return None
        if self.result.objective == "gpus":
            return float(self.best.gpus)
        goodput = self.result.goodput_of(self.best.gpus)
        lost = 1.0 if goodput is None else goodput.passing_s(1.0)
        if goodput is not None and self.result.objective == "cost":
            lost *= 1 + goodput.spare_gpus / self.best.gpus
        return self.best.value * lost / (self.result.sequences * self.result.sequence_length)


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterChoice(AnswerInFacts):
    """The best settings on several clusters.

    Attributes:
        title: the model and all clusters.
        answers: results, in the order of the question.
        left: clusters that were not searched because the user ended the command.
    """

    title: str
    answers: tuple[ClusterAnswer, ...]
    left: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[ClusterAnswer, ...]:
        """Results, the best first; those on which nothing fits come last."""

        def order(each: ClusterAnswer) -> tuple[bool, bool, float, float]:
            is_sure = each.best is not None and each.best.outcome.is_sure
            step_s = 0.0 if each.best is None else each.best.outcome.step_time_s
            return each.value is None, not is_sure, each.value or 0.0, step_s

        return tuple(sorted(self.answers, key=order))

    @property
    def chosen(self) -> ClusterAnswer | None:
        """The best cluster; None if nothing fits on any."""
        first = self.ranked[0]
        return None if first.value is None else first

    @property
    def is_interrupted(self) -> bool:
        """True if the user ended a search."""
        return bool(self.left) or any(each.result.is_interrupted for each in self.answers)

    @property
    def best(self) -> TriedSetting | None:
        """The best setting on the best cluster; None if nothing fits on any."""
        return None if self.chosen is None else self.chosen.best

    def more(self, other: ClusterAnswer) -> float:
        """Return by which fraction `other` is worse than the best cluster."""
        assert self.chosen is not None
        assert self.chosen.value
        assert other.value is not None
        return other.value / self.chosen.value - 1

    def is_tie(self, other: ClusterAnswer) -> bool | None:
        """Return True if `other` is within the error of the ratio; None if it is unknown."""
        assert self.best is not None
        assert other.best is not None
        found = counts(self.more(other), self.best.outcome.error, other.best.outcome.error)
        return None if found is None else not found

    def facts(self) -> list[tuple[str, str]]:
        """Return the best cluster, and how far the others are from it."""
        chosen = self.chosen
        left = [(each, "not searched: interrupted") for each in self.left]
        if chosen is None or chosen.best is None:
            return [("best", "nothing fits on any of these GPUs"), *left]
        what = WORSE[chosen.result.objective]
        lines = [("best", f"{chosen.gpus}: {self._figures(chosen)}")]
        for each in self.ranked[1:]:
            if each.value is None:
                lines.append((each.gpus, "nothing fits"))
                continue
            tie = self.is_tie(each)
            beyond = {None: "; the error is unknown", True: ", within the error", False: ""}[tie]
            lines.append(
                (each.gpus, f"{self.more(each):+.1%} {what}{beyond}: {self._figures(each)}")
            )
        return [*lines, *left, *self._caution()]

    def _caution(self) -> list[tuple[str, str]]:
        """Return a line if only some of the compared step times have a known error."""
        known = {True: list[str](), False: list[str]()}
        for each in self.ranked:
            if each.best is not None and each.value is not None:
                known[each.best.outcome.error is not None].append(each.gpus)
        if not all(known.values()):
            return []
        unknown, measured = (" and ".join(known[is_known]) for is_known in (False, True))
        is_scaled = all(each.result.is_scaled for each in self.ranked if each.gpus in known[False])
        how = (
            "scale those of measured GPUs by data sheets"
            if is_scaled
            else "rest on data sheets and are mostly too short"
        )
        text = (
            f"no published run is like that on {unknown}, whose times {how}; those on {measured} "
            "rest on measurements"
        )
        return [("caution", text)]

    def _figures(self, each: ClusterAnswer) -> str:
        assert each.best is not None
        budget = each.result.budget(each.best)
        if budget is not None:
            return budget.text()
        rate = each.result.sequences * each.result.sequence_length / each.best.outcome.step_time_s
        return f"{rate:,.0f} tokens/s with {each.best.gpus:,} GPUs"

    def text(self) -> str:
        """Return the comparison, then the facts of each cluster."""
        parts = [title_text(self.title), facts_text(self.facts()), "", self._table()]
        for each in self.ranked:
            if each.result.unfinished:
                parts += ["", each.result.unfinished, title_text(each.gpus)]
            else:
                parts += ["", title_text(each.gpus)]
            parts.append(facts_text(each.result.facts()))
        return "\n".join(parts)

    def _rows(self) -> list[tuple[str, ...]]:
        return [_row(each) for each in self.ranked]

    def _table(self) -> str:
        columns, *rows = ((row[0], *row[2:]) for row in (COLUMNS, *self._rows()))
        return table_text(columns, rows)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim best --or --json` prints."""
        return {
            "title": self.title,
            "best": None if self.chosen is None else self.chosen.gpus,
            "clusters": [
                {
                    "gpus": each.gpus,
                    "more": None if each.value is None else self.more(each),
                    "tie": (
                        None if each.value is None or each is self.chosen else self.is_tie(each)
                    ),
                    **each.result.to_dict(),
                }
                for each in self.ranked
            ],
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write the best setting of the best cluster as a scenario, as `BestResult.save`."""
        self._result("--save", path).save(path)

    def save_config(self, path: str | PathLike[str]) -> None:
        """Write the best setting of the best cluster, as `BestResult.save_config`."""
        self._result("--config", path).save_config(path)

    def _result(self, option: str, path: str | PathLike[str]) -> BestResult:
        if self.chosen is None:
            raise MistakeError(f"{option}: {path}: no setting fits")
        return self.chosen.result

    def report(self, path: str | PathLike[str], *, command: str = "") -> None:
        """Write one HTML page about all clusters to `path` (.html).

        Raises:
            MistakeError: `path` is not .html, or the extra `report` is not installed.
            UnwrittenError: the file cannot be written.
        """
        from zsim.files.html_page import need_html, render

        need_html("report", Path(path))
        write(Path(path), render(self._page(command), made=datetime.now(UTC).date()))

    def _page(self, command: str) -> Page:
        sections = [self._comparison()]
        for each in self.ranked:
            page = best_page(findings(each.result, ""))
            head = Section(
                title=each.gpus,
                sentences=(page.answer,),
                table=PageTable(
                    columns=("figure", "value"),
                    numeric=(False, False),
                    rows=tuple((words(name), words(text)) for name, text in page.facts),
                ),
            )
            sections += [head, *page.sections]
        if command:
            sections.append(Section(title="What was asked", code=command))
        answer = ". ".join(f"{name}: {text}" for name, text in self.facts())
        return Page(
            title=self.title,
            answer=f"{answer}.",
            facts=tuple(self.facts()),
            sections=tuple(sections),
        )

    def _comparison(self) -> Section:
        rows = tuple(
            (words(row[0]), words(row[1]), *(number(each, place) for each in row[2:]))
            for place, row in enumerate(self._rows())
        )
        return Section(
            title="The clusters compared",
            sentences=("Each has the best setting of its own search, the best cluster first.",),
            table=PageTable(
                columns=COLUMNS,
                numeric=(False, False, *(True for _ in COLUMNS[2:])),
                rows=rows,
            ),
        )


BILLION: Final = 10**9

COLUMNS: Final = (
    *("GPUs", "setting", "tokens/s", "MFU", "fits"),
    *("days", "cost", "cost of 1B tokens"),
)

WORSE: Final = {"time": "time", "cost": "cost", "energy": "energy", "gpus": "GPUs"}
"""Names of the quantity that is minimized."""


def _row(each: ClusterAnswer) -> tuple[str, ...]:
    """Return the texts of a cluster in the columns of the comparison."""
    best, result = each.best, each.result
    if best is None:
        return each.gpus, "none fits", *("" for _ in COLUMNS[2:])
    budget = result.budget(best)
    billion = result.budget(best, tokens=BILLION)
    tokens_per_s = result.sequences * result.sequence_length / best.outcome.step_time_s
    cost = None if budget is None else budget.cost
    return (
        each.gpus,
        best.name(),
        f"{tokens_per_s:,.0f}",
        f"{result.mfu(best):.1%}",
        probability_text(best.outcome.fit_probability),
        "" if budget is None else f"{budget.days:,.1f}",
        "" if cost is None else f"{cost:,.0f}",
        "" if billion is None or billion.cost is None else f"{billion.cost:,.2f}",
    )


def best_clusters(
    model: str,
    clusters: Sequence[str],
    changes: Changed = None,
    *,
    operations: int = OPERATIONS,
    search: SearchOptions | None = None,
    **options: Unpack[BestOptions],
) -> ClusterChoice:
    """Search for the best setting of a model on each of `clusters`, and compare them.

    Args:
        model: as in `best`.
        clusters: GPUs as in `best`, each with a price after @ if it is a quote: 64xb200@4.20.
        changes: values by key of a scenario, for all clusters.
        operations: limit of operations for each cluster.
        search: options of each search; after Ctrl-C no other cluster is searched.
        options: other options, see `BestOptions`.

    Raises:
        MistakeError: an argument is unknown, is missing, or contradicts another.
    """
    if len(clusters) > MOST:
        raise MistakeError(f"--or: {len(clusters)} clusters must be at most {MOST}")
    quotes = [quoted(each) for each in clusters]
    given = options.get("price") is not None or options.get("prices") is not None
    prices = {price is not None for _, price in quotes}
    if given and True in prices:
        raise MistakeError("--price, --prices: cannot be combined with a price after @; remove one")
    if len(prices) > 1:
        raise MistakeError("--or: give a price after @ to all GPUs or to none")
    of_search: SearchOptions = {} if search is None else search.copy()
    answers: list[ClusterAnswer] = []
    for text, (gpus, price) in zip(clusters, quotes, strict=True):
        asked = options.copy()
        if price is not None:
            asked["price"] = price
        try:
            result = best(model, gpus, changes, operations=operations, **of_search, **asked)
        except KeyboardInterrupt:
            if not (answers and of_search.get("may_interrupt")):
                raise
            break
        answers.append(ClusterAnswer(gpus=text, result=result))
        if result.is_interrupted:
            break
    title = f"{model} on {' or '.join(clusters)}"
    left = tuple(clusters[len(answers) :])
    return ClusterChoice(title=title, answers=tuple(answers), left=left)
