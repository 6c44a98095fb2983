"""A seed of the day for Hypothesis in the profile `ci`.

A profile that draws the same examples each time finds nothing the second time; one that draws other
examples each time fails on one machine and not on the next. A seed of the day does neither.
"""

from argparse import Namespace
from datetime import UTC, date, datetime

PROFILE = "ci"


def day_seed(day: date) -> str:
    """Return the seed of a day: its digits, e.g. 20260131."""
    return f"{day:%Y%m%d}"


def choose_seed(option: Namespace) -> None:
    """Set `--hypothesis-seed` to that of today (UTC) if the profile is `ci` and none is given."""
    if option.hypothesis_profile == PROFILE and option.hypothesis_seed is None:
        option.hypothesis_seed = day_seed(datetime.now(UTC).date())


def seed_line(option: Namespace) -> str | None:
    """Return the option that draws the same examples on another day, or None without a seed."""
    seed = option.hypothesis_seed
    return None if seed is None else f"examples: --hypothesis-seed {seed}"
