"""A setting that was simulated in a search of the best one, and its name in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from zsim.api.setting_trial import SettingOutcome

LONGER = 1.05
"""Times as long as predicted from which it is said that published runs took longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSetting:
    """A setting that was simulated.

    Attributes:
        group: number of its group; settings of one differ in knobs of their runtime.
        changes: what it says, by key of a scenario.
        gpus: that it runs on.
        outcome: what it came to.
        value: what is minimized, of the step time that is expected: as much longer than predicted
            as published runs of its kind took in the median; None if it could not be run.
        is_late: whether the training would take longer than it may.
        is_plain: whether it is a plain setting of FSDP2; every answer shows one that fits.
    """

    group: int
    changes: Mapping[str, object]
    gpus: int
    outcome: SettingOutcome
    value: float | None
    is_late: bool = False
    is_plain: bool = False

    @property
    def is_answer(self) -> bool:
        """True if it fits and keeps every limit."""
        return self.value is not None and self.outcome.fits and not self.is_late

    @property
    def order(self) -> tuple[bool, bool, bool, float, int, str]:
        """Key by which settings are sorted: the best first, of equal ones that with less memory.

        Settings that may not fit come after all that surely fit, those at the edge of memory last.
        """
        value, outcome = inf if self.value is None else self.value, self.outcome
        last = (value, outcome.memory_bytes, repr(self.changes))
        return (not self.is_answer, not outcome.is_sure, outcome.is_tight, *last)

    def longer(self) -> str:
        """Return in words how much longer than predicted published runs of its kind took."""
        return f"published ones took {self.outcome.slower:.2g} times as long"

    def name(self) -> str:
        """Return the setting in words."""
        runtime = self.changes["zero.emulate"]
        parts = [f"{runtime} stage {self.changes['zero.stage']}"]
        for key, word in AXES.items():
            if (degree := self.changes.get(key, 1)) != 1:
                parts.append(f"{word} {degree}")
        micro, times = (self.changes[f"train.{key}"] for key in BATCHES)
        parts.append(f"batch {micro} x {times}")
        if (fabric := self.changes.get("cluster.fabric")) is not None:
            parts.insert(0, str(fabric))
        parts.append(f"checkpoints {self.changes['activations.checkpointing']}")
        prefix = f"zero.{runtime}."
        parts += [
            f"{key.removeprefix(prefix)}={_word(value)}"
            for key, value in self.changes.items()
            if key.startswith(prefix)
        ]
        return ", ".join(parts)


AXES = {
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "parallel.replicate": "replicas",
    "parallel.data": "data",
    "parallel.context": "context",
}
BATCHES = ("micro_batch_size", "gradient_accumulation_steps")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
