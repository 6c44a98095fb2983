"""HTML page and picture of the result of `zsim.best`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from zsim.api.error_text import probability_text
from zsim.api.figure_file import drawn_figure, need_figure
from zsim.api.notebook import Picture
from zsim.api.scenario import scenario_text
from zsim.api.training_budget import TrainingBudget
from zsim.files.output_file import write
from zsim.mistake import MistakeError
from zsim.units import format_bytes, format_seconds
from zsim_plan.answer.best_page import BEST_CHARTS, BestFindings, FoundSetting, RankedSetting
from zsim_plan.answer.search_text import better_unsure, risk_text
from zsim_plan.answer.tried_setting import LONGER, TriedSetting
from zsim_plan.search.front import front

BEST_FIGURES = tuple(BEST_CHARTS)
"""Names of the figures that `picture` draws."""


class LossCount(Protocol):
    """Number of settings that lost for one reason."""

    @property
    def kind(self) -> str:
        """Return the kind of loss, such as "cannot win"."""
        ...

    @property
    def why(self) -> str:
        """Return the reason, in one line."""
        ...

    @property
    def count(self) -> int:
        """Return the number of settings."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedSettings:
    """Settings of a result, the best first.

    Attributes:
        answers: settings that fit.
        ten: the best of the ten best groups.
        ties: settings that tie with the best.
    """

    answers: tuple[TriedSetting, ...]
    ten: tuple[TriedSetting, ...]
    ties: tuple[TriedSetting, ...]


class SettingRanking(Protocol):
    """Part of the result of `zsim.best` that its page shows."""

    @property
    def title(self) -> str:
        """Title: the model and the GPUs."""
        ...

    @property
    def losses(self) -> tuple[LossCount, ...]:
        """Reasons why settings lost."""
        ...

    @property
    def best(self) -> TriedSetting | None:
        """The best setting; None if none fits."""
        ...

    @property
    def unfinished(self) -> str:
        """Warning that a setting better by more than 5 % may be missed; empty if not."""
        ...

    def ordered(self) -> OrderedSettings:
        """Return the settings, the best first."""
        ...

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the facts that the command prints."""
        ...

    @property
    def objective(self) -> str:
        """The quantity that is minimized."""
        ...

    @property
    def unsure(self) -> TriedSetting | None:
        """The setting that is better than the best but may not fit; None if there is none."""
        ...

    def gain(self, other: TriedSetting) -> str:
        """Return the text of the gain of `other` over the best setting."""
        ...

    def more(self, other: TriedSetting) -> float:
        """Return by which fraction `other` is worse than the best."""
        ...

    def is_tie(self, other: TriedSetting) -> bool | None:
        """Return True if `other` ties with the best; None if the error is unknown."""
        ...

    def budget(self, setting: TriedSetting) -> TrainingBudget | None:
        """Return the time, cost and energy of the training; None if its tokens are unknown."""
        ...

    def scenario(self, setting: TriedSetting) -> dict[str, Any]:
        """Return the tables of the scenario with `setting`."""
        ...

    def config_text(self, setting: TriedSetting) -> str:
        """Return `setting` as the configuration of its runtime."""
        ...


class BestPages:
    """Page and picture of the result of `zsim.best`."""

    def report(self: SettingRanking, path: str | PathLike[str], *, command: str = "") -> None:
        """Write an HTML page about the result of `command` to `path` (.html).

        Raises:
            MistakeError: `path` is not .html, or the extra `report` is not installed.
            UnwrittenError: the file cannot be written.
        """
        from zsim.files.html_page import need_html, render
        from zsim_plan.answer.best_page import best_page

        need_html("report", Path(path))
        page = best_page(findings(self, command))
        write(Path(path), render(page, made=datetime.now(UTC).date()))

    def picture(
        self: SettingRanking,
        path: str | PathLike[str] | None = None,
        *,
        figure: str = BEST_FIGURES[0],
    ) -> Picture:
        """Draw step time against memory or cost; write it to `path` (.svg, .png or .pdf) if given.

        Args:
            path: path of the file; None to write none.
            figure: the other axis: "memory", or "cost" if settings differ in their number of GPUs.

        Raises:
            MistakeError: nothing fits, `figure` is unknown, or PNG or PDF needs the extra `draw`.
            UnwrittenError: the file cannot be written.
        """
        from zsim.report.drawing import picture

        need_figure("figure", figure, BEST_FIGURES)
        if self.best is None:
            raise MistakeError("--picture: no setting fits")
        found = findings(self, "")
        return drawn_figure(
            "picture", path, lambda: picture(BEST_CHARTS[figure](found), self.title, found.answer)
        )


def findings(result: SettingRanking, command: str) -> BestFindings:
    """Return the content of the page of `result`, which `command` produced."""
    settings = result.ordered()
    fitting = tuple(_ranked(result, each) for each in settings.answers)
    fleets = {each.gpus for each in fitting}
    of_setting = dict(zip(map(id, settings.answers), fitting, strict=True))
    return BestFindings(
        title=result.title,
        command=command,
        answer=_answer(result),
        facts=tuple(result.facts()),
        found=None if result.best is None else _found(result, result.best),
        fitting=fitting,
        ten=tuple(of_setting[id(each)] for each in settings.ten),
        ties=_ties(result, len(settings.ties)),
        memory_front=_front(fitting, ((each.step_time_s, each.memory_bytes) for each in fitting)),
        cost_front=_front(fitting, ((each.step_time_s, each.gpu_seconds) for each in fitting))
        if len(fleets) > 1
        else (),
        losses=tuple((each.count, each.kind, each.why) for each in result.losses),
        searched=_searched(result),
    )


def _front(
    settings: Sequence[RankedSetting], figures: Iterable[tuple[float, float]]
) -> tuple[RankedSetting, ...]:
    return tuple(settings[place] for place in front(list(figures)))


def _ranked(result: SettingRanking, each: TriedSetting) -> RankedSetting:
    budget = result.budget(each)
    return RankedSetting(
        name=each.name(),
        gpus=each.gpus,
        step_time_s=each.outcome.step_time_s,
        memory_bytes=each.outcome.memory_bytes,
        standing=_standing(result, each),
        more=result.more(each),
        error=_error(each),
        days=None if budget is None else budget.days,
        cost=None if budget is None else budget.cost,
        energy_kwh=None if budget is None else budget.expected_kwh,
    )


def _standing(result: SettingRanking, each: TriedSetting) -> str:
    if each is result.best:
        return "best"
    return f"{result.more(each):+.1%}{', a tie' if result.is_tie(each) else ''}"


def _error(each: TriedSetting) -> str:
    """Return the error of a setting and the probability that it fits, as a short text."""
    outcome = each.outcome
    error = "unknown" if outcome.error is None else f"±{outcome.error.half_width:.0%}"
    parts = [error, f"fits with probability {probability_text(outcome.fit_probability)}"]
    if outcome.slower >= LONGER:
        parts.append(each.longer())
    if outcome.is_tight:
        parts.append("leaves next to no memory")
    return "; ".join(parts)


def _answer(result: SettingRanking) -> str:
    best = result.best
    unfinished = f"{result.unfinished.capitalize()}. " if result.unfinished else ""
    if best is None:
        return f"{unfinished}No setting fits."
    outcome = best.outcome
    parts = [
        f"{risk_text(outcome)}{best.name()}: a step takes {format_seconds(outcome.step_time_s)}, "
        f"with {format_bytes(outcome.memory_bytes)} of {format_bytes(outcome.usable_bytes)} on "
        "each GPU"
    ]
    parts += [text for _, text in better_unsure(result)]
    if (budget := result.budget(best)) is not None:
        parts.append(budget.text())
    return f"{unfinished}{'. '.join(parts)}."


def _ties(result: SettingRanking, tied: int) -> str:
    if result.best is None:
        return ""
    if result.best.outcome.error is None:
        return "The error of such runs is unknown."
    within = "the error of their ratio"
    if not tied:
        return f"Each differs from the best by more than {within}."
    are = "setting ties" if tied == 1 else "settings tie"
    return f"{tied:,} {are} with the best: the difference is within {within}."


def _searched(result: SettingRanking) -> str:
    facts = dict(result.facts())
    parts = [facts[name] for name in ("search", "optimality") if name in facts]
    return f"{'; '.join(parts)}."


def _found(result: SettingRanking, best: TriedSetting) -> FoundSetting:
    try:
        config = result.config_text(best)
    except MistakeError as error:
        config = str(error)
    return FoundSetting(
        changes=tuple((key, str(value)) for key, value in best.changes.items()),
        scenario=scenario_text(result.scenario(best)),
        runtime=str(best.changes["zero.emulate"]),
        config=config,
    )
