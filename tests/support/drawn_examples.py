"""Numbers of examples of properties, each of whose examples takes a while."""

from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:  # noqa: ANN401  (other settings, as they are)
    """Return settings with `count` examples, or half as many in the profile of `make test`."""
    return settings(max_examples=-(-count // 2) if settings().derandomize else count, **more)
