"""Options of a trainer's file without a reader: refused, or reported with the difference."""

from collections.abc import Iterable, Mapping

from zsim.runtimes.trainer_files.tables import TrainerFileError

Unfollowed = tuple[str, str]
"""An option, and its value in the file; "" for a flag."""


def need_followed(
    field: str, left: Iterable[Unfollowed], named: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the options of `left` that are `named`, each with its reason.

    Raises:
        TrainerFileError: another option is left, which would change time, memory or values.
    """
    told: list[str] = []
    wrong: list[str] = []
    for name, value in left:
        if named is not None and name in named:
            told.append(f"{name} ({named[name]})")
            continue
        shown = f"{value} is not" if value else "not"
        wrong.append(f"{field}: {name}: {shown} modelled; remove it to run without it")
    if wrong:
        raise TrainerFileError(*wrong)
    return tuple(told)
