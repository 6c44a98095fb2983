"""A scenario from the YAML file of a nanotron run.

Sections, defaults and effects of options follow `src/nanotron/config/` (2026), with names of
2024 for the optimizer. They give the model, the three axes, batches, the format and the optimizer;
the scenario gives the cluster. Only Llama is read: other models of nanotron have other kernels.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

from zsim.runtimes.trainer_files.option_values import read_clip, read_whole
from zsim.runtimes.trainer_files.section_options import SectionOptions
from zsim.runtimes.trainer_files.tables import (
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.runtimes.trainer_files.yaml_text import yaml_sections
from zsim.schedule.json import shown
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim_runtimes.nanotron.options import TensorMode

FIELD = "zero.nanotron_config"
SHAPE = "model.model_config"

WITHOUT_EFFECT = (
    *("checkpoints.", "general.", "logging.", "metrics_logging.", "lighteval.", "s3_upload."),
    *("profiler.", "tokenizer.", "data_stages", "data.", "model.init_method.", "tokens.train_"),
    *("tokens.val_", "tokens.limit_", f"{SHAPE}.bos_token", f"{SHAPE}.eos_token"),
    *(f"{SHAPE}.pad_token", f"{SHAPE}.initializer_range", f"{SHAPE}.max_position_embeddings"),
    *(f"{SHAPE}.pretraining_tp", f"{SHAPE}.rms_norm_eps", f"{SHAPE}.rope_", f"{SHAPE}.use_cache"),
    *(f"{SHAPE}.interleaved_rotary", f"{SHAPE}.z_loss_coefficient", "optimizer.learning_rate_"),
    "optimizer.weight_decay_exclude_named_params",
)
"""Prefixes of options that change neither time nor memory of a step in zsim."""

DEFAULTS: Mapping[str, object] = {
    "parallelism.expert_parallel_size": 1,
    "parallelism.context_parallel_size": 1,
    "parallelism.moe_layer_recompute": False,
    "optimizer.accumulate_grad_in_fp32": True,
    "optimizer.optimizer_factory.torch_adam_is_fused": True,
    f"{SHAPE}.is_llama_config": True,
    f"{SHAPE}.hidden_act": "silu",
    f"{SHAPE}.attention_bias": False,
    f"{SHAPE}.z_loss_enabled": False,
}
"""Options that are accepted only at this value, which is the one that zsim models."""

WIDTHS: Mapping[str, tuple[str, int]] = {
    "layers": ("num_hidden_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "attention_heads": ("num_attention_heads", 32),
    "intermediate_size": ("intermediate_size", 11008),
}
"""Keys of `[model]`, each with the option and the default of `LlamaConfig`."""

FLASH = ("flash_attention_2", "sdpa")
"""Implementations of attention that store no scores."""

FORMATS = {"bfloat16": Precision.BF16, "float32": Precision.FP32}


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    options = SectionOptions(FIELD, yaml_sections(FIELD, text))
    for name in ("parallelism.dp", "tokens.micro_batch_size"):
        if name not in options.left:
            raise TrainerFileError(f"{FIELD}: {name}: missing; it is in every file of nanotron")
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    _old_names(options)
    _need_llama(options)
    _parallel(options)
    _model(options)
    _train(options)
    _order(options)
    put_all(tables, options.origins.items(), source=FIELD)
    options.drop(WITHOUT_EFFECT)
    off: tuple[object, ...] = (False, "", [])
    left = {
        name: shown(value)
        for name, value in options.left.items()
        if value not in off and DEFAULTS.get(name, ...) != value
    }
    left |= {name: "false" for name in DEFAULTS if _is_turned_off(options, name)}
    need_followed(FIELD, left.items())
    return ReadTables(tables=tables, origins=options.origins)


def _is_turned_off(options: SectionOptions, name: str) -> bool:
    """Return True if a flag that is on in zsim is off in the file."""
    return DEFAULTS[name] is True and options.left.get(name) is False


def _old_names(options: SectionOptions) -> None:
    """Move options of Adam into their section, as since 2024."""
    for name in ("adam_beta1", "adam_beta2", "adam_eps", "torch_adam_is_fused", "name"):
        if f"optimizer.{name}" in options.left:
            new = f"optimizer.optimizer_factory.{name}"
            options.left.setdefault(new, options.left.pop(f"optimizer.{name}"))


def _need_llama(options: SectionOptions) -> None:
    """Raise TrainerFileError if the file names another model, or data of other lengths."""
    for name, value in options.left.items():
        kind = name.removeprefix(f"{SHAPE}.is_")
        if kind != name and kind not in ("llama_config", "using_mup") and value is True:
            raise options.wrong(name, value, "is not modelled, only is_llama_config")
    if options.flag("model.init_method.use_mup"):
        raise options.wrong("model.init_method.use_mup", value=True, why="is not modelled")
    stages = options.left.get("data_stages")
    for stage in cast("list[object]", stages) if isinstance(stages, list) else ():
        found = cast("dict[str, object]", stage) if isinstance(stage, dict) else {}
        length = found.get("sequence_length")
        if length is not None and length != options.left.get("tokens.sequence_length"):
            why = "must be tokens.sequence_length"
            raise options.wrong("data_stages.sequence_length", length, why)


def _parallel(options: SectionOptions) -> None:
    """Set the axes, the stage and the options of tensor parallelism."""
    for axis, key in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        options.set_field(
            f"parallel.{key}", options.whole(f"parallelism.{axis}", 1), f"parallelism.{axis}"
        )
    options.set_field("zero.emulate", "nanotron", "parallelism.dp")
    stage = "optimizer.zero_stage"
    options.set_field("zero.stage", options.whole(stage, 0, least=0), stage)
    name = "parallelism.tp_mode"
    mode = TensorMode(options.word(name, TensorMode.ALL_REDUCE, tuple(TensorMode)))
    overlaps = "parallelism.tp_linear_async_communication"
    gathers = "parallelism.tp_recompute_allgather"
    keeps = not options.flag(gathers, default=True)
    is_async = options.flag(overlaps)
    if options.origins["parallel.tensor"].value == 1:
        return
    if is_async:
        why = "is not modelled with tensor ranks: collectives wait; set it to false"
        raise options.wrong(overlaps, value=True, why=why)
    options.set_field("zero.nanotron.tp_mode", mode, name)
    if mode is TensorMode.REDUCE_SCATTER:
        options.set_field("zero.nanotron.tp_recompute_allgather", not keeps, gathers)


def _model(options: SectionOptions) -> None:
    """Set the shape of a Llama."""
    options.set_field("model.architecture", "llama", f"{SHAPE}.is_llama_config")
    for key, (name, default) in WIDTHS.items():
        options.set_field(
            f"model.{key}", options.whole(f"{SHAPE}.{name}", default), f"{SHAPE}.{name}"
        )
    heads = options.origins["model.attention_heads"].value
    name = f"{SHAPE}.num_key_value_heads"
    options.set_field("model.key_value_heads", options.whole(name, cast("int", heads)), name)
    name = f"{SHAPE}.tie_word_embeddings"
    options.set_field("model.tied_embeddings", options.flag(name), name)
    name = f"{SHAPE}.vocab_size"
    multiple = options.whole("model.make_vocab_size_divisible_by", 1)
    multiple *= cast("int", options.origins["parallel.tensor"].value)
    size = options.whole(name, 32000)
    options.set_field("model.vocab_size", -(-size // multiple) * multiple, name)
    name = f"{SHAPE}._attn_implementation"
    options.word(name, FLASH[0], FLASH)
    options.set_field("model.attention", "flash2", name)
    name = "tokens.sequence_length"
    length = options.take(name, partial(read_whole, least=1))
    if length is None:
        raise TrainerFileError(f"{FIELD}: {name}: missing; it is in every file of nanotron")
    options.set_field("model.sequence_length", length, name)


def _train(options: SectionOptions) -> None:
    """Set batches, the format, the optimizer and recomputation."""
    for key, name in (
        ("micro_batch_size", "tokens.micro_batch_size"),
        ("gradient_accumulation_steps", "tokens.batch_accumulation_per_replica"),
    ):
        options.set_field(f"train.{key}", options.whole(name, 1), name)
    name = "model.dtype"
    options.set_field(
        "train.precision", FORMATS[options.word(name, "bfloat16", tuple(FORMATS))], name
    )
    bucket = "model.ddp_bucket_cap_mb"
    options.set_field("zero.nanotron.ddp_bucket_cap_mb", options.whole(bucket, 25), bucket)
    name = "optimizer.clip_grad"
    options.set_field("train.clip_norm", options.take(name, read_clip), name)
    name = "optimizer.learning_rate_scheduler.learning_rate"
    if name in options.left:
        options.set_field("train.learning_rate", options.number(name, 0.0), name)
    name = "optimizer.weight_decay"
    options.set_field("train.weight_decay", options.number(name, 0.0), name)
    factory = "optimizer.optimizer_factory"
    kind = options.word(f"{factory}.name", "adamW", ("adamW", "sgd"))
    options.set_field("train.optimizer", "sgd" if kind == "sgd" else "adam", f"{factory}.name")
    constants = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_eps": "epsilon"}
    for name, key in constants.items() if kind != "sgd" else ():
        if f"{factory}.{name}" in options.left:
            value = options.number(f"{factory}.{name}", 0.0)
            options.set_field(f"train.{key}", value, f"{factory}.{name}")
    name = "parallelism.recompute_layer"
    full = Checkpointing.FULL if options.flag(name) else Checkpointing.NONE
    options.set_field("activations.checkpointing", full, name)


def _order(options: SectionOptions) -> None:
    """Raise TrainerFileError unless the engine alternates forward and backward, or has one each."""
    name = "parallelism.pp_engine"
    engine = options.word(name, "missing", ("1f1b", "afab"))
    steps = options.origins["train.gradient_accumulation_steps"].value
    is_one = steps == 1 and options.origins["parallel.pipeline"].value == 1
    if engine != "1f1b" and not is_one:
        why = "runs all forwards before all backwards, which is not modelled, only 1f1b"
        value = engine if engine == "afab" else "missing, which is afab: it"
        raise TrainerFileError(f"{FIELD}: {name}: {value} {why}")
