"""Suggestions: known names that a wrong name may stand for."""

from collections.abc import Collection
from difflib import get_close_matches


def one_of(
    given: str,
    known: Collection[str],
    *,
    or_else: str = "",
    unlisted: Collection[str] = (),
    listed_by: str = "",
) -> str:
    """Return that `given` must be one of the `known` names, a close one first.

    Args:
        given: the wrong name.
        known: names that are allowed.
        or_else: other allowed values, such as "a file or ".
        unlisted: names that are allowed, too, but are not listed.
        listed_by: command that prints the names, such as "zsim list models", instead of a list.
    """
    close = close_name(given, (*known, *unlisted))
    listed = f"a name that {listed_by} prints" if listed_by else f"one of {', '.join(known)}"
    if close:
        return f"{given!r}: did you mean {close}? It must be {or_else}{listed}"
    return f"{given!r} must be {or_else}{listed}"


def close_name(given: str, known: Collection[str]) -> str | None:
    """Return the known name that `given` resembles or is part of, in any case; None if none."""
    names = {name.lower(): name for name in known}
    word = given.lower()
    close = get_close_matches(word, names, n=1) or _containing(word, names)
    return names[close[0]] if close else None


def _containing(word: str, names: Collection[str]) -> list[str]:
    """Return the shortest of `names` that start with `word`, or else have it inside."""
    if len(word) < 2:
        return []
    found = [name for name in names if word in name]
    return sorted(found, key=lambda name: (not name.startswith(word), len(name), name))[:1]
