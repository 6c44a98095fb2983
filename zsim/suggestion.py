"""Suggestions: known names that a wrong one may stand for."""

from collections.abc import Collection
from difflib import get_close_matches


def one_of(
    given: str, known: Collection[str], *, or_else: str = "", unlisted: Collection[str] = ()
) -> str:
    """Return that `given` must be one of the names that are `known`, and which may be meant.

    Those that are `unlisted` may be meant as well, and are too many to be told.
    """
    names = {name.lower(): name for name in (*known, *unlisted)}
    close = get_close_matches(given.lower(), names, n=1)
    meant = f"; did you mean {names[close[0]]}?" if close else ""
    return f"{given!r} must be {or_else}one of {', '.join(known)}{meant}"
