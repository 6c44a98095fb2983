"""Configuration files of trainers: settings written for a runtime, and scenarios read from files.

A reader or a writer is a function, or the text `module:name` of one, which is imported when it is
first used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from zsim.runtimes.trainer_files.tables import GivenTables, ReadTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigQuestion:
    """A setting to write as a configuration.

    Attributes:
        changes: the setting, by key of a scenario.
        precision: of forward and backward.
        sequences: number of sequences of a step.
        sequence_length: tokens of each.
        clip_norm: largest norm of the gradients; None does not clip.
        model: name of the model.
        train: `[train]` of the scenario without the setting.
    """

    changes: Mapping[str, object]
    precision: str
    sequences: int
    sequence_length: int
    clip_norm: float | None = None
    model: str = ""
    train: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def runtime(self) -> str:
        """Name of the runtime."""
        return str(self.changes["zero.emulate"])

    @property
    def options(self) -> dict[str, object]:
        """Options of the runtime that are not at their defaults, by name."""
        prefix = f"zero.{self.runtime}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.changes.items()
            if key.startswith(prefix)
        }

    def number(self, key: str) -> int:
        """Return the whole number at a key of the scenario; 1 if it is not given."""
        found = self.changes.get(key, 1)
        assert isinstance(found, int)
        return found

    @property
    def checkpointing(self) -> str:
        """The activations that are kept."""
        return str(self.changes["activations.checkpointing"])


Write: TypeAlias = Callable[[ConfigQuestion], str]
"""Returns the text of a configuration; raises MistakeError if it cannot express the setting."""

Read: TypeAlias = "Callable[[GivenTables, str], ReadTables]"
"""Returns the tables of a scenario completed from the text of a file; raises TrainerFileError."""

Reader: TypeAlias = "Read | str"
"""A reader, or the text `module:name` of one."""


Marks: TypeAlias = tuple[tuple[str, ...], ...]
"""Groups of words; a file of a kind has all words of one group."""

TRAIN = "train.py"
"""Name of the user's program in a script that starts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFile:
    """A file of another program that trains with the runtime, recognized by its suffix.

    Attributes:
        suffix: of the file, such as ".toml".
        program: name of the program.
        write: writes the file.
        start: arguments of torchrun that start the training, in bash; `{file}` is the file.
    """

    suffix: str
    program: str
    write: Write | str
    start: str = TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Readers and writers of configuration files. The default has none.

    Attributes:
        readers: by the key of `[zero]` that names the file, such as `mine_config`. A file may name
            another one: the reader then sets the key of that file.
        marks: groups of words by the same key. A file of that kind has all words of one group, so a
            message names its kind if it is given in place of a scenario.
        write: writes the configuration of the runtime itself; None if there is no writer.
        kinds: files of other programs.
        start: arguments of torchrun that start the training, in bash; `{file}` is the file that
            `write` writes.
        before: lines of bash that precede torchrun.
    """

    readers: Mapping[str, Reader] = field(default_factory=dict[str, "Reader"])
    marks: Mapping[str, Marks] = field(default_factory=dict[str, "Marks"])
    write: Write | str | None = None
    kinds: Sequence[ProgramFile] = ()
    start: str = TRAIN
    before: str = ""
