"""The source of a command: a scenario by name or file, or a schedule in a JSON file."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.cluster.files import Part
from zsim.files.input_file import read_config, read_file
from zsim.files.installed import (
    find,
    model_catalogue,
    network_profile,
    part_names,
    part_text,
    topology,
    usual_nodes,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.files.shipped_files import scenarios, studies
from zsim.mistake import MistakeError, file_fault, mistakes, one_line, reason_of
from zsim.suggestion import one_of

if TYPE_CHECKING:
    from zsim.backend.backend import Backend, Job
    from zsim.backend.document import Document
    from zsim.cluster.fault import Fault, Neighbour
    from zsim.network.link_load import Decision
    from zsim.scenario.resolved_scenario import ResolvedScenario
    from zsim.scenario.tables import Scenario
    from zsim.scenario.trainer_files import Completed


FILES = (".toml", ".json", ".yaml", ".yml", ".py")
"""Endings by which a name is meant as that of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of the command line to a scenario: settings, ranks, steps."""

    settings: tuple[str, ...] = ()
    ranks: int | None = None
    steps: int | None = None

    @property
    def all_settings(self) -> tuple[str, ...]:
        """The settings, with the steps as one of them."""
        steps = () if self.steps is None else (f"train.steps={self.steps}",)
        return (*self.settings, *steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source read under `name`: a title, and the schedule with everything that its run needs.

    `scenario` is the scenario of the schedule, and `made` its job, with numbers of its counts; None
    if the schedule was read from a file.
    """

    name: str
    title: str
    document: "Document"
    scenario: "ResolvedScenario | None" = None
    made: "Job | None" = None

    @property
    def faults(self) -> "tuple[Fault, ...]":
        """Slow or dead hardware of the cluster."""
        return self.document.faults

    @property
    def neighbours(self) -> "tuple[Neighbour, ...]":
        """Other jobs on the cluster."""
        return self.document.neighbours

    @property
    def decision(self) -> "Decision | None":
        """Requested algorithm of collectives, or None."""
        return self.document.decision

    def job(self) -> "Job":
        """Return the run that the source describes.

        Raises:
            MistakeError: it is a schedule without a model or a cluster.
        """
        from zsim.backend.document import DocumentError

        if self.made is not None:
            return self.made
        with mistakes(DocumentError, prefix=f"{self.name}: "):
            return self.document.job()

    def simulation(self) -> "Backend":
        """Return the simulation, with the faults, neighbours and algorithms that it names."""
        from zsim.backend.backend import SIMULATOR, load_backend

        settings: dict[str, object] = {"faults": self.faults, "neighbours": self.neighbours}
        if self.decision is not None:
            settings["decision"] = self.decision
        return load_backend(SIMULATOR)(**settings)


def read(name: str, changes: Changes) -> Source:
    """Return the scenario called `name`, or the scenario or schedule in the file `name`.

    Raises:
        MistakeError: there is none, or it cannot be used.
    """
    found = tables_or_schedule(name)
    if isinstance(found, str):
        return schedule_source(name, found, changes)
    return resolved(name, described(name, found, changes), ranks=changes.ranks)


def tables_or_schedule(name: str) -> dict[str, Any] | str:
    """Return the tables of the scenario that `read` would find, or the JSON of the schedule.

    Raises:
        MistakeError: there is none, or it cannot be read.
    """
    from zsim.scenario.tables import ScenarioError
    from zsim.scenario.toml import tables_of

    text = _text(name)
    need_scenario(name, text)
    if _is_schedule(name, text):
        return text
    with mistakes(ScenarioError, prefix=f"{name}: "):
        return tables_of(text)


MODEL_FILE = ('"model_type"', '"hidden_size"')
"""Words of a model's config.json."""


def need_scenario(name: str, text: str) -> None:
    """Raise MistakeError if the file `name` is of another kind than a scenario or a schedule.

    Raises:
        MistakeError: it is the file of a trainer or a model; the line tells where to name it.
    """
    from zsim.runtimes.lookup import kind_of_file

    if name in scenarios() or "[zero" in text or "zero." in text or '"zsim"' in text:
        return
    if (key := kind_of_file(text)) is not None:
        raise MistakeError(
            f"{name}: is the file of a trainer; name it in a scenario: [zero] {key} = "
            f'"{Path(name).name}" (docs/how_to/exchange.md)'
        )
    if all(word in text for word in MODEL_FILE):
        raise MistakeError(
            f"{name}: is the file of a model: zsim best {name} --gpus 8xh100 finds a setting for "
            f"it, zsim run SCENARIO --set model.hf_config={name} runs it in a scenario"
        )


def _text(name: str) -> str:
    if _is_chakra(name):
        from zsim.backend.document import encode

        with chakra_is_there(name):
            from zsim.files.chakra_files import read_chakra
        return encode(read_chakra(name))
    shipped = scenarios()
    return shipped[name] if name in shipped else file_text("scenario", name, tuple(shipped))


def _is_chakra(name: str) -> bool:
    """Return True if `name` is a folder of Chakra traces, or a prefix of their paths."""
    if not name or name in scenarios():
        return False
    try:
        return any(Path(name).glob("*.et")) or Path(f"{name}.0.et").is_file()
    except (OSError, ValueError):  # the name is too long, or has a null character
        return False


@contextmanager
def chakra_is_there(option: str) -> Generator[None]:
    """Convert a missing protobuf in an import inside to an error about `option`.

    Raises:
        MistakeError: protobuf is not installed.
    """
    try:
        yield
    except ModuleNotFoundError:
        needs = "Chakra traces need protobuf, which is not installed: pip install 'zsim[chakra]'"
        raise MistakeError(f"{option}: {needs}") from None


def _is_schedule(name: str, text: str) -> bool:
    return name not in scenarios() and (
        Path(name).suffix == ".json" or text.lstrip().startswith("{")
    )


def shipped_text(name: str) -> str:
    """Return the TOML of an installed scenario, study, model, system, node, fabric or GPU.

    Raises:
        MistakeError: none has this name.
    """
    from zsim.scenario.tables import ScenarioError

    shipped = scenarios() | studies()
    if name in shipped:
        return shipped[name]
    for part in Part:
        if name in part_names(part):
            return part_text(part, name)
    if (nodes := usual_nodes().get(name.lower())) is not None:
        gpu = find(Part.NODE, nodes[0])["gpu"]
        return part_text(Part.GPU, gpu) if isinstance(gpu, str) else part_text(Part.NODE, nodes[0])
    try:
        return model_catalogue().text(name)
    except ScenarioError:
        why = one_of(name, shipped_names(), listed_by="zsim list")
        raise MistakeError(f"name: {why}") from None


def is_model(name: str) -> bool:
    """Return True if a model that ships has this name, or its name on Hugging Face."""
    from zsim.scenario.tables import ScenarioError

    try:
        model_catalogue().text(name)
    except ScenarioError:
        return False
    return True


def shipped_names() -> list[str]:
    """Return all names that `shipped_text` accepts."""
    return [*_other_names(), *_model_names()]


def _other_names() -> list[str]:
    return [*scenarios(), *studies(), *(name for part in Part for name in part_names(part))]


def _model_names() -> list[str]:
    return [model.name for model in model_catalogue().models]


def file_text(what: str, name: str, shipped: tuple[str, ...]) -> str:
    """Return the text of the scenario or study file `name`; errors list the `shipped` names.

    Raises:
        MistakeError: it cannot be read.
    """
    try:
        if name:
            path = Path(name)
            return read_file(path) if path.suffix == ".json" else read_config(path)
    except FileNotFoundError:
        pass
    except UnicodeDecodeError:
        raise MistakeError(f"{name}: not text: scenarios are TOML, schedules JSON") from None
    except OSError as error:
        raise file_fault(name, error) from None
    except ValueError:  # a null character in the name
        raise MistakeError(f"{what}: {name!r} must be the name of a file") from None
    if what == "scenario" and is_model(name):
        raise MistakeError(
            f"{what}: {name!r} is a model: zsim best {name} --gpus 8xh100 finds a setting for it, "
            f"zsim run SCENARIO --set model.name={name} runs it in a scenario"
        )
    if Path(name).suffix in FILES or os.sep in name:
        raise MistakeError(f"{what}: {name!r}: there is no such file")
    listed_by = f"zsim list {'studies' if what == 'study' else 'scenarios'}"
    models = [each for each in _model_names() if name and each.startswith(name.lower())]
    if what == "scenario" and models and not any(each.startswith(name) for each in shipped):
        shown = ", ".join(models[:3])
        raise MistakeError(
            f"{what}: {name!r} is the start of names of models: {shown}; "
            "zsim best MODEL --gpus 8xh100 finds a setting for one"
        )
    why = one_of(name, shipped, or_else="a file, or ", listed_by=listed_by)
    raise MistakeError(f"{what}: {why}")


def _config_text(scenario: str, key: str, config: str) -> str:
    """Return the text of the file `config`, relative to the scenario's folder or to this one."""
    beside = Path(scenario).parent / config
    try:
        return read_config(beside if beside.is_file() else Path(config))
    except UnicodeDecodeError:
        raise MistakeError(f"{scenario}: {key}: {config!r} is not text") from None
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else str(error)
        raise MistakeError(f"{scenario}: {key}: {config!r}: {why}") from None


def schedule_source(name: str, text: str, changes: Changes) -> Source:
    """Return the source of the schedule in JSON `text`, read under `name`.

    Raises:
        MistakeError: it is not a schedule, or `changes` do not apply to schedules.
    """
    from zsim.backend.document import DocumentError, decode

    if changes.settings:
        raise MistakeError(f"--set: {name} is a schedule; settings are for scenarios")
    if changes.ranks is not None:
        raise MistakeError(f"--ranks: {name} is a schedule; its mesh says how many there are")
    with mistakes(DocumentError, prefix=f"{name}: "):
        document = decode(text)
        if changes.steps is not None:
            document = replace(document, steps=changes.steps)
    return Source(name=name, title=document.schedule.name, document=document)


def described(name: str, tables: Mapping[str, object], changes: Changes) -> "Scenario":
    """Return the scenario in `tables`, called `name`, with `changes`.

    Raises:
        MistakeError: it cannot be used.
    """
    from zsim.scenario.tables import ScenarioError, from_tables
    from zsim.scenario.toml import with_settings

    with mistakes(ScenarioError, prefix=f"{name}: "):
        return from_tables(with_settings(tables, changes.all_settings))


def with_files(name: str, scenario: "Scenario") -> "tuple[Scenario, str]":
    """Return `scenario` with the content of the files that it names, and a line about them.

    The line lists ignored options, assumed values, and a sequence length of a model's file.

    Raises:
        MistakeError: a file cannot be read.
        ScenarioError: the content of a file cannot be used.
    """
    from zsim.scenario.counts_file import with_counts
    from zsim.scenario.hugging_face import configured, with_usual_length
    from zsim.scenario.model_catalogue import named

    if scenario.model.name is not None:
        scenario = named(scenario, model_catalogue())
    ignored: list[str] = []
    if (path := scenario.model.hf_config) is not None:
        is_given = scenario.model.sequence_length is not None
        text = _config_text(name, "model.hf_config", path)
        scenario = configured(scenario, text)
        if not is_given:
            scenario, source = with_usual_length(scenario, text)
            ignored.append(f"{path}: model.sequence_length: not given, {source}")
    if (path := scenario.experts.counts) is not None:
        scenario = with_counts(scenario, path, _config_text(name, "experts.counts", path))
    while (key := scenario.zero.file_key) is not None:  # a file may name another one
        path = getattr(scenario.zero, key)
        text = _config_text(name, f"zero.{key}", path)
        found = _completed(key, scenario, text)
        scenario = found.scenario
        if found.assumed:
            ignored.append(f"{path}: not given: {', '.join(found.assumed)}")
        if found.ignored:
            ignored.append(f"{path}: not modelled: {', '.join(found.ignored)}")
    return scenario, "; ".join(ignored)


def _completed(key: str, scenario: "Scenario", text: str) -> "Completed":
    """Return `scenario` completed from the file of a trainer, with its ignored options.

    Raises:
        MistakeError: the reader needs a package that is not installed.
        ScenarioError: the content of the file cannot be used.
    """
    from zsim.scenario import trainer_files

    try:
        found = trainer_files.configured(scenario, text, model_catalogue(), key=key)
    except ModuleNotFoundError as error:
        hint = ": pip install 'zsim[yaml]'" if error.name == "yaml" else ""
        needs = f"needs {error.name}, which is not installed{hint}"
        raise MistakeError(f"zero.{key}: {needs}") from None
    trainer_files.need_machines(found, topology, key=key)
    return found


def settled(
    name: str, scenario: "Scenario", *, ranks: int | None = None
) -> "tuple[ResolvedScenario, str]":
    """Return `scenario`, called `name`, resolved, and a line on ignored options of its files.

    Paths of files are relative to the scenario.

    Raises:
        MistakeError: it cannot be used.
    """
    from zsim.model.model import ModelError
    from zsim.scenario.resolve import resolve
    from zsim.scenario.tables import ScenarioError

    with mistakes(ScenarioError, ModelError, prefix=f"{name}: "):
        scenario, ignored = with_files(name, scenario)
        found = resolve(scenario, topology, network_profile, kernel_profile, ranks=ranks)
        return found, ignored


def scheduled(name: str, found: "ResolvedScenario") -> Source:
    """Return the source of `found`, called and titled `name`, with its schedule.

    Raises:
        MistakeError: the model cannot exist, or has no schedule.
    """
    from zsim.backend.document import Document
    from zsim.model.model import ModelError
    from zsim.scenario.tables import ScenarioError

    with mistakes(ScenarioError, ModelError, prefix=f"{name}: "):
        job = found.make_job()
    document = replace(
        Document.of(job),
        faults=found.faults,
        neighbours=found.neighbours,
        decision=found.decision,
    )
    return Source(name=name, title=name, document=document, scenario=found, made=job)


def print_ignored(ignored: str) -> None:
    """Print the ignored options of a scenario's files, if any, on standard error."""
    if ignored and os.environ.get("RANK", "0") == "0":  # only the first rank of torchrun prints
        print(one_line(ignored), file=sys.stderr)


def resolved(
    name: str, scenario: "Scenario", *, ranks: int | None = None, quiet: bool = False
) -> Source:
    """Return the source of `scenario`, called `name`; files that it names are relative to it.

    Unless `quiet`, print the options of these files that are not modelled.

    Raises:
        MistakeError: it cannot be used.
    """
    found, ignored = settled(name, scenario, ranks=ranks)
    source = scheduled(name, found)
    print_ignored("" if quiet else ignored)
    return replace(source, title=scenario.title)
