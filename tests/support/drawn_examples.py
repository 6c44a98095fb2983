"""Numbers of examples of properties, each of whose examples takes a while."""

from typing import Any

from day_seed import PROFILE
from hypothesis import settings


def examples(count: int, **more: Any) -> settings:  # noqa: ANN401  (other settings, as they are)
    """Return settings with `count` examples, or a quarter of them in the profile of `make test`."""
    in_ci = settings.get_current_profile_name() == PROFILE
    return settings(max_examples=-(-count // 4) if in_ci else count, **more)
