"""A scenario from the YAML file of a LitGPT run, which trains with Lightning Fabric.

Keys, defaults and effects of options follow LitGPT 0.5.13 (`setup` of `litgpt/pretrain.py`,
`finetune/full.py` and `finetune/lora.py`, `TrainArgs` of `args.py`, `Config` of `config.py`).
A file does not name its command: one with `model_name` is read as `pretrain`, one with options of
adapters as `finetune_lora`. One device trains without a wrapper, several with FSDP. The model is
read by its name if it ships with zsim, or from `model_config`; the scenario gives the cluster.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import cast

from zsim.runtimes.trainer_files.option_values import read_pair, read_whole
from zsim.runtimes.trainer_files.section_options import SectionOptions
from zsim.runtimes.trainer_files.tables import (
    FileOption,
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.runtimes.trainer_files.yaml_text import yaml_sections
from zsim.schedule.json import shown
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Loss, Norms
from zsim.strategy.precision import Precision

FIELD = "zero.litgpt_config"
SHAPE = "model_config"

WITHOUT_EFFECT = (
    *("out_dir", "data", "eval", "log", "logger_name", "seed", "access_token", "resume"),
    *("initial_checkpoint_dir", "tokenizer_dir", "lora_", "train.save_interval", "train.log_"),
    *("train.lr_", "train.epochs", "train.max_tokens", "train.max_steps", "train.max_time"),
    *("train.min_lr", f"{SHAPE}.name", f"{SHAPE}.hf_config", f"{SHAPE}.norm_eps"),
    *(f"{SHAPE}.rope_", f"{SHAPE}.rotary_percentage", f"{SHAPE}.scale_embeddings"),
    *(f"{SHAPE}.gelu_approximate", f"{SHAPE}.attention_scores_scalar"),
)
"""Prefixes of options that change neither time nor memory of a step in zsim."""


class Command(StrEnum):
    """Commands of LitGPT with different options."""

    PRETRAIN = "pretrain"
    FULL = "finetune_full"
    LORA = "finetune_lora"


PRECISIONS = {
    "bf16-true": Precision.PURE_BF16,
    "bf16-mixed": Precision.BF16,
    "16-mixed": Precision.FP16,
    "32-true": Precision.FP32,
}
MASKED = re.compile(r"gemma-[23]-", re.IGNORECASE)
"""Models whose attention LitGPT does not compute with a fused causal kernel."""

FORMATS = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4_double"}
PROJECTIONS = {"query": True, "key": False, "value": True}
"""Parts of the joined layer that may have adapters, with LitGPT's defaults."""

OPTIMIZERS = {
    **dict.fromkeys(("AdamW", "torch.optim.AdamW", "torch.optim.Adam", "Adam"), "adam"),
    **dict.fromkeys(("SGD", "torch.optim.SGD"), "sgd"),
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
}
PAGED = "optimizer (bitsandbytes' PagedAdamW: its states count as memory of the device)"
STABLE = (
    "quantize (since October 2024 LitGPT replaces the embedding by bitsandbytes' StableEmbedding: "
    "its norm and the gradient of its weight are not modelled)"
)


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration, and warnings about its options.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    sections = yaml_sections(FIELD, text)
    options = SectionOptions(FIELD, sections)
    command = _command(options, sections)
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    devices, machines = _devices(options, command)
    is_alone = devices == 1 and machines == 1
    _model(options, given, command)
    adapted = _adapter(options, given) if command is Command.LORA else ()
    _runtime(options, command, machines, is_alone=is_alone)
    _precision(options, command, is_alone=is_alone)
    _train(options, command, sections)
    assumed = (*_lengths(options, given, command), *adapted)
    if command is Command.FULL:
        assumed = (*assumed, f"command: {command} (a file does not name its command)")
    if devices is None:
        assumed = (*assumed, "devices: auto (more than one GPU)")
    put_all(tables, options.origins.items(), source=FIELD)
    options.drop(WITHOUT_EFFECT)
    left = {name: shown(value) for name, value in options.left.items() if value not in OFF}
    need_followed(FIELD, left.items())
    is_quantized = "model.lora.quantization" in options.origins
    return ReadTables(
        tables=tables,
        origins=options.origins,
        ignored=(PAGED, STABLE) if is_quantized else (),
        assumed=assumed,
        ranks=None if devices is None else devices * machines,
        machines=machines,
    )


OFF: tuple[object, ...] = (False, "", [], 0)


def _command(options: SectionOptions, sections: Mapping[str, object]) -> Command:
    """Return the command that takes the options of the file.

    `quantize` without options of LoRA may be of `finetune_adapter`, whose files have it, too.
    """
    if "model_name" in options.left:
        return Command.PRETRAIN
    if "checkpoint_dir" not in options.left:
        why = "model_name or checkpoint_dir: missing; one is in every file of LitGPT"
        raise TrainerFileError(f"{FIELD}: {why}")
    if any(name.startswith("lora_") for name in sections):
        return Command.LORA
    if "quantize" in sections:
        why = "needs lora_r, if the file is of finetune_lora; finetune_adapter is not modelled"
        raise options.wrong("quantize", sections["quantize"], why)
    return Command.FULL


def _devices(options: SectionOptions, command: Command) -> tuple[int | None, int]:
    """Return the GPUs of a machine, None if the machine gives them, and the machines."""
    name, machines = "devices", options.whole("num_nodes", 1)
    default = "auto" if command is Command.PRETRAIN else 1
    value = options.left.pop(name, default)
    if value in ("auto", -1):
        return None, machines
    try:
        return read_whole(value, least=1), machines
    except ValueError as error:
        raise options.wrong(name, value, f"{error}, or auto") from None


def _model(options: SectionOptions, given: GivenTables, command: Command) -> None:
    """Set the shape by the name of the model or from `model_config`, and LitGPT's layers."""
    name = "model_name" if command is Command.PRETRAIN else "checkpoint_dir"
    if any(each.startswith(f"{SHAPE}.") for each in options.left):
        options.left.pop(name, None)
        _shape(options)
    else:  # a folder as `litgpt download` makes it: checkpoints/ORGANIZATION/NAME
        options.left[name] = "/".join(options.word(name, "").rstrip("/").split("/")[-2:])
        path = str(options.left[name])
        if MASKED.search(path):
            why = "is not modelled: LitGPT computes its attention with capped scores or a mask"
            raise options.wrong(name, path, why)
        options.set_shape(name, given)
        options.origins.pop("model.window", None)  # LitGPT has none for other models
    tie = "train.tie_embeddings"
    ties = options.flag(tie)
    if ties and command is not Command.PRETRAIN:
        raise options.wrong(tie, value=True, why=f"is refused by {command} of LitGPT")
    options.set_field("model.tied_embeddings", ties, tie)
    options.set_field("model.joined_qkv", value=True, option=name)  # CausalSelfAttention
    options.set_field("model.attention", "flash2", name)  # SDPA, causal without a mask


WIDTHS: Mapping[str, tuple[str, int]] = {
    "layers": ("n_layer", 16),
    "hidden_size": ("n_embd", 4096),
    "attention_heads": ("n_head", 32),
}
"""Keys of `[model]`, each with the option and the default of `Config`."""

ACTIVATIONS = {"GptNeoxMLP": "gelu", "LLaMAMLP": "swiglu", "GemmaMLP": "geglu"}
FLAGS = {
    "bias": ("bias", True),
    "parallel_residual": ("parallel_residual", True),
    "shared_norm": ("shared_attention_norm", False),
    "qkv_bias": ("attn_bias", False),
    "head_bias": ("lm_head_bias", False),
}


def _shape(options: SectionOptions) -> None:
    """Set a shape from `model_config`, with the defaults of `Config`."""
    options.set_field("model.architecture", "llama", SHAPE)
    for key, (name, default) in WIDTHS.items():
        value = options.whole(f"{SHAPE}.{name}", default)
        options.set_field(f"model.{key}", value, f"{SHAPE}.{name}")
    for key, name in (("key_value_heads", "n_query_groups"), ("head_size", "head_size")):
        found = options.take(f"{SHAPE}.{name}", partial(read_whole, least=1))
        options.set_field(f"model.{key}", found, f"{SHAPE}.{name}")
    name = f"{SHAPE}.mlp_class_name"
    kind = options.word(name, "GptNeoxMLP", tuple(ACTIVATIONS))
    options.set_field("model.activation", ACTIVATIONS[kind], name)
    name = f"{SHAPE}.intermediate_size"
    wide = options.take(name, partial(read_whole, least=1))
    if wide is None and kind == "LLaMAMLP":
        raise TrainerFileError(f"{FIELD}: {name}: missing; LLaMAMLP needs it")
    width = cast("int", options.origins["model.hidden_size"].value)
    options.set_field("model.intermediate_size", wide or 4 * width, name)
    name = f"{SHAPE}.norm_class_name"
    norm = options.word(name, "LayerNorm", ("LayerNorm", "RMSNorm"))
    options.set_field("model.norm", "rms" if norm == "RMSNorm" else "layer", name)
    for key, (name, default) in FLAGS.items():
        value = options.flag(f"{SHAPE}.{name}", default=default)
        if key != "qkv_bias" or value:  # layers with `bias` have it anyway
            options.set_field(f"model.{key}", value, f"{SHAPE}.{name}")
    words = options.whole(f"{SHAPE}.vocab_size", 50254)
    multiple = options.whole(f"{SHAPE}.padding_multiple", 512)
    name = f"{SHAPE}.padded_vocab_size"
    padded = options.whole(name, -(-words // multiple) * multiple)
    options.set_field("model.vocab_size", padded, name)


def _lengths(options: SectionOptions, given: GivenTables, command: Command) -> tuple[str, ...]:
    """Set the tokens of a sequence; return the assumption about samples that are not packed."""
    name, block = "train.max_seq_length", f"{SHAPE}.block_size"
    longest = options.take(block, partial(read_whole, least=1))
    found = options.take(name, partial(read_whole, least=1))
    if command is Command.PRETRAIN:
        options.set_field("model.sequence_length", found or longest, name if found else block)
        has_length = found is not None or longest is not None
    else:
        options.set_field("model.sequence_length", found, name)
        has_length = found is not None
    if not has_length and given.value("model", "sequence_length") is None:
        why = "missing; give it, or model.sequence_length in the scenario"
        raise TrainerFileError(f"{FIELD}: {name}: {why}")
    every = f"{name} (every sample counts as that long)"
    return () if command is Command.PRETRAIN else (every,)


def _adapter(options: SectionOptions, given: GivenTables) -> tuple[str, ...]:
    """Set the adapters and the format of frozen weights."""
    options.set_field("model.lora.rank", options.whole("lora_r", 8), "lora_r")
    name = "lora_dropout"
    options.set_field("model.lora.dropout", options.number(name, 0.05) or None, name)
    targets = [
        part[0]
        for part, default in PROJECTIONS.items()
        if options.flag(f"lora_{part}", default=default)
    ]
    targets += ["proj"] if options.flag("lora_projection") else []
    if options.flag("lora_mlp"):
        targets += ["gate", "up", "down"] if _is_gated(options, given) else ["up", "down"]
    targets += ["head"] if options.flag("lora_head") else []
    if not targets:
        why = "leaves no layer with an adapter; set one of lora_query, lora_value, lora_mlp"
        raise options.wrong("lora_query", value=False, why=why)
    options.set_field("model.lora.targets", tuple(targets), "lora_query")
    name = "quantize"
    kind = options.word(name, "")
    if not kind:
        return ()
    if kind not in FORMATS:
        raise options.wrong(name, kind, f"is not modelled, only {' and '.join(FORMATS)}")
    options.set_field("model.lora.quantization", FORMATS[kind], name)
    # BitsandbytesPrecision of Lightning Fabric replaces all linear layers, the head included.
    # `_Linear4bit.quantize` quantizes them from fp16, so MatMul4Bit casts. LitGPT supports
    # bitsandbytes 0.42.0 alone, whose MatMul4Bit keeps its inputs.
    for each in ("quantizes_head", "casts_weights", "keeps_inputs"):
        options.set_field(f"model.lora.{each}", value=True, option=name)
    return ("bitsandbytes 0.42.0 (the only version that LitGPT supports)",)


def _is_gated(options: SectionOptions, given: GivenTables) -> bool:
    """Return True if the MLP of blocks has a gate."""

    def value(key: str) -> object:
        found = options.origins.get(f"model.{key}")
        return given.value("model", key) if found is None else found.value

    activation = value("activation")
    if activation is None:
        return value("architecture") == "llama"
    return activation in ("swiglu", "geglu")


def _runtime(options: SectionOptions, command: Command, machines: int, *, is_alone: bool) -> None:
    """Set the wrapper of the command, its axes and its checkpoints."""

    def say(field: str, value: object) -> None:
        options.set_field(field, value, "devices")

    kind = "ddp" if is_alone else "fsdp2" if command is Command.LORA else "fsdp1"
    say("zero.emulate", kind)
    say("zero.stage", 0 if is_alone else 3)
    say(f"zero.{kind}.repeat_kv", True)  # noqa: FBT003  (the value)
    if kind == "ddp":  # no wrapper: gradients have no buckets
        say("zero.ddp.gradient_as_bucket_view", True)  # noqa: FBT003  (the value)
        say("parallel.data", 1)
    elif kind == "fsdp2":  # parallelize_fn; no_backward_sync of ModelParallelStrategy
        say("zero.fsdp2.gradient_sync", "last")
    else:
        say("zero.fsdp1.no_sync", True)  # noqa: FBT003  (no_backward_sync of FSDPStrategy)
        if command is Command.PRETRAIN and machines > 1:  # HYBRID_SHARD
            say("parallel.replicate", machines)
    full = command is not Command.PRETRAIN and not is_alone
    say("activations.checkpointing", Checkpointing.FULL if full else Checkpointing.NONE)


def _precision(options: SectionOptions, command: Command, *, is_alone: bool) -> None:
    """Set the format of the model; by default that of `get_default_supported_precision`."""
    name = "precision"
    word = options.word(name, "bf16-mixed", (*PRECISIONS, "16-true"))
    if word not in PRECISIONS:
        raise options.wrong(name, word, f"is not modelled, only {', '.join(PRECISIONS)}")
    is_quantized = "model.lora.quantization" in options.origins
    if is_quantized and word != "bf16-true":
        raise options.wrong(name, word, "is not modelled with quantize, only bf16-true")
    if is_quantized and not is_alone:
        why = "is refused by LitGPT with more than one device"
        raise options.wrong("quantize", options.origins["model.lora.quantization"].value, why)
    if command is Command.LORA and not is_alone and word.endswith("mixed"):
        # `fully_shard` without a policy: parameters are gathered in fp32, autocast casts them
        why = "is not modelled for adapters on several devices, only bf16-true and 32-true"
        raise options.wrong(name, word, why)
    options.set_field("train.precision", PRECISIONS[word], name)


def _train(options: SectionOptions, command: Command, sections: Mapping[str, object]) -> None:
    """Set batches, the loss, clipping and the optimizer."""
    pretrains = command is Command.PRETRAIN
    sizes = {
        "micro_batch_size": 4 if pretrains else 1,
        "global_batch_size": 512 if pretrains else 16,
    }
    for key, default in sizes.items():
        options.set_field(f"train.{key}", options.whole(f"train.{key}", default), f"train.{key}")
    # With adapters, `lm_head_chunk_size=128`. The other commands also chunk the loss, but of whole
    # logits, which `convert_output` of Fabric's precision has cast to fp32.
    loss = Loss.CAST_CHUNKED if command is Command.LORA else Loss.TORCH
    options.set_field("train.loss", loss, "precision")
    options.set_field("train.holds_logits", value=True, option="precision")  # `logits` in `fit`
    if pretrains:
        options.set_field("train.compile", value=True, option="model_name")
    else:
        options.set_field("train.norms", Norms.COMPOSED, "checkpoint_dir")  # RMSNorm of LitGPT
    name = "train.max_norm"
    train = sections.get("train")
    said = train if isinstance(train, dict) else {}
    is_said = "max_norm" in said
    if pretrains and is_said and not options.left.get(name):
        why = "is refused by pretrain of LitGPT; give a number"
        raise options.wrong(name, said["max_norm"], why)
    norm = options.number(name, 0.0 if is_said or not pretrains else 1.0)
    if norm and not pretrains:
        raise options.wrong(name, norm, f"is refused by {command} of LitGPT")
    options.set_field("train.clip_norm", norm or None, name)
    _optimizer(options)


def _optimizer(options: SectionOptions) -> None:
    """Set the optimizer and its constants, from a name or from `class_path` and `init_args`."""
    name, arguments = "optimizer.class_path", "optimizer.init_args"
    word = options.word("optimizer", "") or options.word(name, "AdamW")
    if word not in OPTIMIZERS:
        raise options.wrong("optimizer", word, f"is not modelled, only {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[word]
    if "model.lora.quantization" in options.origins and kind != "adam":
        raise options.wrong("optimizer", word, "is refused by LitGPT with quantize")
    options.set_field("train.optimizer", kind, "optimizer")
    for key, field in (
        ("lr", "learning_rate"),
        ("weight_decay", "weight_decay"),
        ("eps", "epsilon"),
    ):
        if f"{arguments}.{key}" in options.left:
            value = options.number(f"{arguments}.{key}", 0.0)
            options.set_field(f"train.{field}", value, f"{arguments}.{key}")
    betas = options.take(f"{arguments}.betas", read_pair)
    for number, beta in enumerate(betas or (), 1):
        options.origins[f"train.beta{number}"] = FileOption(f"{arguments}.betas", beta)
    options.drop((f"{arguments}.fused", f"{arguments}.foreach"))
