"""Numbers of examples of properties, each of whose examples takes a while."""

from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:  # noqa: ANN401  (other settings, as they are)
    """Return settings with so many examples, or half as many where they are the same each time."""
    return settings(max_examples=-(-count // 2) if settings().derandomize else count, **more)
