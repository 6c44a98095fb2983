"""Colours for the utilisation of links, for a cluster drawn after a run."""

from collections.abc import Mapping

Loads = Mapping[str, float]
"""Utilisation of each class of links as a share, by name such as `nic->leaf`."""

HUES = ((0.02, "#9aa5b1"), (0.10, "#6d9f71"), (0.30, "#e3a72f"), (0.60, "#e07a1f"))
BUSIEST = "#c81e1e"
"""Colours of links below each share in HUES, and of all links above."""


def between(loads: Loads, lower: str, upper: str) -> float | None:
    """Return the load of the busier direction between two levels; None if unknown."""
    found = [loads[name] for name in (f"{lower}->{upper}", f"{upper}->{lower}") if name in loads]
    return max(found, default=None)


def hue(share: float | None, otherwise: str) -> str:
    """Return the colour of links with utilisation `share`, or `otherwise` if it is None."""
    if share is None:
        return otherwise
    return next((colour for limit, colour in HUES if share < limit), BUSIEST)


def key() -> tuple[tuple[str, str], ...]:
    """Return the texts and colours of a legend."""
    lower = 0.0
    found: list[tuple[str, str]] = []
    for limit, colour in HUES:
        found.append((f"{lower:.0%} to {limit:.0%}", colour))
        lower = limit
    return (*found, (f"over {lower:.0%}", BUSIEST))
