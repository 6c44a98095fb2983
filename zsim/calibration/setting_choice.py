"""Choices among published settings: the one that predictions rank first, beside the best one.

A group is of one model on so many GPUs of a kind, in one publication. What its rows have in common
is what a planner would be given; what they differ in is what he would choose.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

LEAST_SETTINGS = 10
"""Settings that a group needs to count: among fewer there is little to choose."""

NEAR = 0.1
"""A choice is good where its published rate is within so much of the published best."""

TIGHT = 0.97
"""Share of the usable memory beyond which a run is at the edge of it. Peaks are predicted within
3 % in the median (docs/validation.md). Of five published runs of 8B that are predicted to take more
three took three to eight times as long as predicted: an allocator that finds no memory gives back
its cache and begins again."""

AXES = ("data", "tensor", "pipeline", "replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetting:
    """A setting that somebody ran, and what is predicted of it.

    Attributes:
        publication: name of the table, or of the publication.
        hardware, model: what was run, and on what.
        gpus: how many.
        name: the setting in words.
        tokens: of a step.
        step_s: published; None where it ended without a result.
        predicted_s: None where it is predicted not to fit, or is not predicted.
        slower: how many times as long as predicted judged runs like it took, of other sweeps.
        is_tight: whether it is predicted to be at the edge of memory.
    """

    publication: str
    hardware: str
    model: str
    gpus: int
    name: str
    tokens: int
    step_s: float | None
    predicted_s: float | None
    slower: float = 1.0
    is_tight: bool = False

    @property
    def group(self) -> tuple[str, str, str, int]:
        """Key of what one choice is made among."""
        return (self.publication, self.hardware, self.model, self.gpus)

    @property
    def rate(self) -> float:
        """Published tokens a second; 0 without a result."""
        return 0.0 if self.step_s is None else self.tokens / self.step_s

    @property
    def rank(self) -> tuple[bool, float]:
        """Key by which settings are ranked, the first last: memory to spare, tokens a second.

        Of these as many are expected as judged runs like it had of their prediction.
        """
        rate = 0.0 if self.predicted_s is None else self.tokens / self.predicted_s / self.slower
        return (bool(rate) and not self.is_tight, rate)

    @property
    def error(self) -> float | None:
        """Error of the predicted step time as a fraction; None where one of the two lacks."""
        if self.step_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChoice:
    """What is chosen in a group, and what would have been best.

    Attributes:
        settings: how many have a result.
        chosen: the setting that is predicted fastest, of those with a result.
        of_all: the same of all, also of those that ended without one; None if none is predicted.
        best: the setting that was fastest.
    """

    settings: int
    chosen: PublishedSetting
    of_all: PublishedSetting
    best: PublishedSetting

    @property
    def share(self) -> float:
        """Published rate of what was chosen over the best."""
        return self.chosen.rate / self.best.rate

    @property
    def is_good(self) -> bool:
        """True if it is within a tenth of the best."""
        return self.share >= 1 - NEAR

    @property
    def runs(self) -> bool:
        """True if what would be chosen of all settings has a result."""
        return self.of_all.step_s is not None


def choices(settings: Iterable[PublishedSetting]) -> list[SettingChoice]:
    """Return the choice of each group that has enough settings with a result."""
    groups: defaultdict[tuple[str, str, str, int], list[PublishedSetting]] = defaultdict(list)
    for each in settings:
        groups[each.group].append(each)
    return [
        made
        for _, own in sorted(groups.items(), key=lambda item: item[0])
        if (made := _choice(own)) is not None
    ]


def _choice(own: Sequence[PublishedSetting]) -> SettingChoice | None:
    known = [each for each in own if each.step_s is not None]
    if len(known) < LEAST_SETTINGS or not any(each.predicted_s for each in known):
        return None
    return SettingChoice(
        settings=len(known),
        chosen=max(known, key=lambda each: each.rank),
        of_all=max(own, key=lambda each: each.rank),
        best=max(known, key=lambda each: each.rate),
    )


def is_tight(taken_bytes: int, usable_bytes: int) -> bool:
    """Tell whether so many bytes of those that are usable leave next to nothing."""
    return taken_bytes > TIGHT * usable_bytes


def gpus_of(settings: Mapping[str, object]) -> int:
    """Return the GPUs of a run whose values by dotted key are `settings`."""
    return prod(_number(settings, f"parallel.{axis}") for axis in AXES)


def tokens_of(settings: Mapping[str, object]) -> int:
    """Return the tokens of a step of such a run."""
    keys = ("train.micro_batch_size", "train.gradient_accumulation_steps", "model.sequence_length")
    replicas = (f"parallel.{axis}" for axis in ("data", "replicate"))
    return prod(_number(settings, key) for key in (*keys, *replicas))


WORDS = {
    "parallel.data": "data",
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "zero.stage": "stage",
    "train.micro_batch_size": "batch",
    "model.sequence_length": "tokens",
}


def name_of(settings: Mapping[str, object]) -> str:
    """Return what such a run sets, in words."""
    parts = [f"{word} {settings[key]}" for key, word in WORDS.items() if key in settings]
    if settings.get("activations.checkpointing") == "full":
        parts.append("checkpoints")
    return ", ".join(parts)


def _number(settings: Mapping[str, object], key: str) -> int:
    found = settings.get(key, 1)
    assert isinstance(found, int)
    return found
