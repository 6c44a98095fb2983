"""Options of a configuration with sections, taken one by one by dotted name."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

from zsim.config_error import ConfigError
from zsim.runtimes.trainer_files.option_values import read_flag, read_number, read_whole
from zsim.runtimes.trainer_files.tables import FileOption, GivenTables, TrainerFileError
from zsim.schedule.json import shown

T = TypeVar("T")

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A reference of OmegaConf to another option."""

MOST_OPTIONS = 10_000
"""Maximum number of options of a configuration: a reference can expand to many."""

DEEPEST = 20
"""Maximum depth of nested sections: references can form a cycle."""


class SectionOptions:
    """Options that have not been taken yet, and the fields set by those taken.

    Attributes:
        field: the key of the scenario that names the file.
        left: values of options that have not been taken, by dotted name.
        said: fields of a scenario that were set.
    """

    def __init__(self, field: str, tree: Mapping[str, object]) -> None:
        self.field = field
        self.left: dict[str, object] = {}
        self.origins: dict[str, FileOption] = {}
        for name, value in _options("", tree, DEEPEST):
            if isinstance(value, dict):
                raise TrainerFileError(f"{field}: must not nest more than {DEEPEST} sections")
            self.left[name] = value
            if len(self.left) > MOST_OPTIONS:
                raise TrainerFileError(f"{field}: must have at most {MOST_OPTIONS} options")

    def take(self, name: str, read: Callable[[object], T]) -> T | None:
        """Take an option; return None if it is not given.

        Raises:
            TrainerFileError: `read` refuses its value with a ValueError.
        """
        if name not in self.left:
            return None
        value = self.left.pop(name)
        try:
            return read(value)
        except ValueError as error:
            raise self.wrong(name, value, str(error)) from None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Take a flag."""
        found = self.take(name, read_flag)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        """Take a finite number."""
        found = self.take(name, read_number)
        return default if found is None else found

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """Take a whole number."""
        found = self.take(name, partial(read_whole, least=least))
        return default if found is None else found

    def word(self, name: str, default: str, allowed: Sequence[str] = ()) -> str:
        """Take a word in any case, which must be in `allowed` unless that is empty."""

        def read(value: object) -> str:
            for each in allowed:
                if isinstance(value, str) and value.lower() == each.lower():
                    return each
            if allowed or not isinstance(value, str):
                raise ValueError(f"must be {' or '.join(allowed) or 'a word'}")
            return value

        found = self.take(name, read)
        return default if found is None else found

    def words(self, name: str, default: Sequence[str]) -> tuple[str, ...]:
        """Take a list of words, or one word for a list of one."""

        def read(value: object) -> tuple[str, ...]:
            given = cast("list[object]", value if isinstance(value, list) else [value])
            if not all(isinstance(each, str) for each in given):
                raise ValueError("must be a list of words")
            return tuple(map(str, given))

        found = self.take(name, read)
        return tuple(default) if found is None else found

    def follow_references(self) -> None:
        """Replace references to other options, `${...}`, by their values; leave expressions."""
        for _ in range(3):  # a reference can point to a reference
            for name, value in self.left.items():
                match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
                if match is None:
                    continue
                target = match[1]
                if target.startswith("."):
                    up = len(target) - len(target.lstrip("."))
                    parts = name.split(".")[:-up]
                    target = ".".join([*parts, target.lstrip(".")])
                if target in self.left:
                    self.left[name] = self.left[target]

    def drop(self, names: tuple[str, ...]) -> None:
        """Remove all options with these prefixes: they change nothing in zsim."""
        for name in [each for each in self.left if each.startswith(names)]:
            del self.left[name]

    def set_field(self, field: str, value: object, option: str) -> None:
        """Set a field of the scenario, on behalf of `option`; do nothing if the value is None."""
        if value is not None:
            self.origins[field] = FileOption(option, value)

    def set_shape(self, key: str, given: GivenTables) -> None:
        """Set the shape of the model that option `key` names, unless the scenario gives one.

        Raises:
            TrainerFileError: no model of that name ships.
        """
        path = self.word(key, "")
        if given.value("model", "layers") is not None:
            return
        try:
            shape = given.shape_of(path)
        except ConfigError:
            why = "does not ship with zsim; give its shape in [model] or as model.hf_config"
            raise self.wrong(key, path, why) from None
        for field, value in shape.items():
            if field != "sequence_length":
                self.set_field(f"model.{field}", value, key)

    def wrong(self, name: str, value: object, why: str) -> TrainerFileError:
        """Return the error of an option with an invalid value."""
        return TrainerFileError(f"{self.field}: {name}: {shown(value)} {why}")


def _options(prefix: str, tree: Mapping[str, object], depth: int) -> Iterator[tuple[str, object]]:
    """Yield the options of all sections by dotted name; skip null values."""
    for key, value in tree.items():
        name = prefix + (shown(key) if "." in key or not key.isprintable() else key)
        if isinstance(value, dict) and depth:
            inner = {str(each): what for each, what in cast("dict[object, object]", value).items()}
            yield from _options(f"{name}.", inner, depth - 1)
        elif value is not None:
            yield name, value
