"""The setting that is chosen on the form of `zsim serve`: its scenario, and its fleet."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NoReturn
from urllib.parse import urlencode

from zsim.api.gpu_fleet import GpuFleet, gpu_fleet
from zsim.api.training_budget import tokens_of
from zsim.files.installed import usual_nodes
from zsim.files.source import with_files
from zsim.mistake import MistakeError, mistakes
from zsim.runtimes.lookup import search_of
from zsim.scenario.changes import changed
from zsim.scenario.tables import ScenarioError, from_tables
from zsim.suggestion import one_of
from zsim_plan.page.form_fields import GPU_LABELS, OFFLOAD_NAMES, OWN, ZERO, form_fields, label
from zsim_plan.page.own_files import (
    CONFIG_BYTES,
    gpu_text,
    hardware_of,
    need_size,
    own_file,
    without_folder,
)
from zsim_plan.search.fleet import Changes

FILE: Final = "setting.toml"
"""File name for the saved scenario."""

OWN_FILE: Final = re.compile(r"((?:gpu|node)\.toml)(?: on \w+)?: ")
"""Start of a message about a pasted file."""

DIGITS: Final = 9
"""Maximum digits of a typed number."""

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
    """Return the scenario changes of each choice of a runtime."""
    if runtime == ZERO:
        return OWN_OFFLOADS
    return {
        choice: {f"zero.{runtime}.{name}": value for name, value in options.items()}
        for choice, options in search_of(runtime).choices.items()
    }


@dataclass(frozen=True, kw_only=True)
class ChosenSetting:
    """The chosen value of each field, as typed."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the model."""
        return "config.json" if self.values["model"] == OWN else self.values["model"]

    @property
    def address(self) -> str:
        """The choices as the query of an address, without fields that are empty by default."""
        said = {each.name for each in form_fields() if each.default or self.values[each.name]}
        return urlencode({name: text for name, text in self.values.items() if name in said})

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole training; None if the field is empty.

        Raises:
            MistakeError: the field is not a number of tokens.
        """
        return tokens_of(self.values["tokens"] or None, label("tokens"))

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
            raise MistakeError(f"{label('price')}: {text!r} must be a number of more than 0")
        return price

    @property
    def runtime(self) -> str:
        """Name of the runtime, or `ZERO`."""
        return self.values["runtime"].rpartition("-")[0]

    @property
    def replicas(self) -> int:
        """Replicas of the model, each with its own sequences.

        Raises:
            MistakeError: the degrees do not divide the GPUs.
        """
        return int(str(self._degrees["data"])) // self.number("context")

    def sequence_length(self) -> int:
        """Return the tokens of a sequence.

        Raises:
            MistakeError: choices contradict each other, or config.json gives no length.
        """
        with mistakes(ScenarioError):
            scenario, _ = with_files(FILE, from_tables(self.tables()))
        length = scenario.model.sequence_length
        if length is None:
            raise MistakeError(f"{label('length')}: is empty, and {self.name} gives none")
        return length

    def tables(self) -> dict[str, Any]:
        """Return the tables of the scenario.

        Raises:
            MistakeError: choices contradict each other.
        """
        values, fleet = self.values, self.fleet
        zero: dict[str, object] = {"stage": int(values["runtime"].rpartition("-")[2])}
        if self.runtime != ZERO:
            zero["emulate"] = self.runtime
        tables: dict[str, Any] = {
            "title": f"{self.name} on {fleet.title}",
            "model": dict([self.model]),
            **fleet.tables,
            "parallel": self._degrees,
            "zero": zero,
            "activations": {"checkpointing": values["checkpointing"]},
            "train": {
                "micro_batch_size": self.number("micro"),
                "gradient_accumulation_steps": self.number("accumulate"),
                "precision": fleet.precision,
                "optimizer": "adam",
            },
        }
        return changed(tables, {**self.given(), **self._offload()})

    def given(self) -> Changes:
        """Return the values by key that a search keeps: of the cluster, model and training."""
        values, found = self.values, dict[str, object]()
        for field, key in (("fabric", "cluster.fabric"), ("host", "cluster.host_memory")):
            if values[field]:
                found[key] = values[field]
        if values["nvlink"]:
            found["cluster.nvlink"] = False
        if values["length"]:
            found["model.sequence_length"] = self.number("length")
        if values["lora"]:
            found["model.lora.rank"] = int(values["lora"])
        if values["precision"] == "float8":
            found |= {"train.precision": "bf16", "train.float8": "tensorwise"}
        elif values["precision"]:
            found["train.precision"] = values["precision"]
        if values["compile"]:
            found["train.compile"] = True
        if self.number("context") > 1:
            found["parallel.context"] = self.number("context")
        if self.number("expert") > 1:
            found["parallel.expert"] = self.number("expert")
        return found

    @cached_property
    def model(self) -> tuple[str, str]:
        """Key and value that give the model: its name, or the path of the pasted config.json.

        Raises:
            MistakeError: a config.json is missing, too large, or another model is chosen too.
        """
        config, name = self.values["config"], self.values["model"]
        if name != OWN and config:
            _refuse_pasted("config", "model", name)
        if name != OWN:
            return "name", name
        if not config:
            raise MistakeError(f"{label('config')}: is empty; paste it, or choose a model")
        need_size(label("config"), config, CONFIG_BYTES)
        return "hf_config", own_file("config.json", config)

    @property
    def files(self) -> Mapping[str, str]:
        """Paths of the pasted files by name.

        Raises:
            MistakeError: a file is wrong.
        """
        key, model = self.model
        found = {"config.json": model} if key == "hf_config" else {}
        if self.values["gpu"] == OWN:
            node, gpu = self._own_hardware()
            found |= {without_folder(path): path for path in (node, gpu) if path is not None}
        return found

    @property
    def gpus(self) -> tuple[str, str | None]:
        """The GPUs as `zsim best --gpus` takes them, and the file that replaces the node's GPU.

        Raises:
            MistakeError: the GPU is unknown, or the GPUs do not fill whole nodes.
        """
        count, name = self.number("count"), self.values["gpu"]
        gpu: str | None = None
        if name == OWN:
            node, gpu = self._own_hardware()
            if node is None:
                return f"{count}x{gpu}", None
            name = node
        else:
            for field in (*GPU_LABELS, "hardware"):
                if self.values[field]:
                    _refuse_pasted(field, "gpu", name)
        if name in usual_nodes():
            return f"{count}x{name}", None
        per_node = self._fleet_of(name, gpu).gpus
        if count % per_node:
            raise MistakeError(
                f"{label('count')}: {count} must be a multiple of {per_node}, the GPUs of "
                f"{without_folder(name)}"
            )
        return f"{count // per_node}x{name}", gpu

    @cached_property
    def fleet(self) -> GpuFleet:
        """The GPUs.

        Raises:
            MistakeError: the GPU is unknown, or the GPUs do not fill whole nodes.
        """
        return self._fleet_of(*self.gpus)

    def _fleet_of(self, text: str, gpu: str | None) -> GpuFleet:
        """Return the GPUs that `text` names, with messages about fields of the form.

        Raises:
            MistakeError: the GPU is unknown, or the GPUs do not fill whole nodes.
        """
        try:
            return gpu_fleet(text, gpu)
        except MistakeError as mistake:
            why = without_folder(str(mistake)).removeprefix("--gpus: ")
            if self.values["gpu"] == OWN and (named := OWN_FILE.match(why)):
                why = f"{named[1]}: {why[named.end() :]}"
                raise MistakeError(why) from None  # the file is wrong, not the number
            raise MistakeError(f"{label('count')}: {why}") from None

    def _own_hardware(self) -> tuple[str | None, str | None]:
        """Return the paths of the pasted node and GPU; None for one that is not given.

        Raises:
            MistakeError: neither is given, or the GPU is given twice.
        """
        numbers = gpu_text(self.values, GPU_LABELS)
        kind, text = "", self.values["hardware"]
        if text:
            kind, _ = hardware_of(label("hardware"), text)
        if kind == "gpu" and numbers:
            raise MistakeError(
                f"{label('hardware')}: is a GPU, as the numbers above are; remove one of the two"
            )
        if not numbers and not text:
            raise MistakeError(
                f"{label('gpu_memory')}: is empty; give the numbers of your own GPU, or choose one"
            )
        gpu = text if kind == "gpu" else numbers
        return (
            own_file("node.toml", text) if kind == "node" else None,
            own_file("gpu.toml", gpu) if gpu else None,
        )

    def _offload(self) -> Changes:
        """Return the settings of the chosen offload."""
        what, runtime = self.values["offload"], self.runtime
        if not what:
            return {}
        choices = offloads(runtime)
        if what not in choices:
            known = [OFFLOAD_NAMES[each] for each in choices]
            allowed = " or ".join(["nothing", *known])
            raise MistakeError(
                f"{label('offload')}: {OFFLOAD_NAMES[what]!r} is nothing that {runtime} does; "
                f"it takes {allowed}"
            )
        return choices[what]

    def number(self, name: str) -> int:
        """Return the number in the field called `name`.

        Raises:
            MistakeError: it is not a whole number of at least 1.
        """
        text = self.values[name]
        if not text.isdecimal() or len(text) > DIGITS or not int(text):
            raise MistakeError(f"{label(name)}: {text!r} must be a whole number, at least 1")
        return int(text)

    @property
    def _degrees(self) -> dict[str, object]:
        gpus = self.fleet.gpus
        tensor, pipeline = self.number("tensor"), self.number("pipeline")
        if gpus % (tensor * pipeline):
            raise MistakeError(
                f"{label('tensor')}: {tensor} x {pipeline} stages must divide the {gpus:,} GPUs"
            )
        data, context = gpus // (tensor * pipeline), self.number("context")
        if data % context:
            raise MistakeError(
                f"{label('context')}: {context} must divide the {data:,} data-parallel ranks"
            )
        return {"tensor": tensor, "pipeline": pipeline, "data": data}


def chosen_setting(given: Mapping[str, str]) -> ChosenSetting:
    """Return the setting of `given` (values by field), with defaults for the other fields.

    Raises:
        MistakeError: a field is unknown, or does not allow the value.
    """
    values: dict[str, str] = {}
    names = [field.name for field in form_fields()]
    if other := next((name for name in given if name not in names), None):
        raise MistakeError(f"{other}: unknown key; {one_of(other, names)}")
    for each in form_fields():
        value = given.get(each.name, each.default).strip()
        if not each.typed and value not in each.values:
            named = [known for known in each.values if known]
            or_else = "empty, or " if "" in each.values else ""
            raise MistakeError(f"{each.label}: {one_of(value, named, or_else=or_else)}")
        values[each.name] = value
    return ChosenSetting(values=values)


def _refuse_pasted(field: str, chosen: str, name: str) -> NoReturn:
    """Raise MistakeError: `field` has content, but another model or GPU is chosen.

    Raises:
        MistakeError: always.
    """
    raise MistakeError(
        f"{label(field)}: is given, but {label(chosen)} is {name!r}; empty it, or choose your own"
    )
