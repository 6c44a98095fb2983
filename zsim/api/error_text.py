"""Text and JSON objects of errors and probabilities."""

from zsim.prediction.error_rule import LEVEL, SURE
from zsim.trace.trace import StepError


def error_object(error: StepError | None, step_s: float, text: str) -> dict[str, object]:
    """Return the error of a step time: bounds in seconds (None if unknown) and its text."""
    return {
        "level": LEVEL,
        "half_width": None if error is None else error.half_width,
        "step_time_low_s": None if error is None else step_s * error.low,
        "step_time_high_s": None if error is None else step_s * error.high,
        "text": text,
    }


def probability_text(probability: float) -> str:
    """Return a probability in percent, from "under 1%" to "over 99%".

    One that rounds up to `SURE` is "almost" that, because runs below it may not fit.
    """
    if probability > 0.995:
        return "over 99%"
    text = "under 1%" if probability < 0.005 else f"{probability:.0%}"
    return f"almost {text}" if probability < SURE and text == f"{SURE:.0%}" else text
