"""A scenario from the `ds_config.json` of a DeepSpeed run.

Its options go into `[zero]`, `[train]` and `[activations]`. The scenario gives missing values, and
values that are "auto" unless Hugging Face fills them (`zsim_runtimes.deepspeed.config_autos`). Two
batch sizes are needed; accumulation is 1 if not given, as in DeepSpeed. Other options are without
effect, reported or refused (`zsim_runtimes.deepspeed.ignored_options`).
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from zsim.bounded_text import bounded_json
from zsim.runtimes.trainer_files.option_values import (
    read_clip,
    read_flag,
    read_number,
    read_pair,
    read_whole,
)
from zsim.runtimes.trainer_files.tables import (
    FileOption,
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.schedule.json import shown
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim_runtimes.deepspeed.config_autos import (
    AUTO,
    fill_arguments,
    fill_autos,
    full_names,
    take_autos,
)
from zsim_runtimes.deepspeed.config_values import read_at_least_one, read_device, read_format
from zsim_runtimes.deepspeed.ignored_options import is_silent, reasons
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice

Options = dict[str, object]
"""Options by dotted name; options that were read are removed."""

Betas = tuple[float, float]

Read = Callable[[object], object]
"""Converts the value of an option to zsim's; raises ValueError with the allowed values."""

FIELD = "zero.deepspeed_config"
ZERO = "zero_optimization"
OPTIMIZER, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*+"?)|(?://|#)[^\n]*+|,(?=\s*+[}\]])')
"""Strings, comments and last commas: DeepSpeed reads its file as Hjson."""
PLACEHOLDER = re.compile(r"[$<{]*+[A-Z][A-Z0-9_]++")
AIO_FIELD = "zero.deepspeed.aio"
OPTIMIZER_FIELD, PARAM_FIELD = "zero.deepspeed.offload_optimizer", "zero.deepspeed.offload_param"
SECTIONS = (
    ZERO,
    OPTIMIZER,
    PARAM,
    "aio",
    "fp16",
    "bf16",
    "optimizer",
    "activation_checkpointing",
    "data_types",
    "expert_parallel",
)
"""Sections, which hold options; inner sections follow their outer one."""


EXPERTS = "expert_parallel"
OF_EXPERTS: Mapping[str, object] = {
    "expert_tensor_parallel_size": 1,
    "score_apply": "post",
    "combine_impl": "weighted_sum",
    "comm_backend": "comm",
    "gate_up_impl": "separate",
    "row_weighting_impl": "auto",
    "async_split_plan": False,
    "disable_triton_grouped_mm": False,
    **dict.fromkeys(
        (
            *("top_k", "score_func", "route_norm", "route_scale", "routed_scaling_factor"),
            *("num_expert_groups", "num_limited_groups", "has_shared_experts"),
        ),
        "auto",
    ),
}
"""Options of AutoEP with the value that is modelled; "auto" takes the number of the model."""

NAMES_OF_EXPERTS = (
    *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1"),
    *("expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "shared_experts_pattern"),
    *("shared_experts_gate_pattern", "validate_folding_routing"),
)
"""Options of AutoEP that only find the experts of a module, or check them."""


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a ds_config.json, and warnings about its options.

    Raises:
        TrainerFileError: it is not a configuration, has invalid or unmodelled values, or
            contradicts the scenario.
    """
    options = _options(text)
    tables = given.copied("zero", "train", "activations", "parallel")
    emulate = tables["zero"].setdefault("emulate", "deepspeed")
    if emulate != "deepspeed":
        raise TrainerFileError(f'zero.emulate: "{emulate}" contradicts deepspeed_config')
    full_names(options)
    autos = take_autos(options)
    assumed = fill_arguments(options, autos, tables["train"])
    assumed += _assumed_precision(options, autos, tables["train"])
    _deprecated(options)
    said = _plain(options)
    precision = _precision(options, said, tables["train"])
    if precision is Precision.FP16:
        _loss_scale(options, said)
    _optimizer(options, said, tables["train"])
    for name, field in CHECKPOINTS.items():
        what = _take(options, f"activation_checkpointing.{name}", read_flag)
        if tables["activations"].get("checkpointing") is Checkpointing.FULL and what is not None:
            said[field] = what  # otherwise there are no checkpoints
    _experts(options, said)
    stage = _stage(said, tables["zero"])
    if stage != 3:
        unused = f"{ZERO}.stage3_" if stage else f"{ZERO}."
        autos = [name for name in autos if not name.startswith(unused)]
    fill_autos(FIELD, autos, said, tables, hidden_size=given.value("model", "hidden_size"))
    if stage != 3:
        _drop_stage3(said)
    if stage == 0:
        _drop_zero(said)
    put_all(tables, said.items(), source=FIELD)
    _complete(tables["train"], precision)
    recomputes = tables["activations"].get("checkpointing") is Checkpointing.FULL
    left = {
        name: shown(value)
        for name, value in options.items()
        if not is_silent(name, value, stage=stage)
        and _applies(name, precision, recomputes=recomputes)
    }
    ignored = need_followed(FIELD, left.items(), reasons(left))
    return ReadTables(tables=tables, origins=said, ignored=ignored, assumed=tuple(assumed))


def _applies(name: str, precision: Precision, *, recomputes: bool) -> bool:
    """Return True unless an option is of another format, or of checkpoints that do not exist."""
    section = name.partition(".")[0]
    if section == "activation_checkpointing":
        return recomputes
    return section not in {"fp16", "bf16"} or section == precision.compute


def _options(text: str) -> Options:
    """Return options of a ds_config.json by dotted name; null counts as not given."""
    try:
        found = bounded_json(COMMENT.sub(r"\1", text))
    except ValueError as error:
        raise TrainerFileError(f"{FIELD}: not JSON: {_why(error)}") from None
    if not isinstance(found, dict):
        raise TrainerFileError(f"{FIELD}: must be an object, as ds_config.json is")
    options = _given("", cast("Options", found))
    if "bfloat16" in options:  # its old name
        options.setdefault("bf16", options.pop("bfloat16"))
    for section in SECTIONS:
        options |= _section(options, section)
    return options | _section(options, "optimizer.params")


def _why(error: ValueError) -> str:
    """Return the problem; a name of a template in place of a value is shown."""
    if isinstance(error, json.JSONDecodeError):
        name = PLACEHOLDER.match(error.doc, error.pos)
        if name is not None and error.pos:
            return f"line {error.lineno}: {shown(name[0])} must be replaced by a value"
    return str(error)


def _section(options: Options, name: str) -> Options:
    inner = options.pop(name, {})
    if inner == AUTO:
        return {}
    if not isinstance(inner, dict):
        raise TrainerFileError(f"{FIELD}: {name}: {shown(inner)} must be an object")
    return _given(f"{name}.", cast("Options", inner))


def _given(prefix: str, options: Options) -> Options:
    """Return `options` that are not null, with `prefix`; a name with a dot is quoted."""
    return {
        prefix + (shown(name) if "." in name else name): value
        for name, value in options.items()
        if value is not None
    }


STATES: Mapping[str, Read] = {
    "device": read_device,
    "pin_memory": read_flag,
    "buffer_count": partial(read_whole, least=1),
    "pipeline_read": read_flag,
    "pipeline_write": read_flag,
}
SHARDS: Mapping[str, Read] = {
    "device": read_device,
    "buffer_count": partial(read_whole, least=1),
    "buffer_size": partial(read_whole, least=1),
    "max_in_cpu": read_whole,
}
HANDLES: Mapping[str, Read] = {
    "block_size": partial(read_whole, least=1),
    "queue_depth": partial(read_whole, least=1),
    "intra_op_parallelism": partial(read_whole, least=1),
    "overlap_events": read_flag,
}
"""Options of `offload_optimizer`, `offload_param` and `aio`, each with its reader."""

CHECKPOINTS: Mapping[str, str] = {
    "partition_activations": "activations.partition",
    "cpu_checkpointing": "zero.deepspeed.cpu_checkpointing",
}
"""Flags of `activation_checkpointing`, each with its field in a scenario."""

PLAIN: Mapping[str, tuple[str, Read]] = {
    "train_batch_size": ("train.global_batch_size", read_whole),
    "train_micro_batch_size_per_gpu": ("train.micro_batch_size", read_whole),
    "gradient_accumulation_steps": ("train.gradient_accumulation_steps", read_whole),
    "gradient_clipping": ("train.clip_norm", read_clip),
    "communication_data_type": ("zero.deepspeed.communication_data_type", read_format),
    f"{ZERO}.stage": ("zero.stage", read_whole),
    f"{ZERO}.overlap_comm": ("zero.deepspeed.overlap_comm", read_flag),
    f"{ZERO}.reduce_bucket_size": (
        "zero.deepspeed.reduce_bucket_size",
        partial(read_whole, least=1),
    ),
    f"{ZERO}.sub_group_size": ("zero.deepspeed.sub_group_size", read_at_least_one),
    f"{ZERO}.zero_hpz_partition_size": (
        "zero.deepspeed.zero_hpz_partition_size",
        read_at_least_one,
    ),
    **{
        f"{ZERO}.{name}": (f"zero.deepspeed.{name}", read_whole)
        for name in DeepSpeed.model_fields
        if name.startswith("stage3_")
    },
    **{f"{OPTIMIZER}.{name}": (f"{OPTIMIZER_FIELD}.{name}", read) for name, read in STATES.items()},
    **{f"{PARAM}.{name}": (f"{PARAM_FIELD}.{name}", read) for name, read in SHARDS.items()},
    **{f"aio.{name}": (f"{AIO_FIELD}.{name}", read) for name, read in HANDLES.items()},
}
"""Options, each with its field in a scenario and its reader."""


def _take(options: Options, name: str, read: Read) -> FileOption | None:
    """Remove the option `name` from `options` and return it; None if it is not given."""
    if name not in options:
        return None
    value = options.pop(name)
    try:
        return FileOption(name, read(value))
    except ValueError as error:
        raise TrainerFileError(f"{FIELD}: {name}: {shown(value)} {error}") from None


def _experts(options: Options, said: dict[str, FileOption]) -> None:
    """Set the ranks of experts of AutoEP; other options stay if they are not its defaults."""
    # parse_autoep_config of module_inject/auto_ep_config.py, August 2026 (edaa7221)
    enabled = _take(options, f"{EXPERTS}.enabled", read_flag)
    if enabled is None or not enabled.value:
        for name in [each for each in options if each.startswith(f"{EXPERTS}.")]:
            del options[name]
        return
    said["zero.deepspeed.expert_layer"] = FileOption(enabled.option, "auto_ep")
    ranks = _take(options, f"{EXPERTS}.autoep_size", partial(read_whole, least=1))
    said["parallel.expert"] = ranks or FileOption(enabled.option, 1)
    grouped = _take(options, f"{EXPERTS}.use_grouped_mm", read_flag)
    if grouped is not None and not grouped.value:
        raise TrainerFileError(f"{FIELD}: {grouped.option}: false is not modelled; remove it")
    for name in NAMES_OF_EXPERTS:
        options.pop(f"{EXPERTS}.{name}", None)
    for name, modelled in OF_EXPERTS.items():
        if options.get(f"{EXPERTS}.{name}") == modelled:
            options.pop(f"{EXPERTS}.{name}", None)


def _deprecated(options: Options) -> None:
    """Convert deprecated flags and names to the current ones.

    Options of a section without a device, or with "none", are removed: they have no effect.
    """
    for old, section in ((f"{ZERO}.cpu_offload", OPTIMIZER), (f"{ZERO}.cpu_offload_param", PARAM)):
        said = _take(options, old, read_flag)
        if said is not None and said.value:
            options.setdefault(f"{section}.device", OffloadDevice.CPU.value)
        if options.get(f"{section}.device", "none") == "none":
            for name in [each for each in options if each.startswith(f"{section}.")]:
                del options[name]
    if "aio.thread_count" in options:
        options.setdefault("aio.intra_op_parallelism", options["aio.thread_count"])
        del options["aio.thread_count"]


def _plain(options: Options) -> dict[str, FileOption]:
    """Return the values of options in `PLAIN`, by field of a scenario."""
    found = {field: _take(options, name, read) for name, (field, read) in PLAIN.items()}
    return {field: what for field, what in found.items() if what is not None}


def _precision(
    options: Options, said: dict[str, FileOption], train: Mapping[str, Any]
) -> Precision:
    """Return the enabled precision, else the scenario's; raise if that is disabled."""
    found = {name: _take(options, f"{name}.enabled", read_flag) for name in ("fp16", "bf16")}
    enabled = [name for name, flag in found.items() if flag is not None and flag.value]
    if len(enabled) > 1:
        raise TrainerFileError(f"{FIELD}: bf16.enabled: true contradicts fp16.enabled")
    if enabled:
        narrow = _narrow(options) if enabled[0] == "bf16" else None
        precision = Precision(enabled[0]) if narrow is None else Precision.PURE_BF16
        said["train.precision"] = FileOption(narrow or f"{enabled[0]}.enabled", str(precision))
        return precision
    precision = Precision(train.get("precision", Precision.FP32))
    disabled = found.get(precision)
    if disabled is not None:
        raise TrainerFileError(
            f'train.precision: "{precision}" contradicts deepspeed_config, '
            f"whose {disabled.option} is false"
        )
    return precision


def _assumed_precision(
    options: Options, autos: list[str], train: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the formats that are "auto" if neither another option nor the scenario decides."""
    names = [f"{each}.enabled" for each in ("bf16", "fp16")]
    is_given = "precision" in train or any(options.get(each) is True for each in names)
    auto = [each for each in names if each in autos]
    if is_given or not auto:
        return ()
    return (
        f"{' and '.join(auto)} {'are' if auto[1:] else 'is'} false (train.precision gives one)",
    )


def _narrow(options: Options) -> str | None:
    """Return the option that puts masters and moments in bf16, too; None if neither is.

    DeepSpeed allows bf16 masters alone with the optimizer on the CPU, with fp32 moments; zsim does
    not model this.
    """
    masters, moments = (
        _take(options, f"bf16.{name}", read_flag)
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    )
    if moments is not None and moments.value:
        if masters is None or not masters.value:  # as _do_error_check (runtime/config.py)
            why = "true needs bf16.bf16_master_weights_and_grads = true"
            raise TrainerFileError(f"{FIELD}: {moments.option}: {why}")
        return masters.option
    if masters is not None and masters.value:
        why = "true is modelled with bf16.bf16_optimizer_states = true alone"
        raise TrainerFileError(f"{FIELD}: {masters.option}: {why}")
    return None


def _loss_scale(options: Options, said: dict[str, FileOption]) -> None:
    """Read the loss scale; a constant scale has growth and backoff 1."""
    power = _take(options, "fp16.initial_scale_power", partial(read_whole, most=127))
    window = _take(options, "fp16.loss_scale_window", partial(read_whole, least=1))
    minimum = _take(options, "fp16.min_loss_scale", read_number)
    constant = _take(options, "fp16.loss_scale", read_number)
    scale = "train.loss_scale"
    if constant is not None and constant.value:
        said[f"{scale}.initial"] = said[f"{scale}.minimum"] = constant
        said[f"{scale}.growth"] = said[f"{scale}.backoff"] = FileOption(constant.option, 1.0)
        options.pop("fp16.hysteresis", None)
        return
    if power is not None:
        said[f"{scale}.initial"] = FileOption(power.option, 2.0 ** cast("int", power.value))
    if window is not None:
        said[f"{scale}.interval"] = window
    if minimum is not None:
        said[f"{scale}.minimum"] = minimum


def _optimizer(options: Options, said: dict[str, FileOption], train: Mapping[str, Any]) -> None:
    """Read the rule and its constants; other options of the optimizer stay in `options`."""
    kinds = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
    word = options.get("optimizer.type")
    kind = kinds.get(word.lower()) if isinstance(word, str) else None
    if word is not None and kind is None:
        why = "is not modelled, only Adam, AdamW and SGD"
        raise TrainerFileError(f"{FIELD}: optimizer.type: {shown(word)} {why}")
    if kind is not None:
        said["train.optimizer"] = FileOption("optimizer.type", kind)
        del options["optimizer.type"]
    names = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    if (kind or train.get("optimizer", "adam")) == "sgd":
        names["momentum"] = "momentum"
        nesterov = _take(options, "optimizer.params.nesterov", read_flag)
        if nesterov is not None:
            said["train.nesterov"] = nesterov
    else:
        names["eps"] = "epsilon"
        betas = _take(options, "optimizer.params.betas", read_pair)
        if betas is not None:
            for name, beta in zip(("beta1", "beta2"), cast("Betas", betas.value), strict=True):
                said[f"train.{name}"] = FileOption(betas.option, beta)
    for name, field in names.items():
        what = _take(options, f"optimizer.params.{name}", read_number)
        if what is not None:
            said[f"train.{field}"] = what


def _stage(said: dict[str, FileOption], zero: Mapping[str, Any]) -> int:
    """Return the stage of the file or the scenario; set DeepSpeed's default, 0, if neither has it.

    Raises:
        TrainerFileError: it is not a stage.
    """
    what = said.get("zero.stage")
    if what is None and "stage" in zero:
        return cast("int", zero["stage"])
    if what is None:
        what = said["zero.stage"] = FileOption(f"{ZERO}.stage", 0)
    stage = cast("int", what.value)
    if stage not in DeepSpeed.stages:
        raise TrainerFileError(f"{FIELD}: {ZERO}.stage: {stage} must be 0, 1, 2 or 3")
    return stage


def _drop_zero(said: dict[str, FileOption]) -> None:
    """Remove options that have no effect in stage 0."""
    for name in ("reduce_bucket_size", "overlap_comm"):
        said.pop(f"zero.deepspeed.{name}", None)
    device = said.get(f"{OPTIMIZER_FIELD}.device")
    for name in STATES if device is None or device.value == OffloadDevice.NONE else ():
        said.pop(f"{OPTIMIZER_FIELD}.{name}", None)


def _drop_stage3(said: dict[str, FileOption]) -> None:
    """Remove options that have no effect below stage 3."""
    for name in DeepSpeed.model_fields:
        if name.startswith("stage3_") or name in {"sub_group_size", "zero_hpz_partition_size"}:
            said.pop(f"zero.deepspeed.{name}", None)
    for name in SHARDS:
        said.pop(f"{PARAM_FIELD}.{name}", None)
    for name in HANDLES:
        said.pop(f"{AIO_FIELD}.{name}", None)


def _complete(train: dict[str, Any], precision: Precision) -> None:
    """Fill in defaults of DeepSpeed that differ from those of a scenario."""
    sizes = {"micro_batch_size", "global_batch_size"} & train.keys()
    if len(sizes) == 1:
        train.setdefault("gradient_accumulation_steps", 1)
    if precision is Precision.FP16:
        train.setdefault("loss_scale", {}).setdefault("interval", 1000)
