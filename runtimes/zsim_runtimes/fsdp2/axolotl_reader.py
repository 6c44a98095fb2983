"""A scenario from the YAML file of an Axolotl run, which trains with Hugging Face's Trainer.

Keys, defaults and effects of options follow Axolotl 0.13 (`utils/schemas/`), of 2023 where
marked. `fsdp_config` is read as Accelerate reads it, a DeepSpeed file after this one. The model is
read by its name if it ships with zsim; the scenario gives the cluster.
"""

from functools import partial

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
from zsim_runtimes.fsdp2.accelerate_reader import full_names, set_ddp, set_fsdp

FIELD = "zero.axolotl_config"

WITHOUT_EFFECT = (
    *("datasets", "dataset_", "test_datasets", "pretraining_dataset", "output_dir", "hub_", "val_"),
    *("eval", "save", "wandb_", "mlflow_", "comet_", "swanlab_", "trackio_", "use_tensorboard"),
    *("lr_", "warmup_", "num_epochs", "max_steps", "logging_", "special_tokens", "tokens"),
    *("chat_template", "tokenizer_", "model_type", "base_model_config", "trust_remote_code"),
    *("is_llama_", "is_mistral_", "is_qwen_", "is_falcon_", "strict", "seed", "tf32", "debug"),
    *("resume_from_checkpoint", "auto_resume", "local_rank", "early_stopping_", "loss_watchdog_"),
    *("shuffle_merged", "skip_prepare", "remove_unused_columns", "push_dataset", "eot_tokens"),
    *("ddp_", "low_cpu_mem_usage", "train_on_inputs", "cosine_", "learning_rate_"),
    *("revision_of_model", "torchdistx_path", "hf_use_auth_token", "gradient_checkpointing_kwargs"),
    *("flash_attention", "sdp_attention", "attn_implementation", "attention", "streaming"),
    *("gpu_memory_limit", "load_best_model", "resize_token_embeddings", "fsdp_config.fsdp_limit_"),
    *("fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_sync_module_states"),
    *("fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_use_orig_params"),
    *("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_final_state_dict"),
)
"""Prefixes of options that change neither time nor memory of a step in zsim."""

PACKING = "sample_packing"
PADDING = "pad_to_sequence_len"

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adam"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}
STORED = frozenset({"eager", "xformers"})
"""Implementations of attention that are not modelled; all others store no scores."""


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration, and warnings about its options.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    options = SectionOptions(FIELD, yaml_sections(FIELD, text))
    for name in ("base_model", "micro_batch_size"):
        if name not in options.left:
            raise TrainerFileError(f"{FIELD}: {name}: missing; it is in every file of Axolotl")
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    full_names(options)
    _adapter(options, given)
    _parallel(options, given)
    _model(options, given)
    _train(options)
    assumed = _lengths(options, given)
    put_all(tables, options.origins.items(), source=FIELD)
    options.drop(WITHOUT_EFFECT)
    off: tuple[object, ...] = (False, "", [])
    left = {name: shown(value) for name, value in options.left.items() if value not in off}
    need_followed(FIELD, left.items())
    return ReadTables(tables=tables, origins=options.origins, assumed=assumed)


def _lengths(options: SectionOptions, given: GivenTables) -> tuple[str, ...]:
    """Check how samples fill sequences; return the assumption about samples that are not padded.

    Tokens of packed samples see on average half a sample, as with a window of that length.

    Raises:
        TrainerFileError: samples are packed and no window says how many tokens they see, or
            sequences have different lengths.
    """
    is_packed, is_padded = options.flag(PACKING), options.flag(PADDING)
    by_length = "group_by_length"
    if options.flag(by_length) and not is_packed and not is_padded:
        why = "sequences of different lengths are not modelled; remove it"
        raise options.wrong(by_length, value=True, why=why)
    options.drop((f"{PACKING}_", "multipack_real_batches"))
    if not is_packed:
        every = f"{PADDING}: true (every sequence counts as sequence_len tokens)"
        return () if is_padded else (every,)
    if given.value("model", "window") is None:
        why = (
            "needs model.window in the scenario: half the mean tokens of a sample, or sequence_len "
            "to count attention between samples, too"
        )
        raise options.wrong(PACKING, value=True, why=why)
    options.origins.pop("model.window", None)
    return ()


def _adapter(options: SectionOptions, given: GivenTables) -> None:
    """Set the adapter and the format of frozen weights; drop its options if there is none."""
    if options.flag("load_in_8bit"):
        why = "is not modelled: weights are in 4 bits (adapter: qlora) or in 16"
        raise options.wrong("load_in_8bit", value=True, why=why)
    narrow = options.flag("load_in_4bit")
    kind = options.left.pop("adapter", None)
    if kind in (None, "", False):
        if narrow:
            raise options.wrong("load_in_4bit", value=True, why="needs adapter: qlora")
        options.drop(("lora_", "peft_", "peft."))
        return
    if kind not in ("lora", "qlora"):
        raise options.wrong("adapter", kind, "is not modelled, only lora and qlora")
    options.set_field("model.lora.rank", options.take("lora_r", read_whole), "lora_r")
    _targets(options, given)
    name = "lora_dropout"
    options.set_field("model.lora.dropout", options.number(name, 0.0) or None, name)
    if narrow or kind == "qlora":  # load_model: nf4 with bnb_4bit_use_double_quant
        options.set_field("model.lora.quantization", "nf4_double", "adapter")
    options.drop(("lora_alpha", "lora_model_dir", "lora_fan_in"))


TARGETS = {
    **{f"{each}_proj": each for each in ("q", "k", "v", "gate", "up", "down")},
    "o_proj": "proj",
}
"""Linear layers of a block in zsim, by their names in Llama's module."""


def _targets(options: SectionOptions, given: GivenTables) -> None:
    """Set the layers with adapters, unless the scenario gives them."""
    every = options.flag("lora_target_linear")
    named = options.words("lora_target_modules", ())
    if given.value("model", "lora") is not None:
        return
    name = "lora_target_modules"
    if unknown := [each for each in named if each not in TARGETS]:
        raise options.wrong(name, unknown[0], f"is not read, only {', '.join(TARGETS)}")
    found = dict.fromkeys(TARGETS.values() if every else (TARGETS[each] for each in named))
    if not found:
        why = "needs lora_target_linear, lora_target_modules or model.lora in the scenario"
        raise options.wrong("adapter", "lora", why)
    option = "lora_target_linear" if every else name
    options.set_field("model.lora.targets", tuple(found), option)


def _parallel(options: SectionOptions, given: GivenTables) -> None:
    """Set FSDP with its axes, or the DeepSpeed file; a run without either is DDP."""
    path = options.word("deepspeed", "")
    listed = options.words("fsdp", ())
    has_fsdp = bool(listed) or any(name.startswith("fsdp_config.") for name in options.left)
    for name, key in (
        ("dp_replicate_size", "replicate"),
        ("tensor_parallel_size", "tensor"),
        ("context_parallel_size", "context"),
    ):
        degree = options.whole(name, 1)
        if degree != 1 and path:
            raise options.wrong(name, degree, "is not modelled with deepspeed, only 1")
        if not path and (degree != 1 or key != "replicate"):
            options.set_field(f"parallel.{key}", degree, name)
    shards = options.take("dp_shard_size", partial(read_whole, least=1))
    if shards is not None and not path:
        context = options.origins["parallel.context"].value
        options.set_field(
            "parallel.data", shards * (context if isinstance(context, int) else 1), "dp_shard_size"
        )
    if path:
        options.set_field("zero.deepspeed_config", path, "deepspeed")
        options.drop(("fsdp_config.", "fsdp_version"))
        return
    if not has_fsdp:
        _ddp(options)
        return
    version = options.take("fsdp_version", partial(read_whole, least=1))
    if version is not None:
        options.left.setdefault("fsdp_config.fsdp_version", version)
    if "auto_wrap" in listed:
        options.left.setdefault("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    set_fsdp(options, given.value("parallel", "replicate", 1))
    _checkpoints_of_fsdp(options)


def _ddp(options: SectionOptions) -> None:
    """Set DDP as the Trainer of transformers wraps a model (`_wrap_model`, 5.23)."""
    set_ddp(options, "ddp")
    looks = options.left.pop("ddp_find_unused_parameters", None)
    if looks is None:  # adapters have no unused parameters, checkpoints do not allow to look
        has_adapter = "model.lora.rank" in options.origins
        looks = not has_adapter and options.left.get("gradient_checkpointing") is not True
    name = "ddp_find_unused_parameters"
    options.set_field("zero.ddp.find_unused_parameters", looks is True, name)
    name = "ddp_bucket_cap_mb"
    options.set_field("zero.ddp.bucket_cap_mb", options.number(name, 0.0) or None, name)


def _checkpoints_of_fsdp(options: SectionOptions) -> None:
    """Let the Trainer's recomputation decide where FSDP's is off."""
    said = options.origins["activations.checkpointing"]
    if said.value is Checkpointing.NONE:
        del options.origins["activations.checkpointing"]


def _model(options: SectionOptions, given: GivenTables) -> None:
    """Set the shape by the name of the model, and the length."""
    name = "sequence_len"
    options.set_field("model.sequence_length", options.whole(name, 2048), name)
    for each in ("attn_implementation", "attention"):
        if options.left.get(each) in STORED:
            raise options.wrong(each, options.left[each], "is not modelled")
    options.set_field("model.attention", "flash2", "attn_implementation")
    key = "base_model"
    options.set_shape(key, given)


def _train(options: SectionOptions) -> None:
    """Set batches, the format, recomputation and the optimizer."""
    for key, name in (
        ("micro_batch_size", "micro_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        options.set_field(f"train.{key}", options.whole(name, 1), name)
    _precision(options)
    name = "gradient_checkpointing"
    kind = options.left.pop(name, None)
    if kind not in (None, "", False, True):
        raise options.wrong(name, kind, "is not modelled, only true and false")
    if kind is True or "activations.checkpointing" not in options.origins:
        full = Checkpointing.FULL if kind is True else Checkpointing.NONE
        options.set_field("activations.checkpointing", full, name)
    name = "optimizer"
    word = options.word(name, "adamw_torch_fused", ())
    if word not in OPTIMIZERS:
        raise options.wrong(name, word, f"is not modelled, only {', '.join(OPTIMIZERS)}")
    options.set_field("train.optimizer", OPTIMIZERS[word], name)
    constants = {"learning_rate": "learning_rate", "weight_decay": "weight_decay"}
    if word != "sgd":
        constants |= {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "epsilon"}
    for name, key in constants.items():
        if name in options.left:
            options.set_field(f"train.{key}", options.number(name, 0.0), name)
    name = "max_grad_norm"
    norm = options.take(name, read_clip) if name in options.left else 1.0  # TrainingArguments
    options.set_field("train.clip_norm", norm, name)
    name = "torch_compile"
    options.set_field("train.compile", options.flag(name) or None, name)


def _precision(options: SectionOptions) -> None:
    """Set the format; `auto` is bf16 on GPUs that have it."""
    bf16 = options.left.pop("bf16", "auto")
    fp16 = options.left.pop("fp16", None)
    if fp16 is True:
        options.set_field("train.precision", "fp16", "fp16")
    elif bf16 in ("auto", True):
        # the base model is loaded in bf16; FSDP and DeepSpeed keep fp32 masters, DDP does not
        runtime = options.origins.get("zero.emulate")
        is_ddp = runtime is not None and runtime.value == "ddp"
        narrow = is_ddp and "model.lora.rank" not in options.origins
        options.set_field("train.precision", "pure_bf16" if narrow else "bf16", "bf16")
    elif bf16 in (None, "", False):
        options.set_field("train.precision", "fp32", "bf16")
    else:
        raise options.wrong("bf16", bf16, "is not modelled, only auto, true and false")
