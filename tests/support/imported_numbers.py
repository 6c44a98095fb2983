"""Globals of a file that other files count as its attributes."""

count = 0
LISTED: list[int] = []


def count_up() -> int:
    """Count, and return the number."""
    global count  # noqa: PLW0603  (as a user's file does it)
    count += 1
    return count
