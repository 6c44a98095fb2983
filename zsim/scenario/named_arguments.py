"""Arguments of a trainer, each with its values, from which a scenario is said one by one."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite

from zsim.scenario.said_options import Said
from zsim.scenario.tables import ScenarioError

DIGITS = 19
"""Of a whole number at most."""


class Arguments:
    """Arguments that nobody has taken yet, and what those that were taken say.

    Attributes:
        given: values of each argument by its name.
        said: fields of a scenario that were said.
        field: the key of the scenario that names their file.
    """

    def __init__(
        self,
        given: dict[str, list[str]],
        *,
        field: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Take arguments, and what they are called in a file that has other `names` for them."""
        self.given = given
        self.said: dict[str, Said] = {}
        self.field = field
        self._names = names or {}

    def called(self, name: str) -> str:
        """Return what an argument is called in its file."""
        return self._names.get(name, f"--{name}")

    def rename(self, old: str, name: str) -> None:
        """Take the argument `old` as `name`, under which it is read from now on.

        Raises:
            ScenarioError: both are given.
        """
        if name in self.given:
            raise self.wrong(old, f"contradicts {self.called(name)}: allowed is one of the two")
        self.given[name] = self.given.pop(old)
        self._names = {**self._names, name: self.called(old)}

    def drop(self, names: Iterable[str]) -> None:
        """Take arguments that change nothing here."""
        for name in [*names]:
            self.given.pop(name, None)

    def wrong(self, name: str, why: str) -> ScenarioError:
        """Return the error of an argument, in the words of its file."""
        return ScenarioError(f"{self.field}: {self.called(name)}: {why}")

    def flag(self, name: str) -> bool:
        """Take an argument without a value."""
        values = self.given.pop(name, None)
        if values:
            raise self.wrong(name, f"{values[0]!r} must not be there: it is a flag")
        return values is not None

    def word(self, name: str, default: str, allowed: Sequence[str] = ()) -> str:
        """Take an argument with one value, one of `allowed` unless they are none."""
        if name not in self.given:
            return default
        value = self._value(name)
        if allowed and value not in allowed:
            raise self.wrong(name, f"{value!r} must be {' or '.join(allowed)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Take a finite number."""
        if name not in self.given:
            return default
        value = self._value(name)
        with suppress(ValueError):
            if isfinite(found := float(value)):
                return found
        raise self.wrong(name, f"{value!r} must be a number")

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Take a whole number of at least 1."""
        if name not in self.given:
            return default
        value = self._value(name)
        if value.isdecimal() and int(value[:DIGITS]) > 0 and len(value) < DIGITS:
            return int(value)
        raise self.wrong(name, f"{value!r} must be a whole number of at least 1")

    def say(self, field: str, value: object, option: str) -> None:
        """Say a field of the scenario, as `option` has it; nothing if the value is None."""
        if value is not None:
            self.said[field] = Said(self.called(option), value)

    def _value(self, name: str) -> str:
        values = self.given.pop(name)
        if len(values) != 1:
            raise self.wrong(name, f"has {len(values)} values, must have one")
        return values[0]
