"""Installed scenarios, studies, models, topologies and their parts, runtimes, backends."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from zsim.api.answer import Answer
from zsim.files.shipped_files import model_families, scenarios, studies
from zsim.mistake import MistakeError
from zsim.scenario.model_titles import model_titles
from zsim.strategy.runtime_options import names as runtime_names
from zsim.suggestion import one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Answer):
    """Names of everything installed; scenarios, studies and models with a line on each.

    Attributes:
        titles: a line on each name, by kind.
        names: names of the other kinds.
        notes: notes on some of these names, by kind, such as GPUs without measurements.
    """

    titles: dict[str, dict[str, str]]
    names: dict[str, tuple[str, ...]]
    notes: dict[str, dict[str, str]]

    def text(self) -> str:
        """Return names by kind, one per line."""
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
        """Return names by kind; kinds with titles as an object of titles by name."""
        return {**self.titles, **{kind: list(names) for kind, names in self.names.items()}}


def installed(kind: str | None = None) -> Installed:
    """Return everything installed; with `kind`, only that kind.

    Raises:
        MistakeError: the kind is unknown.
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
    """Return the kinds of installed things."""
    return [*_TITLES, *_NAMES]


def _questions() -> dict[str, str]:
    return {name: tomllib.loads(text)["question"] for name, text in studies().items()}


def _evidence() -> dict[str, str]:
    """Return the GPUs of which a data sheet alone is known, with these words."""
    from zsim.cluster.files import Part
    from zsim.files.installed import find, part_names

    tables = {name: find(Part.GPU, name) for name in part_names(Part.GPU)}
    return {name: each["evidence"] for name, each in tables.items() if "evidence" in each}


def _families() -> dict[str, str]:
    """Return the models of each family, a line each: there are many."""
    families = [table for table in map(tomllib.loads, model_families()) if table.get("model")]
    return {
        each["family"]: ", ".join(model["name"] for model in each["model"]) for each in families
    }


def _scenario_titles() -> dict[str, str]:
    from zsim.api.scenario import load

    return {name: load(name).title for name in scenarios()}


def _names_of(kind: str) -> list[str]:
    from zsim.cluster.files import Part
    from zsim.files.installed import part_names

    return list(part_names(Part(kind)))


def backend_names() -> tuple[str, ...]:
    """Return the names of the registered backends."""
    from zsim.backend.backend import names

    return names()


def shipped_names() -> list[str]:
    """Return all names that `shipped_text` accepts."""
    from zsim.files.source import shipped_names

    return shipped_names()


def shipped_text(name: str) -> str:
    """Return the TOML of an installed scenario, study, model, system, node, fabric or GPU.

    Raises:
        MistakeError: none has this name.
    """
    from zsim.cluster.files import Part
    from zsim.files.source import shipped_text

    if name in [str(part) for part in Part]:
        raise MistakeError(
            f"name: {name!r} needs a name after it, of those in zsim list {plural(name)}"
        )
    return shipped_text(name)


def plural(kind: str) -> str:
    """Return the kind as `zsim list` has it."""
    return "topologies" if kind == "topology" else f"{kind}s"


_TITLES: dict[str, Callable[[], dict[str, str]]] = {
    "scenarios": _scenario_titles,
    "studies": _questions,
    "models": lambda: model_titles(model_families()),
}
_NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "topologies": partial(_names_of, "topology"),
    "nodes": partial(_names_of, "node"),
    "fabrics": partial(_names_of, "fabric"),
    "gpus": partial(_names_of, "gpu"),
    "runtimes": runtime_names,
    "backends": backend_names,
}


def scenario_names() -> list[str]:
    """Return the names of the packaged scenarios."""
    return list(scenarios())


def model_names() -> list[str]:
    """Return the names of the models that ship."""
    return list(model_titles(model_families()))


def study_names() -> list[str]:
    """Return the names of the packaged studies."""
    return list(studies())


def fabric_names() -> list[str]:
    """Return the names of the fabrics that ship."""
    return _names_of("fabric")


def topology_names() -> list[str]:
    """Return the names of the systems and nodes that ship."""
    return [*_names_of("topology"), *_names_of("node")]


def part_of_kind(kind: str, name: str) -> str:
    """Return the TOML of a packaged system, node, fabric or GPU.

    Raises:
        MistakeError: the kind is unknown, or has no part of this name.
    """
    from zsim.api.gpu_fleet import gpu_of_word
    from zsim.cluster.files import Part
    from zsim.files.installed import part_names, part_text

    kinds = [str(part) for part in Part]
    if kind not in kinds:
        raise MistakeError(f"name: {one_of(kind, kinds)}, since another name follows")
    if Part(kind) is Part.GPU:
        name = gpu_of_word(name) or name
    if name not in part_names(Part(kind)):
        raise MistakeError(f"{kind}: {one_of(name, part_names(Part(kind)))}")
    return part_text(Part(kind), name)


def template_text(kind: str, name: str | None = None) -> str:
    """Return a template file for a GPU or a node.

    Raises:
        MistakeError: the kind has no template, or `name` is given, too.
    """
    from zsim.cluster.files.template import TEMPLATES

    if name is not None:
        raise MistakeError(f"--template: {name!r}: cannot be combined with a name; remove it")
    if kind not in TEMPLATES:
        raise MistakeError(f"--template: {one_of(kind, tuple(TEMPLATES))}")
    return TEMPLATES[kind]
