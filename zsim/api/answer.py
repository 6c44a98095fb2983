"""Results as answers: the same value as text, as an object for JSON, and in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from zsim.api.answer_text import facts_text, title_text
from zsim.api.notebook import facts_html

Progress = Callable[[float, float], object]
"""Told how much of what is asked is done, and of how much."""


def tell_nobody(_done: float, _total: float) -> None:
    """Do nothing with the progress that is told."""


class Answer(ABC):
    """Result that a command prints; `print` prints it so from Python too."""

    __slots__ = ()

    @abstractmethod
    def text(self) -> str:
        """Return the lines that the command prints, the answer first."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return what the command prints with `--json`, units last in the names."""

    def __str__(self) -> str:
        return self.text()


class AnswerInFacts(Answer):
    """Answer that is a title and facts, each with a name.

    Attributes:
        title: what was asked about, with what was changed in it.
    """

    __slots__ = ()
    title: str

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Return what each line is about, and its text."""

    def text(self) -> str:
        """Return the title and a line or more for each fact."""
        return f"{title_text(self.title)}\n{facts_text(self.facts())}"

    def _repr_html_(self) -> str:
        return facts_html(self.title, self.facts())
