"""Tables of cases: the suite tries each value of every axis, `make test-long` every combination."""

from collections.abc import Mapping
from itertools import product

import pytest


def covering(*axes: Mapping[str, object]) -> list[object]:
    """Return parameters for every combination of named values.

    Combinations are marked long but for as many as the longest axis has values: the first values
    together, then the second ones, and so on, shorter axes from their beginning again.
    """
    names = [tuple(axis) for axis in axes]
    tried = {
        tuple(axis[number % len(axis)] for axis in names) for number in range(max(map(len, names)))
    }
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, chosen, strict=True)),
            id="-".join(chosen),
            marks=() if chosen in tried else pytest.mark.long,
        )
        for chosen in product(*names)
    ]
