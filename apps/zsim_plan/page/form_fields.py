"""The fields of the form of `zsim serve`, with their defaults and options."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from zsim.cluster.files import Part
from zsim.files.installed import first_gpu, model_catalogue, part_names, usual_nodes
from zsim.runtimes.lookup import runtimes, search_of
from zsim.strategy.strategy import STAGES
from zsim_plan.answer.best_question import OBJECTIVES
from zsim_plan.page.own_files import CONFIG_BYTES, GPU_NUMBERS, HARDWARE_BYTES, OPTIONAL
from zsim_plan.page.setting_page import FormField, FormSection, OptionGroups

ZERO: Final = "zero"
"""Name of zsim's own ZeRO stages in the form."""

OWN: Final = "own"
"""Option of a list by which a pasted file is chosen."""

OFFLOAD_NAMES: Final = {
    "": "nothing",
    "optimizer-host": "the optimizer, to the host",
    "all-host": "optimizer and parameters, to the host",
    "optimizer-nvme": "the optimizer, to drives",
    "all-nvme": "optimizer and parameters, to drives",
}

CHECKPOINTING: Final = {
    "none": "none",
    "selective": "selective: not the scores of plain attention",
    "operations": "operations: results of attention and every second product",
    "full": "full: inputs of blocks alone",
}

PRECISIONS: Final = {
    "": "16 bits, as usual for the GPU",
    "bf16": "bf16, fp32 master weights",
    "fp16": "fp16, fp32 master weights",
    "pure_bf16": "bf16 alone",
    "fp32": "fp32",
    "float8": "bf16, with float8 products",
}

LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

LORA_RANKS: Final = (8, 16, 32, 64, 128, 256)

GPU_LABELS: Final = {
    "gpu_memory": "GPU memory",
    "gpu_bandwidth": "Memory bandwidth",
    "gpu_link": "Link in each direction",
    "gpu_bf16": "bf16, dense",
    "gpu_fp8": "fp8, dense",
    "gpu_power": "Power limit",
}
"""Labels of the six numbers of a GPU."""

STAYS, GROWS = "stays", "grows"
"""Batches of the curve: the same tokens of a step, or the same micro-batches of a replica."""


def _plain(values: Mapping[str, str]) -> OptionGroups:
    return (("", tuple(values.items())),)


def _numbers(*numbers: int) -> OptionGroups:
    return _plain({str(each): f"{each:,}" for each in numbers})


def _models() -> OptionGroups:
    published = tuple(
        (each.family, tuple((model.name, model.name) for model in each.model))
        for each in model_catalogue().families
        if each.model
    )
    return (("Your own", ((OWN, "the config.json below"),)), *published)


def _gpus() -> OptionGroups:
    gpus = part_names(Part.GPU)
    usual = {word: nodes for word, nodes in usual_nodes().items() if word not in gpus}
    kinds = tuple((word, f"{word.upper()}, in {nodes[0]}") for word, nodes in usual.items())
    named = {nodes[0] for nodes in usual.values()}
    nodes = tuple((name, name) for name in part_names(Part.NODE) if name not in named)
    own = (OWN, "the GPU or node below")
    return (("GPU", kinds), ("GPUs of the node", nodes), ("Your own", (own,)))


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
    own = tuple((f"{ZERO}-{stage}", f"ZeRO stage {stage}") for stage in STAGES)
    return (*found, ("zsim's own order", own))


def _first_runtime() -> str:
    """Return the runtime, with its highest stage, that is selected at first."""
    for name, each in sorted(runtimes().items()):
        if search_of(name).comes_first:
            return f"{name}-{max(each.options.stages)}"
    return f"{ZERO}-{max(STAGES)}"


@cache
def form_sections() -> tuple[FormSection, ...]:
    """Return the sections of the form in display order."""
    return (
        FormSection(title="Model and GPUs", fields=_hardware_fields()),
        FormSection(title="Training", fields=_training_fields()),
        FormSection(title="Setting", fields=_setting_fields()),
        FormSection(title="Search and curve", fields=_search_fields()),
        FormSection(title="Your own model, GPU or node", fields=(*_file_fields(),), folded=True),
    )


@cache
def form_fields() -> tuple[FormField, ...]:
    """Return the fields of all sections."""
    return tuple(field for section in form_sections() for field in section.fields)


def label(name: str) -> str:
    """Return the label of the field called `name`."""
    return next(each.label for each in form_fields() if each.name == name)


def _chosen(
    name: str, label: str, default: str, groups: OptionGroups, *, note: str = ""
) -> FormField:
    return FormField(name=name, label=label, default=default, groups=groups, note=note)


def _typed(
    name: str, label: str, default: str, *known: str, note: str = "", hint: str = ""
) -> FormField:
    groups = _plain({each: each for each in known})
    return FormField(
        name=name, label=label, default=default, groups=groups, typed=True, note=note, hint=hint
    )


def _pasted(name: str, label: str, *, note: str, hint: str) -> FormField:
    return FormField(
        name=name, label=label, default="", groups=(), typed=True, note=note, hint=hint, lines=4
    )


def _hardware_fields() -> tuple[FormField, ...]:
    counts = (str(2**power) for power in range(15))
    nvlink = _plain({"": "as in the node", "no": "none: over PCIe slots"})
    return (
        _chosen("model", "Model", "llama3.1-70b", _models()),
        _typed("count", "Number of GPUs", "128", *counts),
        _chosen("gpu", "GPU", first_gpu(), _gpus()),
        _chosen("nvlink", "NVLink", "", nvlink),
        _chosen("fabric", "Fabric between nodes", "", _fabrics()),
        _typed("host", "Host memory of a node", "", "64 GB", "256 GB", "512 GB", hint="the node's"),
    )


def _training_fields() -> tuple[FormField, ...]:
    lengths = map(str, LENGTHS)
    ranks = {"": "none: all parameters", **{str(each): f"rank {each}" for each in LORA_RANKS}}
    return (
        _typed("length", "Context length", "", *lengths, hint="the model's own"),
        _chosen("lora", "LoRA", "", _plain(ranks)),
        _chosen("precision", "Precision", "", _plain(PRECISIONS)),
        _chosen("compile", "Compiled blocks", "", _plain({"": "no", "yes": "yes"})),
        _typed("tokens", "Tokens of the training", "15T", "300B", "1T", "2T", "15T"),
        _typed("price", "Price of a GPU hour", "", hint="for example 2.50"),
    )


def _setting_fields() -> tuple[FormField, ...]:
    few = _numbers(1, 2, 4, 8, 16, 32)
    return (
        _chosen("runtime", "Runtime and ZeRO stage", _first_runtime(), _runtimes()),
        _chosen("tensor", "Tensor parallel", "1", _numbers(1, 2, 4, 8, 16)),
        _chosen("pipeline", "Pipeline stages", "1", few),
        _chosen("context", "Context parallel", "1", few),
        _chosen("expert", "Expert parallel", "1", _numbers(1, 2, 4, 8, 16, 32, 64, 128, 256)),
        _chosen("micro", "Micro-batch", "1", few, note="sequences of a replica at a time"),
        _typed("accumulate", "Micro-batches of a step", "2", "1", "2", "4", "8", "16", "32"),
        _chosen("checkpointing", "Activation checkpointing", "full", _plain(CHECKPOINTING)),
        _chosen("offload", "Offload", "", _plain(OFFLOAD_NAMES)),
    )


def _search_fields() -> tuple[FormField, ...]:
    among = {"": "all runtimes", "chosen": "the chosen runtime"}
    batch = {STAYS: "of a step stays", GROWS: "of a replica stays"}
    return (
        _chosen(
            "least", "Search for the least", "time", _plain({each: each for each in OBJECTIVES})
        ),
        _chosen("among", "Search among", "", _plain(among)),
        _chosen("batch", "Curve: the batch", STAYS, _plain(batch)),
    )


def _file_fields() -> Iterator[FormField]:
    yield _pasted(
        "config",
        "config.json",
        note=f"of Hugging Face, at most {CONFIG_BYTES // 1000} kB",
        hint='{"model_type": "llama", ...}',
    )
    for name, text in GPU_LABELS.items():
        _, example = GPU_NUMBERS[name]
        hint = f"{example}{' (or empty)' if name in OPTIONAL else ''}"
        yield _typed(name, text, "", hint=hint)
    yield _pasted(
        "hardware",
        "GPU or node as TOML",
        note=f"as zsim show gpu --template, at most {HARDWARE_BYTES // 1000} kB",
        hint="[node]",
    )
