"""Results as answers: one value as text, as an object for JSON, and in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from zsim.api.answer_text import facts_text, title_text
from zsim.api.notebook import facts_html

Progress = Callable[[float, float], object]
"""Callback that receives the amount of work done and the total amount."""


def ignore_progress(_done: float, _total: float) -> None:
    """Ignore the progress."""


class Answer(ABC):
    """Result that a command prints; `print` shows the same text in Python."""

    __slots__ = ()

    @abstractmethod
    def text(self) -> str:
        """Return the lines that the command prints, the main result first."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return the object that the command prints with `--json`; names end in their units."""

    def __str__(self) -> str:
        return self.text()


class AnswerInFacts(Answer):
    """Answer that consists of a title and named facts.

    Attributes:
        title: name of the scenario or question, with the changes made to it.
    """

    __slots__ = ()
    title: str

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """Return the name and the text of each fact."""

    def text(self) -> str:
        """Return the title and one or more lines for each fact."""
        return f"{title_text(self.title)}\n{facts_text(self.facts())}"

    def _repr_html_(self) -> str:
        return facts_html(self.title, self.facts())
