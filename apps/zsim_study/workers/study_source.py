"""The study that a command names, and the files and installed data that its scenarios name."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from zsim.bounded_text import bounded_toml
from zsim.files.input_file import is_there
from zsim.files.installed import (
    network_profile,
    topology,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.files.shipped_files import scenarios, studies
from zsim.files.source import file_text, with_files
from zsim.mistake import MistakeError, mistakes
from zsim.scenario.changes import changed, flat
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.sized_cluster import placed
from zsim.scenario.tables import Scenario, ScenarioError
from zsim_study.study.file import StudyError, StudyFile, from_tables, parse
from zsim_study.study.study_plan import Reader, StudyPlan, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study that was found.

    Attributes:
        given: the name or path as given; it starts messages about the study.
        name: base of the names of its output files.
        plan: its runs.
    """

    given: str
    name: str
    plan: StudyPlan


def study_of(study: str | PathLike[str] | Mapping[str, Any] | Study) -> Study:
    """Return the study with that name, in that file, or in these tables; a `Study` is unchanged.

    Raises:
        MistakeError: there is none, or it cannot be used.
    """
    if isinstance(study, Study):
        return study
    if isinstance(study, Mapping):
        given = name = "study"
        with mistakes(StudyError, prefix=f"{given}: "):
            found = from_tables(study)
    else:
        shipped, given = studies(), fspath(study)
        name = given if given in shipped else Path(given).stem
        text = shipped[given] if given in shipped else file_text("study", given, tuple(shipped))
        with mistakes(StudyError, prefix=f"{given}: "):
            found = parse(text)
    with mistakes(StudyError, ScenarioError, prefix=f"{given}: "):
        where, base = _base(found, Path(given).parent)
        plan = planned(found, base, reader(where))
    return Study(given=given, name=name, plan=plan)


def reader(where: str) -> Reader:
    """Return a reader that resolves scenarios; paths in them are relative to the file `where`."""
    found = cache(topology)

    def configured(scenario: Scenario) -> Scenario:
        try:
            return with_files(where, scenario)[0]
        except MistakeError as mistake:
            raise ScenarioError(str(mistake)) from None

    def settled(scenario: Scenario) -> ResolvedScenario:
        return resolve(scenario, found, network_profile, kernel_profile)

    return Reader(
        configured=configured,
        replicas=lambda scenario: placed(scenario, found)[1],
        resolve=settled,
    )


def _base(study: StudyFile, folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the file that `[base]` names, and its tables with the keys of `[base]` on top.

    Raises:
        StudyError: there is no such scenario.
    """
    tables = dict(study.base)
    name = tables.pop("scenario", None)
    if name is None:
        return str(folder / "base.toml"), {"title": study.question, **tables}
    shipped = scenarios()
    if not isinstance(name, str):
        raise StudyError(f"base.scenario: {name!r} must be the name of a scenario, or a file")
    where = name
    if name not in shipped and is_there(folder / name):
        where = str(folder / name)
    text = shipped[name] if name in shipped else _text(where, tuple(shipped))
    try:
        found = bounded_toml(text)
    except ValueError as error:
        raise StudyError(f"base.scenario: {name}: not TOML: {error}") from None
    return where, changed(found, flat(tables))


def _text(name: str, shipped: tuple[str, ...]) -> str:
    try:
        return file_text("base.scenario", name, shipped)
    except MistakeError as mistake:
        raise StudyError(str(mistake)) from None
