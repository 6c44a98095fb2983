"""Compare the settings that zsim would choose with the fastest published settings."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer, Progress, ignore_progress
from zsim.api.answer_text import table_text
from zsim.cluster.cluster import Gpu
from zsim.files.source import settled
from zsim.mistake import MistakeError
from zsim.prediction.evidence import flat, judged_runs
from zsim.prediction.memory_margin import is_tight
from zsim.scenario.tables import from_tables
from zsim_lab.answer.choice_search import predicted, slower_elsewhere
from zsim_lab.rows.measurements import published_runs
from zsim_lab.rows.published import Published
from zsim_lab.verdict.setting_choice import (
    AXES,
    DIFFERENT,
    LEAST_SETTINGS,
    NEAR,
    PublishedSetting,
    SettingChoice,
    choices,
    gpus_of,
    name_of,
    ordered_pairs,
    tokens_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceValidation(Answer):
    """Choices among published settings.

    Attributes:
        choices: the choice in each group with enough settings.
        knows_failures: True if runs without a result are among the settings.
        ordered: number of pairs of settings whose faster one is expected to be faster.
        pairs: number of pairs whose published rates differ by more than a tenth; 0 if not all of
            their settings are predicted.
    """

    choices: tuple[SettingChoice, ...]
    knows_failures: bool
    ordered: int = 0
    pairs: int = 0

    @property
    def good(self) -> int:
        """Number of groups in which the choice is within a tenth of the best."""
        return sum(each.is_good for each in self.choices)

    def text(self) -> str:
        """Return a table of choices, and how many are good."""
        rows = [_cells(each) for each in self.choices]
        columns = ("model", "hardware", "sequence", "GPUs", "settings", "chosen / best")
        share = self.good / len(self.choices)
        lines = [
            table_text(columns, rows, words=range(2), width=None),
            f"{self.good} of {len(self.choices)} groups ({share:.0%}): the setting that is ranked "
            f"first is within {NEAR:.0%} of the published best",
        ]
        lines += [_miss(each) for each in self.choices if not each.is_good]
        if self.pairs:
            lines.append(
                f"{self.ordered:,} of {self.pairs:,} pairs ({self.ordered / self.pairs:.0%}) that "
                f"differ by more than {DIFFERENT:.0%}: the faster setting is expected to be faster"
            )
        if self.knows_failures:
            runs = sum(each.runs for each in self.choices)
            lines.append(
                f"{runs} of {len(self.choices)}: of all settings, also those without a result, "
                "the one that is ranked first has one"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate best --json` prints."""
        return {
            "groups": len(self.choices),
            "within": NEAR,
            "good": self.good,
            "pairs": self.pairs,
            "ordered": self.ordered,
            "choices": [_object(each) for each in self.choices],
        }


def validate_best(
    folder: str | PathLike[str] | None = None, *, progress: Progress = ignore_progress
) -> ChoiceValidation:
    """Return which published settings zsim ranks first, and how close they are to the best.

    Args:
        folder: folder of published tables; zsim predicts the rows that may be ranked first by
            their lower bound. Without it, use the table of published runs in the package, with
            its stored predictions.
        progress: receives the number of rows that need no prediction any more, and of all rows.

    Raises:
        MistakeError: no group has enough settings.
    """
    if folder is None:
        settings = tuple(_judged())
        ordered, pairs = ordered_pairs(settings)
        found = choices(settings)
        return ChoiceValidation(
            choices=tuple(found), knows_failures=False, ordered=ordered, pairs=pairs
        )
    runs = [run for own in published_runs(Path(folder)).values() for run in own if run.alternatives]
    blank = [_setting(run) for run in runs]
    counted = {
        each.chosen.group for each in choices(replace(one, predicted_s=one.step_s) for one in blank)
    }
    rows = [pair for pair in zip(runs, blank, strict=True) if pair[1].group in counted]
    found = choices(predicted(rows, progress))
    if not found:
        raise MistakeError(f"{folder}: no model has {LEAST_SETTINGS} settings on as many GPUs")
    return ChoiceValidation(choices=tuple(found), knows_failures=True)


def _judged() -> Iterable[PublishedSetting]:
    """Yield the rows of the table of published runs in the package."""
    gpus: dict[str, Gpu] = {}
    for run in judged_runs():
        settings, tight = run.settings, False
        if run.predicted_peak_bytes is not None:
            key = json.dumps(run.scenario["cluster"])
            if key not in gpus:
                gpus[key] = settled(run.publication, from_tables(run.scenario))[0].cluster.gpu
            degrees = (settings.get(f"parallel.{axis}") for axis in AXES)
            groups = sum(degree not in {None, 1} for degree in degrees)
            tight = is_tight(run.predicted_peak_bytes, gpus[key].usable_bytes(groups))
        shape = (settings.get(f"model.{key}") for key in ("layers", "hidden_size"))
        yield PublishedSetting(
            publication=run.publication,
            hardware=str(settings.get("cluster.topology", settings.get("cluster.node", ""))),
            model=" x ".join(map(str, shape)),
            gpus=gpus_of(settings),
            name=name_of(settings),
            tokens=tokens_of(settings),
            step_s=run.step_s,
            predicted_s=run.predicted_step_s,
            slower=slower_elsewhere(run.features, run.sweep),
            is_tight=tight,
            vocab_size=_whole(settings, "model.vocab_size"),
            sequence_length=_whole(settings, "model.sequence_length"),
        )


def _setting(run: Published) -> PublishedSetting:
    """Return the setting of a row without a prediction."""
    settings = flat({name: table for name, table in run.scenario.items() if name != "title"})
    return PublishedSetting(
        publication=run.file,
        hardware=run.hardware,
        model=run.model,
        gpus=gpus_of(settings),
        name=name_of(settings),
        tokens=tokens_of(settings),
        step_s=run.step_time_s,
        predicted_s=None,
        vocab_size=_whole(settings, "model.vocab_size"),
        sequence_length=_whole(settings, "model.sequence_length"),
    )


def _whole(settings: Mapping[str, object], key: str) -> int:
    """Return the whole number under a dotted key of a run's settings; 0 if there is none."""
    value = settings.get(key)
    return value if isinstance(value, int) else 0


def _cells(found: SettingChoice) -> tuple[str, ...]:
    chosen = found.chosen
    length = f"{chosen.sequence_length:,}" if chosen.sequence_length else ""
    counts = (length, f"{chosen.gpus:,}", f"{found.settings:,}", f"{found.share:.1%}")
    return (chosen.model, chosen.hardware, *counts)


def _miss(found: SettingChoice) -> str:
    """Return the text of a choice that is much slower than the best, with prediction errors."""
    chosen, best = found.chosen, found.best
    return (
        f"  {chosen.model} on {chosen.gpus:,}: chosen {chosen.name}{_off(chosen)}; the best was "
        f"{best.name}{_off(best)}"
    )


def _off(setting: PublishedSetting) -> str:
    return "" if setting.error is None else f" (predicted {setting.error:+.0%})"


def _object(found: SettingChoice) -> Mapping[str, object]:
    return {
        "publication": found.chosen.publication,
        "hardware": found.chosen.hardware,
        "model": found.chosen.model,
        "sequence_length": found.chosen.sequence_length or None,
        "gpus": found.chosen.gpus,
        "settings": found.settings,
        "share_of_best": found.share,
        "chosen": _setting_object(found.chosen),
        "best": _setting_object(found.best),
        "chosen_of_all": _setting_object(found.of_all),
    }


def _setting_object(each: PublishedSetting) -> Mapping[str, object]:
    return {"name": each.name, "step_s": each.step_s, "predicted_step_s": each.predicted_s}
