"""The number of GPUs on which a plain setting fits, for questions that no setting answers."""

from collections.abc import Iterator

from zsim.api.forecast import forecast
from zsim.api.training_budget import SECONDS_PER_DAY, days_text
from zsim.units import format_bytes
from zsim_plan.answer.best_question import Question
from zsim_plan.answer.setting_trial import Bounder, sure_bytes, tried

MOST_TIMES = 64
"""Maximum factor by which the number of GPUs grows."""

SHORTER = (1, 2, 4, 8)
"""Parts of the sequence length that are tried in turn."""

FEWEST_TOKENS = 1024
"""Length in tokens of the shortest sequence that is tried."""

RUNTIME, STAGE, CHECKPOINTING = "fsdp2", 3, "full"
"""The plain setting: every state is sharded over all GPUs."""

PLAIN = {
    "zero.emulate": RUNTIME,
    "zero.stage": STAGE,
    "activations.checkpointing": CHECKPOINTING,
    "train.micro_batch_size": 1,
}
"""Keys of the plain setting and their values."""


def more_gpus(question: Question) -> str:
    """Return the GPUs, and if necessary the shorter sequences, that suffice for a plain setting.

    It is empty if nothing that is tried suffices, or if the question fixes other settings.
    """
    if RUNTIME not in question.runtimes:
        return ""
    if any(PLAIN.get(key) != value for key, value in question.fixed.items()):
        return ""
    for parts in SHORTER:
        length = question.sequence_length // parts
        if parts > 1 and length < FEWEST_TOKENS:
            break
        for gpus in _numbers(question, parts):
            taken = _taken(question, gpus, length)
            if taken:
                nodes = -(-gpus // question.fleet.cluster.gpus_per_node)
                shorter = f" with --sequence {length}" if parts > 1 else ""
                return (
                    f"{gpus:,} GPU{'s'[: gpus > 1]} on {nodes:,} node{'s'[: nodes > 1]}{shorter}: "
                    f"FSDP2, ZeRO-3, full checkpointing takes {taken}"
                )
    return ""


def _numbers(question: Question, parts: int) -> Iterator[int]:
    """Yield numbers of GPUs up to one for each sequence: doubled, and in whole nodes beyond one.

    Sequences of a fraction of the length, one of `parts`, start with the GPUs of the question.
    """
    gpus, per_node = question.fleet.gpus, question.fleet.cluster.gpus_per_node
    for power in range(0 if parts > 1 else 1, MOST_TIMES.bit_length()):
        number = gpus << power
        if number > per_node:
            number = -(-number // per_node) * per_node
        if number > question.sequences * parts:
            return
        yield number


def _taken(question: Question, gpus: int, length: int) -> str:
    """Return the memory and time that the plain setting takes; empty unless both suffice."""
    times, left = divmod(question.tokens_per_step // length, gpus)
    if left:
        return ""
    tables = {
        **question.tables,
        "model": {**question.tables["model"], "sequence_length": length},
        "parallel": {"data": gpus},
        "zero": {"emulate": RUNTIME, "stage": STAGE},
        "activations": {"checkpointing": CHECKPOINTING},
        "train": {
            **question.tables["train"],
            "micro_batch_size": 1,
            "gradient_accumulation_steps": times,
        },
    }
    if Bounder().full(tables) is not None:
        return ""
    found = forecast(tables, None)
    if isinstance(found, str) or found.needed_bytes > sure_bytes(found.usable_bytes):
        return ""
    memory = f"{format_bytes(found.needed_bytes)} of {format_bytes(found.usable_bytes)}"
    if question.within_s is None or question.tokens is None:
        return memory
    step_time_s = tried(tables).step_time_s
    if not step_time_s or question.is_late(step_time_s, gpus):
        return ""
    seconds = question.tokens / question.tokens_per_step * step_time_s
    goodput = question.goodput(gpus)
    passing_s = seconds if goodput is None else goodput.passing_s(seconds)
    return f"{days_text(passing_s / SECONDS_PER_DAY)} and {memory}"
