"""Describe the place of an operation in a step, from its id, which is a path."""

from itertools import takewhile

BEFORE_A_BUFFER = ("allocate", "free")
"""Verbs that precede a buffer's name in an operation's path; a number may follow the verb."""


def moment(operation: str) -> str:
    """Return a description such as "backward of block7, micro-batch 0, taking x" of an operation.

    That one describes `step/backward/mb0/block7/allocate/x`. An id that is not a path of a
    scheduler is returned unchanged.
    """
    first, *rest = operation.split("/")
    if first not in {"setup", "step"} or not rest:
        return operation
    before = list(takewhile(lambda part: not _is_verb(part), rest))
    buffer = "/".join(rest[len(before) + 1 :])
    micro_batches = [part.removeprefix("mb") for part in before if _is_micro_batch(part)]
    places = [part for part in before if not _is_micro_batch(part)]
    if first == "setup":
        phase, where = "setup", [part for part in places if part != buffer.split("/")[0]]
    else:
        phase, where = (places[0], places[1:]) if places else ("the step", [])
    text = f"{phase} of {'/'.join(where)}" if where else phase
    text += "".join(f", micro-batch {each}" for each in micro_batches)
    return f"{text}, taking {buffer}" if buffer else text


def _is_verb(part: str) -> bool:
    return part.rstrip("0123456789") in BEFORE_A_BUFFER


def _is_micro_batch(part: str) -> bool:
    return part.startswith("mb") and part[2:].isdecimal()
