"""Arguments of a trainer, each with its values, and the scenario fields they set."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite

from zsim.runtimes.trainer_files.tables import FileOption, TrainerFileError

DIGITS = 19
"""Maximum number of digits of a whole number."""


class Arguments:
    """Arguments that have not been taken yet, and the fields set by those taken.

    Attributes:
        given: values of each argument by its name.
        said: fields of a scenario that were set.
        field: the key of the scenario that names their file.
    """

    def __init__(
        self,
        given: dict[str, list[str]],
        *,
        field: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Store arguments; `names` are their names in the file, if those differ."""
        self.given = given
        self.origins: dict[str, FileOption] = {}
        self.field = field
        self._names = names or {}

    def called(self, name: str) -> str:
        """Return the name of an argument in its file."""
        return self._names.get(name, f"--{name}")

    def rename(self, old: str, name: str) -> None:
        """Rename the argument `old` to `name`.

        Raises:
            TrainerFileError: both are given.
        """
        if name in self.given:
            raise self.wrong(old, f"contradicts {self.called(name)}: allowed is one of the two")
        self.given[name] = self.given.pop(old)
        self._names = {**self._names, name: self.called(old)}

    def drop(self, names: Iterable[str]) -> None:
        """Remove arguments that change nothing in zsim."""
        for name in [*names]:
            self.given.pop(name, None)

    def wrong(self, name: str, why: str) -> TrainerFileError:
        """Return the error of an argument, with its name in the file."""
        return TrainerFileError(f"{self.field}: {self.called(name)}: {why}")

    def flag(self, name: str) -> bool:
        """Take an argument without a value."""
        values = self.given.pop(name, None)
        if values:
            raise self.wrong(name, f"{values[0]!r} must not be there: it is a flag")
        return values is not None

    def word(self, name: str, default: str, allowed: Sequence[str] = ()) -> str:
        """Take an argument with one value, which must be in `allowed` unless that is empty."""
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

    def set_field(self, field: str, value: object, option: str) -> None:
        """Set a field of the scenario, on behalf of `option`; do nothing if the value is None."""
        if value is not None:
            self.origins[field] = FileOption(self.called(option), value)

    def _value(self, name: str) -> str:
        values = self.given.pop(name)
        if len(values) != 1:
            raise self.wrong(name, f"has {len(values)} values, must have one")
        return values[0]
