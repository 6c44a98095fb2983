"""A setting that was simulated in a search for the best one, and its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from zsim.api.setting_trial import SettingOutcome

LONGER = 1.05
"""Minimum ratio of published to predicted times at which the text mentions it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSetting:
    """A setting that was simulated.

    Attributes:
        group: index of its group; settings of a group differ only in knobs of their runtime.
        changes: the values of the setting, by key of a scenario.
        gpus: number of GPUs.
        outcome: result of its simulation.
        value: value of the objective at the expected step time, which is the predicted one times
            the median slowdown of similar published runs; None if it does not fit.
        is_late: True if the training would exceed its time limit.
        is_plain: True for a plain FSDP2 setting; every answer shows one that fits.
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
        """True if it fits and meets every limit."""
        return self.value is not None and self.outcome.fits and not self.is_late

    @property
    def order(self) -> tuple[bool, bool, bool, float, int, str]:
        """Sort key: the best first, of equal ones that with less memory.

        Settings that may not fit follow all that surely fit, those with almost no free memory last.
        """
        value, outcome = inf if self.value is None else self.value, self.outcome
        last = (value, outcome.memory_bytes, repr(self.changes))
        return (not self.is_answer, not outcome.is_sure, outcome.is_tight, *last)

    def longer(self) -> str:
        """Return the text about how much slower than predicted similar published runs were."""
        return f"published ones took {self.outcome.slower:.2g} times as long"

    def name(self) -> str:
        """Return the setting as one line of text."""
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
