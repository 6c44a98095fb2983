"""The page of the best setting: its keys and cost, its ties, and why other settings lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.report.page import Page, PageTable, Section, TableCell, number, words
from zsim.report.svg.figure import NoFigureError, PlottedPoint, PointChart, Series
from zsim.units import format_bytes, format_seconds

FRONT, OTHER = "#d1603f", "#9aa5b1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSetting:
    """A setting that fits, compared with the best one.

    Attributes:
        name: description of the setting.
        standing: text on its distance from the best, and on a tie.
        more: share by which it is worse than the best.
        error: text on the error of its step time and the probability that it fits.
        days: duration of the training; None if its number of tokens is not given.
        cost: cost of the training, or None.
        energy_kwh: expected energy of the training, or None.
    """

    name: str
    gpus: int
    step_time_s: float
    memory_bytes: int
    standing: str
    more: float
    error: str
    days: float | None = None
    cost: float | None = None
    energy_kwh: float | None = None

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds of a step; cost is proportional to them."""
        return self.gpus * self.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSetting:
    """The best setting in full.

    Attributes:
        changes: scenario keys and their values.
        scenario: text of a scenario file for `zsim run`.
        runtime: name of the runtime.
        config: configuration of that runtime, or why zsim cannot write one.
    """

    changes: tuple[tuple[str, str], ...]
    scenario: str
    runtime: str
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFindings:
    """Content of the page.

    Attributes:
        command: command line of the search; "" for a search from Python.
        answer: the answer in a sentence.
        facts: lines that the command prints.
        found: the best setting; None if none fits.
        fitting: every simulated setting that fits, best first.
        ten: the best setting of each of the ten best groups.
        memory_front: Pareto front of step time and memory, fastest first.
        cost_front: Pareto front of step time and cost; empty if all settings use equally many GPUs.
        losses: number, kind and reason of the settings that lost.
        searched: sentence on the settings that were searched and those that were not reached.
    """

    title: str
    command: str
    answer: str
    facts: tuple[tuple[str, str], ...]
    found: FoundSetting | None
    fitting: tuple[RankedSetting, ...]
    ten: tuple[RankedSetting, ...]
    ties: str
    memory_front: tuple[RankedSetting, ...]
    cost_front: tuple[RankedSetting, ...]
    losses: tuple[tuple[int, str, str], ...]
    searched: str


def best_page(found: BestFindings) -> Page:
    """Return the page of `found`."""
    sections: list[Section] = []
    if found.ten:
        sections.append(_ten(found))
        sections.append(_memory(found))
    if found.cost_front:
        sections.append(_cost(found))
    sections.append(_losses(found))
    if found.found is not None:
        sections += [_configuration(found.found), _scenario(found.found)]
    if found.command:
        sections.append(Section(title="What was asked", code=found.command))
    return Page(title=found.title, answer=found.answer, facts=found.facts, sections=tuple(sections))


def memory_chart(found: BestFindings) -> PointChart:
    """Return the chart of step time against memory."""
    return PointChart(
        series=_SERIES,
        points=tuple(
            PlottedPoint(
                x=each.step_time_s,
                y=each.memory_bytes / 1e9,
                series=0 if each in found.memory_front else 1,
                title=_point_title(each),
                text="best" if each is found.fitting[0] else "",
            )
            for each in found.fitting
        ),
        x_axis="seconds of a step",
        y_axis="memory of a GPU that is reserved, GB",
    )


def cost_chart(found: BestFindings) -> PointChart:
    """Return the chart of step time against cost.

    Raises:
        NoFigureError: all settings use equally many GPUs, so cost is proportional to step time.
    """
    if not found.cost_front:
        raise NoFigureError("all settings have as many GPUs: what costs more takes longer")
    best = found.fitting[0]
    return PointChart(
        series=_SERIES,
        points=tuple(
            PlottedPoint(
                x=each.step_time_s,
                y=each.gpu_seconds / best.gpu_seconds,
                series=0 if each in found.cost_front else 1,
                title=_point_title(each),
                text="best" if each is best else "",
            )
            for each in found.fitting
        ),
        x_axis="seconds of a step",
        y_axis="cost of a step over that of the best",
    )


BEST_CHARTS = {"memory": memory_chart, "cost": cost_chart}
"""Charts that can be written to a file, by the quantity on their vertical axis."""

_SERIES = (Series("nothing takes less of both", FRONT), Series("other settings that fit", OTHER))


def _point_title(each: RankedSetting) -> str:
    step, memory = format_seconds(each.step_time_s), format_bytes(each.memory_bytes)
    return f"{each.name}: {step}, {memory} on each of {each.gpus:,} GPUs, {each.standing}"


def _ten(found: BestFindings) -> Section:
    return Section(
        title="The best of those simulated",
        sentences=(
            f"Best of {len(found.fitting):,} settings that were simulated and fit, each of "
            "another runtime, stage, degrees or checkpointing. Settings that cannot be the best "
            f"were not simulated, though they may be faster than some of these. {found.ties}",
        ),
        table=_table(found.ten),
    )


def _memory(found: BestFindings) -> Section:
    shown = found.memory_front
    return Section(
        title="Time against memory",
        sentences=(
            f"Of {len(found.fitting):,} settings that were simulated and fit, {len(shown):,} are "
            "beaten by no other in time and memory at once.",
        ),
        figure=memory_chart(found),
        table=_table(shown),
        folded=f"the {len(shown):,} of the line, the fastest first",
    )


def _cost(found: BestFindings) -> Section:
    return Section(
        title="Time against cost",
        sentences=("Cost is that of all GPUs for a step, over that of the best setting.",),
        figure=cost_chart(found),
    )


def _table(settings: Sequence[RankedSetting]) -> PageTable:
    """Return a row for each setting, without the columns on training that have no values."""
    asked = [
        column
        for column in _TRAINING
        if any(getattr(each, column[1]) is not None for each in settings)
    ]
    return PageTable(
        columns=(
            *("setting", "GPUs", "step time", "memory", "beside the best"),
            *(title for title, _, _ in asked),
            "error",
        ),
        numeric=(False, True, True, True, True, *(True for _ in asked), False),
        rows=tuple(
            (
                words(each.name),
                number(f"{each.gpus:,}", each.gpus),
                number(format_seconds(each.step_time_s), each.step_time_s),
                number(format_bytes(each.memory_bytes), each.memory_bytes),
                number(each.standing, each.more),
                *(_amount(getattr(each, name), digits) for _, name, digits in asked),
                words(each.error),
            )
            for each in settings
        ),
    )


_TRAINING = (("days", "days", 1), ("cost", "cost", 0), ("kWh", "energy_kwh", 0))
"""Columns on the training: title, attribute, decimal places."""


def _amount(value: float | None, digits: int) -> TableCell:
    return number("" if value is None else f"{value:,.{digits}f}", value or 0)


def _losses(found: BestFindings) -> Section:
    return Section(
        title="Why the others lost",
        sentences=(found.searched,),
        table=PageTable(
            columns=("settings", "what happened", "why"),
            numeric=(True, False, False),
            rows=tuple(
                (number(f"{count:,}", count), words(kind), words(why))
                for count, kind, why in found.losses
            ),
        )
        if found.losses
        else None,
    )


def _configuration(found: FoundSetting) -> Section:
    return Section(
        title=f"For {found.runtime}",
        sentences=(f"The best setting as {found.runtime} takes it (--config FILE writes it).",),
        code=found.config,
        folded="its keys in a scenario",
        table=PageTable(
            columns=("key", "value"),
            numeric=(False, False),
            rows=tuple((words(key), words(value)) for key, value in found.changes),
        ),
    )


def _scenario(found: FoundSetting) -> Section:
    return Section(
        title="As a scenario",
        sentences=("zsim run FILE takes it (--save FILE writes it).",),
        code=found.scenario,
    )
