"""Installed scenarios, studies, models, topologies and their parts, runtimes, backends."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from zsim.api.answer import Answer
from zsim.api.scenario import load
from zsim.backend.backend import names as backend_names
from zsim.cluster.files import Part
from zsim.cluster.files.template import TEMPLATES
from zsim.files.installed import find, model_catalogue, part_names, part_text, scenarios, studies
from zsim.files.source import shipped_names, shipped_text
from zsim.mistake import MistakeError
from zsim.strategy.runtime_options import names as runtime_names
from zsim.suggestion import one_of

__all__ = [
    "Installed",
    "backend_names",
    "fabric_names",
    "installed",
    "installed_kinds",
    "model_names",
    "part_of_kind",
    "scenario_names",
    "shipped_names",
    "shipped_text",
    "study_names",
    "template_text",
    "topology_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Answer):
    """Names of all that is installed; scenarios, studies and models with a line on each.

    Attributes:
        titles: a line on each name, by kind.
        names: names of the other kinds.
        notes: what is said behind some of these, by kind: GPUs that nobody timed.
    """

    titles: dict[str, dict[str, str]]
    names: dict[str, tuple[str, ...]]
    notes: dict[str, dict[str, str]]

    def text(self) -> str:
        """Return names by kind, a line each."""
        lines: list[str] = []
        for kind, titles in self.titles.items():
            width = max(map(len, titles), default=0)
            lines += [kind, *(f"  {name:<{width}}  {title}" for name, title in titles.items())]
        for kind, names in self.names.items():
            notes, width = self.notes.get(kind, {}), max(map(len, names), default=0)
            lines += [
                kind,
                *(f"  {name:<{width}}  {notes.get(name, '')}".rstrip() for name in names),
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return names by kind; those with a title as an object of titles by name."""
        return {**self.titles, **{kind: list(names) for kind, names in self.names.items()}}


def installed(kind: str | None = None) -> Installed:
    """Return what can be run, on what, and where; with a `kind` that alone.

    Raises:
        MistakeError: there is no such kind.
    """
    if kind is not None and kind not in installed_kinds():
        raise MistakeError(f"kind: {one_of(kind, installed_kinds())}")
    titles = _TITLES if kind is not None else {**_TITLES, "models": _families}
    return Installed(
        titles={name: made() for name, made in titles.items() if kind in (None, name)},
        names={name: tuple(made()) for name, made in _NAMES.items() if kind in (None, name)},
        notes={"gpus": _evidence()} if kind in (None, "gpus") else {},
    )


def installed_kinds() -> list[str]:
    """Return the kinds of things that are installed."""
    return [*_TITLES, *_NAMES]


def _questions() -> dict[str, str]:
    return {name: tomllib.loads(text)["question"] for name, text in studies().items()}


def _evidence() -> dict[str, str]:
    """Return the GPUs of which a data sheet alone is known, with these words."""
    tables = {name: find(Part.GPU, name) for name in part_names(Part.GPU)}
    return {name: each["evidence"] for name, each in tables.items() if "evidence" in each}


def _families() -> dict[str, str]:
    """Return the models of each family, a line each: there are many."""
    families = [each for each in model_catalogue().families if each.model]
    return {each.family: ", ".join(model.name for model in each.model) for each in families}


_TITLES: dict[str, Callable[[], dict[str, str]]] = {
    "scenarios": lambda: {name: load(name).title for name in scenarios()},
    "studies": _questions,
    "models": lambda: model_catalogue().titles(),
}
_NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "topologies": partial(part_names, Part.SYSTEM),
    "nodes": partial(part_names, Part.NODE),
    "fabrics": partial(part_names, Part.FABRIC),
    "gpus": partial(part_names, Part.GPU),
    "runtimes": runtime_names,
    "backends": backend_names,
}


def scenario_names() -> list[str]:
    """Return the names of the scenarios that ship."""
    return list(scenarios())


def model_names() -> list[str]:
    """Return the names of the models that ship."""
    return [model.name for model in model_catalogue().models]


def study_names() -> list[str]:
    """Return the names of the studies that ship."""
    return list(studies())


def fabric_names() -> list[str]:
    """Return the names of the fabrics that ship."""
    return list(part_names(Part.FABRIC))


def topology_names() -> list[str]:
    """Return the names of the systems and nodes that ship."""
    return [*part_names(Part.SYSTEM), *part_names(Part.NODE)]


def part_of_kind(kind: str, name: str) -> str:
    """Return the TOML of a system, node, fabric or GPU that ships, of the kind that is said.

    Raises:
        MistakeError: there is no such kind, or none of that name.
    """
    kinds = [str(part) for part in Part]
    if kind not in kinds:
        raise MistakeError(f"name: {one_of(kind, kinds)}, since another name follows")
    if name not in part_names(Part(kind)):
        raise MistakeError(f"{kind}: {one_of(name, part_names(Part(kind)))}")
    return part_text(Part(kind), name)


def template_text(kind: str, name: str | None = None) -> str:
    """Return a file of a GPU or a node to fill in.

    Raises:
        MistakeError: there is none of that kind, or a name stands beside it.
    """
    if name is not None:
        raise MistakeError(f"--template: {name!r}: cannot be combined with a name; remove it")
    if kind not in TEMPLATES:
        raise MistakeError(f"--template: {one_of(kind, tuple(TEMPLATES))}")
    return TEMPLATES[kind]
