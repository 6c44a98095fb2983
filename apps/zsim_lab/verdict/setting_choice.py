"""Choices among published settings: the setting that predictions rank first, and the fastest one.

A group has one model with one vocabulary and sequence length, one number and kind of GPUs, and one
publication: a planner chooses none of them. The values in which its rows differ are its choices.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

LEAST_SETTINGS = 10
"""Minimum number of settings of a group: among fewer there is little to choose."""

NEAR = 0.1
"""A choice is good if its published rate is within this fraction of the published best."""

DIFFERENT = 0.1
"""Pairs of settings count whose published rates differ by more than this fraction."""

PADDED = 1024
"""Vocabularies are equal if they are after padding for 8 tensor ranks, as Megatron-LM pads them."""

AXES = ("data", "tensor", "pipeline", "replicate")


Group = tuple[str, str, str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSetting:
    """A published setting and its prediction.

    Attributes:
        publication: name of the table, or of the publication.
        hardware, model: hardware and model of the run.
        gpus: number of GPUs.
        name: text of the setting.
        tokens: tokens of a step.
        step_s: published step time; None for a run without a result.
        predicted_s: predicted step time; None if it is predicted not to fit, or not predicted.
        slower: median ratio of published to predicted times of similar runs in other sweeps.
        is_tight: True if it is predicted to be at the edge of memory.
        vocab_size, sequence_length: sizes of the model; 0 if they are unknown.
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
    vocab_size: int = 0
    sequence_length: int = 0

    @property
    def group(self) -> Group:
        """Key of the settings that one choice is made among."""
        model = (self.model, -(-self.vocab_size // PADDED), self.sequence_length)
        return (self.publication, self.hardware, *model, self.gpus)

    @property
    def rate(self) -> float:
        """Published tokens per second; 0 without a result."""
        return 0.0 if self.step_s is None else self.tokens / self.step_s

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, the best last: free memory, then expected tokens per second."""
        rate = self.expected_rate
        return (bool(rate) and not self.is_tight, rate)

    @property
    def expected_rate(self) -> float:
        """Predicted tokens per second, divided by the slowdown of similar runs; 0 if unknown."""
        return 0.0 if self.predicted_s is None else self.tokens / self.predicted_s / self.slower

    @property
    def error(self) -> float | None:
        """Relative error of the predicted step time; None if either is unknown."""
        if self.step_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChoice:
    """The setting chosen in a group, and the fastest setting.

    Attributes:
        settings: number of settings with a result.
        chosen: the setting ranked first among those with a result.
        of_all: the setting ranked first among all, including those without a result.
        best: the fastest setting.
    """

    settings: int
    chosen: PublishedSetting
    of_all: PublishedSetting
    best: PublishedSetting

    @property
    def share(self) -> float:
        """Published rate of the choice divided by that of the best."""
        return self.chosen.rate / self.best.rate

    @property
    def is_good(self) -> bool:
        """True if the choice is within a tenth of the best."""
        return self.share >= 1 - NEAR

    @property
    def runs(self) -> bool:
        """True if the setting chosen among all has a published step time."""
        return self.of_all.step_s is not None


def choices(settings: Iterable[PublishedSetting]) -> list[SettingChoice]:
    """Return the choice of each group with enough settings with a result."""
    return [made for own in _groups(settings) if (made := _choice(own)) is not None]


def ordered_pairs(settings: Iterable[PublishedSetting]) -> tuple[int, int]:
    """Return the pairs of a group whose faster setting is expected to be faster, and all pairs.

    Pairs of groups of any size count, if their published rates differ by more than `DIFFERENT`.
    """
    ordered = total = 0
    for own in _groups(settings):
        known = [each for each in own if each.rate and each.predicted_s]
        for one, other in combinations(sorted(known, key=lambda each: each.rate), 2):
            if other.rate > (1 + DIFFERENT) * one.rate:
                total += 1
                ordered += other.expected_rate > one.expected_rate
    return ordered, total


def _groups(settings: Iterable[PublishedSetting]) -> list[list[PublishedSetting]]:
    """Return the settings of each group, ordered by group."""
    groups: defaultdict[Group, list[PublishedSetting]] = defaultdict(list)
    for each in settings:
        groups[each.group].append(each)
    return [own for _, own in sorted(groups.items(), key=lambda item: item[0])]


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


def gpus_of(settings: Mapping[str, object]) -> int:
    """Return the number of GPUs of a run with `settings` by dotted key."""
    return prod(_number(settings, f"parallel.{axis}") for axis in AXES)


def tokens_of(settings: Mapping[str, object]) -> int:
    """Return the tokens of a step of a run with `settings` by dotted key."""
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
    """Return the text of a run with `settings` by dotted key."""
    parts = [f"{word} {settings[key]}" for key, word in WORDS.items() if key in settings]
    if settings.get("activations.checkpointing") == "full":
        parts.append("checkpoints")
    return ", ".join(parts)


def _number(settings: Mapping[str, object], key: str) -> int:
    found = settings.get(key, 1)
    assert isinstance(found, int)
    return found
