"""Families of a proof by name, and those that compare a schedule with the specification.

The package itself imports only what shows order and promises: a simulation needs no more.
"""

from zsim.proof import ORDER, PROMISES, formats, generators, places, scalars, scales, values
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.proof.values import Shown

VALUES = {
    values.INVARIANT: values.examine,
    scalars.INVARIANT: scalars.examine,
    formats.INVARIANT: formats.examine,
    scales.INVARIANT: scales.examine,
    places.INVARIANT: places.examine,
    generators.INVARIANT: generators.examine,
}
"""Families that compare with the specification."""

FAMILIES = {**ORDER, **VALUES, **PROMISES}
"""Every family by name."""


def compared(context: Context) -> tuple[Shown, list[Finding]]:
    """Return the result of the proof of values, and the findings of all `VALUES`."""
    shown = values.shown(context)
    others = (examine for name, examine in VALUES.items() if name != values.INVARIANT)
    return shown, [*shown.findings, *(each for examine in others for each in examine(context))]
