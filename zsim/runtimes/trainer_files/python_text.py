"""Configurations that are Python code, which no reader runs."""

import re

STATEMENT = re.compile(r"^(?:from [\w.]+ import |import [\w.]+|def \w+\(|@\w)", re.MULTILINE)
"""A statement that YAML and TOML do not have."""


def is_python(text: str) -> bool:
    """Return True if `text` has a line that starts as a statement of Python."""
    return STATEMENT.search(text) is not None
