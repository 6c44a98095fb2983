"""Files that ship with installed packages, found through entry points; nothing of them is read.

A package of scenarios has `names()` and `text(name)`, and similar functions for studies and
families of models.
"""

from collections.abc import Iterator
from functools import cache
from typing import Protocol, cast

from zsim.entry_point import entries, load


class Scenarios(Protocol):
    """A package that ships scenarios and studies, as files."""

    def names(self) -> tuple[str, ...]:
        """Return the names of its scenarios, sorted."""
        ...

    def text(self, name: str) -> str:
        """Return the TOML of a scenario."""
        ...

    def study_names(self) -> tuple[str, ...]:
        """Return the names of its studies, sorted."""
        ...

    def study_text(self, name: str) -> str:
        """Return the TOML of a study."""
        ...

    def published_names(self) -> tuple[str, ...]:
        """Return the names of the papers whose figures it has, sorted."""
        ...

    def published_text(self, name: str) -> str:
        """Return the TOML of the figures of a paper."""
        ...

    def model_family_names(self) -> tuple[str, ...]:
        """Return the names of the families of models that it has, sorted."""
        ...

    def model_family_text(self, name: str) -> str:
        """Return the TOML of a family of models."""
        ...


def packages(group: str) -> Iterator[object]:
    """Yield the packages that are entry points of `group`."""
    for entry in entries(group):
        yield load(entry)


def _of_scenarios() -> Iterator[Scenarios]:
    return cast("Iterator[Scenarios]", packages("zsim.scenarios"))


@cache
def scenarios() -> dict[str, str]:
    """Return the TOML of every installed scenario, by name."""
    return {name: package.text(name) for package in _of_scenarios() for name in package.names()}


def studies() -> dict[str, str]:
    """Return the TOML of every installed study, by name."""
    return {
        name: package.study_text(name)
        for package in _of_scenarios()
        for name in package.study_names()
    }


def published_papers() -> dict[str, str]:
    """Return the TOML of the figures of every installed paper, by name."""
    return {
        name: package.published_text(name)
        for package in _of_scenarios()
        for name in package.published_names()
    }


def model_families() -> list[str]:
    """Return the TOML of every installed family of models."""
    return [
        package.model_family_text(name)
        for package in _of_scenarios()
        for name in package.model_family_names()
    ]
