"""Fitted constants of collectives on one kind of hardware: names and numbers.

`zsim.network` has the formulas with these constants, their names, and their allowed values
(`zsim.network.algorithm.constant.check`). Only `zsim calibrate` creates constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import cast

from zsim.config_error import shown

NAME = "name"
"""Key of the name among the constants, in job files."""


class ProfileError(ValueError):
    """Invalid constants; the message starts with the name of the constant."""


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """Constants by name. Times are in seconds, fractions relative to nominal bandwidth.

    `name` is the kind of GPU that they were fitted to, with the system if they are of one system
    only: "h100", "h100/aws_p5". It is empty for constants created by hand.
    """

    numbers: Mapping[str, float] = field(hash=False)
    name: str = ""

    def __post_init__(self) -> None:
        given: Mapping[str, object] = self.numbers
        for name, value in given.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ProfileError(f"{name}: {shown(value)} must be a number")
            if not isfinite(value):
                raise ProfileError(f"{name}: {value} must be a finite number")

    def __hash__(self) -> int:
        return hash(frozenset(self.numbers.items()))

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]

    def as_json(self) -> dict[str, float | str]:
        """Return the JSON of the constants in job files."""
        return {**self.numbers, **({NAME: self.name} if self.name else {})}

    @classmethod
    def from_json(cls, value: object) -> "NetworkProfile":
        """Return the constants from the JSON that `as_json` returned."""
        if not isinstance(value, dict):
            raise ProfileError(f"{shown(value)} must be an object of numbers")
        numbers = dict(cast("dict[str, float]", value))
        name: object = numbers.pop(NAME, "")
        if not isinstance(name, str):
            raise ProfileError(f"{NAME}: {shown(name)} must be a string")
        return cls(numbers, name)

    def changed(self, **numbers: float) -> "NetworkProfile":
        """Return a copy with new values of the given constants, in the same order."""
        return NetworkProfile({**self.numbers, **numbers}, self.name)
