"""The form of `zsim serve`: its fields, and the scenario of the chosen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from zsim.api.gpu_fleet import GpuFleet, gpu_fleet
from zsim.api.training_budget import tokens_of
from zsim.cluster.files import Part
from zsim.files.installed import first_gpu, model_catalogue, part_names, usual_nodes
from zsim.mistake import MistakeError
from zsim.runtimes.lookup import runtimes, search_of
from zsim.scenario.changes import changed
from zsim.strategy.strategy import STAGES
from zsim.suggestion import one_of
from zsim_plan.page.setting_page import FormField, OptionGroups
from zsim_plan.search.fleet import Changes

DIGITS: Final = 9
"""Maximum digits of a typed number."""

OWN: Final = "zero"
"""Name of zsim's own ZeRO stages in the form."""

OFFLOAD_NAMES: Final = {
    "": "nothing",
    "optimizer-host": "the optimizer, to the host",
    "all-host": "optimizer and parameters, to the host",
    "optimizer-nvme": "the optimizer, to drives",
    "all-nvme": "optimizer and parameters, to drives",
}
OWN_OFFLOADS: Final[Mapping[str, Changes]] = {
    "optimizer-host": {"offload.optimizer": "host"},
    "all-host": {"offload.optimizer": "host", "offload.parameters": "host"},
    "optimizer-nvme": {"offload.optimizer": "nvme", "offload.gradients": "nvme"},
    "all-nvme": {
        "offload.optimizer": "nvme",
        "offload.gradients": "nvme",
        "offload.parameters": "nvme",
    },
}
"""Changes of zsim's own stages for each choice."""


def offloads(runtime: str) -> Mapping[str, Changes]:
    """Return the changes of a runtime for each choice that it has."""
    if runtime == OWN:
        return OWN_OFFLOADS
    return {
        choice: {f"zero.{runtime}.{name}": value for name, value in options.items()}
        for choice, options in search_of(runtime).choices.items()
    }


CHECKPOINTING: Final = {
    "none": "none",
    "selective": "selective: not the scores of plain attention",
    "operations": "operations: results of attention and every second product",
    "full": "full: inputs of blocks alone",
}


def _plain(values: Mapping[str, str]) -> OptionGroups:
    return (("", tuple(values.items())),)


def _numbers(*numbers: int) -> OptionGroups:
    return _plain({str(each): f"{each:,}" for each in numbers})


def _models() -> OptionGroups:
    return tuple(
        (each.family, tuple((model.name, model.name) for model in each.model))
        for each in model_catalogue().families
        if each.model
    )


def _gpus() -> OptionGroups:
    gpus = part_names(Part.GPU)
    usual = {word: nodes for word, nodes in usual_nodes().items() if word not in gpus}
    kinds = tuple((word, f"{word.upper()}, in {nodes[0]}") for word, nodes in usual.items())
    named = {nodes[0] for nodes in usual.values()}
    nodes = tuple((name, name) for name in part_names(Part.NODE) if name not in named)
    return (("GPU", kinds), ("GPUs of the node", nodes))


def _fabrics() -> OptionGroups:
    return _plain({"": "as usual for the node", **{name: name for name in part_names(Part.FABRIC)}})


def _runtimes() -> OptionGroups:
    found = [
        (
            each.options.__name__,
            tuple(
                (f"{name}-{stage}", f"{each.options.__name__}, stage {stage}")
                for stage in each.options.stages
            ),
        )
        for name, each in sorted(runtimes().items())
    ]
    own = tuple((f"{OWN}-{stage}", f"ZeRO stage {stage}") for stage in STAGES)
    return (*found, ("zsim's own order", own))


def _first_runtime() -> str:
    """Return the runtime, with its highest stage, that is selected at first."""
    for name, each in sorted(runtimes().items()):
        if search_of(name).comes_first:
            return f"{name}-{max(each.options.stages)}"
    return f"{OWN}-{max(STAGES)}"


_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@cache
def form_fields() -> tuple[FormField, ...]:
    """Return the fields of the form in display order."""
    return (*_hardware_fields(), *_setting_fields(), *_training_fields())


def _chosen(
    name: str, label: str, default: str, groups: OptionGroups, *, note: str = ""
) -> FormField:
    return FormField(name=name, label=label, default=default, groups=groups, note=note)


def _typed(name: str, label: str, default: str, *known: str, note: str = "") -> FormField:
    groups = _plain({each: each for each in known})
    return FormField(name=name, label=label, default=default, groups=groups, typed=True, note=note)


def _hardware_fields() -> tuple[FormField, ...]:
    counts = (str(2**power) for power in range(15))
    return (
        _chosen("model", "Model", "llama3.1-70b", _models()),
        _typed("count", "Number of GPUs", "128", *counts),
        _chosen("gpu", "GPU", first_gpu(), _gpus()),
        _chosen("fabric", "Fabric between nodes", "", _fabrics()),
    )


def _setting_fields() -> tuple[FormField, ...]:
    lengths = {"": "the model's own", **{str(each): f"{each:,}" for each in _LENGTHS}}
    few = _numbers(1, 2, 4, 8, 16, 32)
    return (
        _chosen("runtime", "Runtime and ZeRO stage", _first_runtime(), _runtimes()),
        _chosen("tensor", "Tensor parallel", "1", _numbers(1, 2, 4, 8, 16)),
        _chosen("pipeline", "Pipeline stages", "1", few),
        _chosen("length", "Sequence length", "", _plain(lengths)),
        _chosen("micro", "Micro-batch", "1", few, note="sequences of a replica at a time"),
        _chosen("accumulate", "Micro-batches of a step", "2", few),
        _chosen("checkpointing", "Activation checkpointing", "full", _plain(CHECKPOINTING)),
        _chosen("offload", "Offload", "", _plain(OFFLOAD_NAMES)),
    )


def _training_fields() -> tuple[FormField, ...]:
    other = "where it is another than the node's"
    return (
        _typed("host", "Host memory of a node", "", "64 GB", "256 GB", "512 GB", note=other),
        _typed("tokens", "Tokens of the training", "15T", "300B", "1T", "2T", "15T"),
        _typed("price", "Price of a GPU hour", "", note="yours: none ships"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSetting:
    """The chosen value of each field, as typed."""

    values: Mapping[str, str]

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole training; None if the field is empty.

        Raises:
            MistakeError: the field is not a number of tokens.
        """
        return tokens_of(self.values["tokens"] or None, _label("tokens"))

    @property
    def price(self) -> float | None:
        """Price of a GPU hour; None if the field is empty.

        Raises:
            MistakeError: the field is not a positive number.
        """
        text = self.values["price"]
        if not text:
            return None
        try:
            price = float(text)
        except ValueError:
            price = 0.0
        if not 0 < price < 1e6:
            raise MistakeError(f"{_label('price')}: {text!r} must be a number of more than 0")
        return price

    def tables(self) -> dict[str, Any]:
        """Return the tables of the scenario.

        Raises:
            MistakeError: choices contradict each other.
        """
        values = self.values
        fleet = self._fleet()
        runtime, _, stage = values["runtime"].rpartition("-")
        model: dict[str, object] = {"name": values["model"]}
        if values["length"]:
            model["sequence_length"] = int(values["length"])
        zero: dict[str, object] = {"stage": int(stage)}
        if runtime != OWN:
            zero["emulate"] = runtime
        tables: dict[str, Any] = {
            "title": f"{values['model']} on {fleet.title}",
            "model": model,
            **fleet.tables,
            "parallel": self._degrees(fleet.gpus),
            "zero": zero,
            "activations": {"checkpointing": values["checkpointing"]},
            "train": {
                "micro_batch_size": self._number("micro"),
                "gradient_accumulation_steps": self._number("accumulate"),
                "precision": fleet.precision,
                "optimizer": "adam",
            },
        }
        if values["fabric"]:
            tables["cluster"] = {**tables["cluster"], "fabric": values["fabric"]}
        if values["host"]:
            tables["cluster"] = {**tables["cluster"], "host_memory": values["host"]}
        return changed(tables, self._offload(runtime))

    def _offload(self, runtime: str) -> Changes:
        """Return the settings of the chosen offload for `runtime`."""
        what = self.values["offload"]
        if not what:
            return {}
        choices = offloads(runtime)
        if what not in choices:
            known = [OFFLOAD_NAMES[each] for each in choices]
            allowed = " or ".join(["nothing", *known])
            raise MistakeError(
                f"{_label('offload')}: {OFFLOAD_NAMES[what]!r} is nothing that {runtime} does; "
                f"it takes {allowed}"
            )
        return choices[what]

    def _number(self, name: str) -> int:
        text = self.values[name]
        if not text.isdecimal() or len(text) > DIGITS or not int(text):
            raise MistakeError(f"{_label(name)}: {text!r} must be a whole number, at least 1")
        return int(text)

    def _fleet(self) -> GpuFleet:
        count, name = self._number("count"), self.values["gpu"]
        if name in usual_nodes():
            try:
                return gpu_fleet(f"{count}x{name}")
            except MistakeError as mistake:
                why = str(mistake).removeprefix("--gpus: ")
                raise MistakeError(f"{_label('count')}: {why}") from None
        per_node = gpu_fleet(name).gpus
        if count % per_node:
            raise MistakeError(
                f"{_label('count')}: {count} must be a multiple of {per_node}, the GPUs of {name}"
            )
        return gpu_fleet(f"{count // per_node}x{name}")

    def _degrees(self, gpus: int) -> dict[str, object]:
        tensor, pipeline = self._number("tensor"), self._number("pipeline")
        if gpus % (tensor * pipeline):
            raise MistakeError(
                f"{_label('tensor')}: {tensor} x {pipeline} stages must divide the {gpus:,} GPUs"
            )
        return {"tensor": tensor, "pipeline": pipeline, "data": gpus // (tensor * pipeline)}


def chosen_setting(given: Mapping[str, str]) -> ChosenSetting:
    """Return the setting of `given` (values by field), with defaults for the other fields.

    Raises:
        MistakeError: a field is unknown, or does not allow the value.
    """
    values: dict[str, str] = {}
    if other := next((name for name in given if name not in {*map(_name, form_fields())}), None):
        raise MistakeError(f"{other}: unknown key; {one_of(other, [*map(_name, form_fields())])}")
    for each in form_fields():
        value = given.get(each.name, each.default).strip()
        if not each.typed and value not in each.values:
            raise MistakeError(f"{each.label}: {one_of(value, each.values)}")
        values[each.name] = value
    return ChosenSetting(values=values)


def _name(field: FormField) -> str:
    return field.name


def _label(name: str) -> str:
    return next(each.label for each in form_fields() if each.name == name)
