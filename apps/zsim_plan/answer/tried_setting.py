"""A setting that was simulated in a search for the best one, and its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from zsim.runtimes.lookup import runtimes
from zsim_plan.answer.setting_trial import SettingOutcome

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
    def choice(self) -> tuple[object, ...]:
        """Key of what people choose between: all but the micro-batch and options of the runtime."""
        degrees = (self.changes.get(f"parallel.{axis}", 1) for axis in ("data", "replicate"))
        is_alone = all(degree == 1 for degree in degrees)  # then all stages are the same
        chosen = CHOSEN - {"zero.stage"} if is_alone else CHOSEN
        changes = [(key, value) for key, value in self.changes.items() if key in chosen]
        moves = any("offload" in key for key in self.changes)
        return self.gpus, moves, *sorted(changes)

    @property
    def runtime(self) -> str:
        """Name of its runtime."""
        return str(self.changes["zero.emulate"])

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
        """Return the setting as one line of text, its runtime options last."""
        options = self.options()
        return f"{self.description()}; {options}" if options else self.description()

    def description(self) -> str:
        """Return the choices that people make: runtime, ZeRO stage, degrees, batch, checkpoints."""
        runtime, stage = str(self.changes["zero.emulate"]), self.changes["zero.stage"]
        parts = [runtimes()[runtime].options.__name__, f"ZeRO-{stage}"]
        parts += [
            words.format(degree)
            for key, words in AXES.items()
            if (degree := self.changes.get(key, 1)) != 1 or (key in SAID and key in self.changes)
        ]
        micro, times = (self.changes[f"train.{key}"] for key in BATCHES)
        parts.append(f"micro-batch {micro}" + (f" x {times}" if times != 1 else ""))
        if (fabric := self.changes.get("cluster.fabric")) is not None:
            parts.insert(0, str(fabric))
        checkpointing = str(self.changes["activations.checkpointing"])
        return ", ".join(
            [*parts, CHECKPOINTING.get(checkpointing, f"{checkpointing} checkpointing")]
        )

    def options(self) -> str:
        """Return the options of the runtime that differ from its defaults; "" without any."""
        prefix = f"zero.{self.changes['zero.emulate']}."
        return ", ".join(
            f"{key.removeprefix(prefix)}={_word(value)}"
            for key, value in self.changes.items()
            if key.startswith(prefix)
        )


AXES = {
    "parallel.tensor": "{}-way tensor parallel",
    "parallel.pipeline": "{} pipeline stages",
    "parallel.replicate": "{} replicas",
    "parallel.data": "{}-way data parallel",
    "parallel.context": "{}-way context parallel",
    "parallel.expert": "{}-way expert parallel",
    "parallel.expert_tensor": "{}-way expert-tensor parallel",
}
SAID = frozenset({"parallel.expert_tensor"})
"""Axes that are named even with one rank: without a value, experts have the tensor ranks."""

CHOSEN = frozenset(
    {
        *("zero.emulate", "zero.stage", "cluster.fabric", "activations.checkpointing"),
        *("parallel.tensor", "parallel.pipeline", "parallel.replicate", "parallel.context"),
    }
)
CHECKPOINTING = {"none": "no checkpointing", "operations": "selective checkpointing"}
BATCHES = ("micro_batch_size", "gradient_accumulation_steps")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
