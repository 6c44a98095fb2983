"""Suggestions: known names that a wrong one may stand for."""

from collections.abc import Collection
from difflib import get_close_matches


def one_of(given: str, known: Collection[str], *, or_else: str = "") -> str:
    """Return that `given` must be one of the names that are `known`, and which may be meant."""
    names = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), names, n=1)
    meant = f"; did you mean {names[close[0]]}?" if close else ""
    return f"{given!r} must be {or_else}one of {', '.join(known)}{meant}"
