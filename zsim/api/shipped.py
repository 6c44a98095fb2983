"""Installed scenarios, studies, topologies and their parts, backends."""

import tomllib
from dataclasses import dataclass

from zsim.api.answer import Answer
from zsim.api.scenario import load
from zsim.backend.backend import names as backend_names
from zsim.cluster.files import Part
from zsim.files.installed import model_catalogue, part_names, scenarios, studies
from zsim.files.source import shipped_names, shipped_text

__all__ = [
    "Installed",
    "backend_names",
    "installed",
    "scenario_names",
    "shipped_names",
    "shipped_text",
    "study_names",
    "topology_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Answer):
    """Names of all that is installed; scenarios, studies and models with a line on each."""

    titles: dict[str, dict[str, str]]
    names: dict[str, tuple[str, ...]]

    def text(self) -> str:
        """Return names by kind, a line each."""
        lines: list[str] = []
        for kind, titles in self.titles.items():
            width = max(map(len, titles), default=0)
            lines += [kind, *(f"  {name:<{width}}  {title}" for name, title in titles.items())]
        for kind, names in self.names.items():
            lines += [kind, *(f"  {name}" for name in names)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return names by kind; those with a title as an object of titles by name."""
        return {**self.titles, **{kind: list(names) for kind, names in self.names.items()}}


def installed() -> Installed:
    """Return what can be run, on what, and where."""
    return Installed(
        titles={
            "scenarios": {name: load(name).title for name in scenarios()},
            "studies": {name: tomllib.loads(text)["question"] for name, text in studies().items()},
            "models": model_catalogue().titles(),
        },
        names={
            "topologies": part_names(Part.SYSTEM),
            "nodes": part_names(Part.NODE),
            "fabrics": part_names(Part.FABRIC),
            "gpus": part_names(Part.GPU),
            "backends": backend_names(),
        },
    )


def scenario_names() -> list[str]:
    """Return the names of the scenarios that ship."""
    return list(scenarios())


def study_names() -> list[str]:
    """Return the names of the studies that ship."""
    return list(studies())


def topology_names() -> list[str]:
    """Return the names of the systems and nodes that ship."""
    return [*part_names(Part.SYSTEM), *part_names(Part.NODE)]
