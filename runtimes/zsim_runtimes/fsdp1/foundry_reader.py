"""A scenario from the YAML file of a run of MosaicML's LLM Foundry, which trains with Composer.

Sections, defaults and effects of options follow LLM Foundry 0.22 (`models/mpt`) and Composer
0.32 (`FSDPConfig`), from memory, where older names are marked. References such as
`${variables.max_seq_len}` are resolved. MPT is read from its shape, a model of Hugging Face by its
name if it ships; the scenario gives the cluster, and the micro-batch if that is "auto".
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

from zsim.runtimes.trainer_files.option_values import read_pair, read_whole
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
from zsim_runtimes.fsdp1.options import BackwardPrefetch, ShardingStrategy

FIELD = "zero.foundry_config"
FSDP, ATTENTION, FFN = "fsdp_config", "model.attn_config", "model.ffn_config"
AUTO = "auto"

WITHOUT_EFFECT = (
    *("variables.", "data_", "dataset.", "run_name", "tokenizer.", "tokenizer_name", "train_"),
    *("eval_", "scheduler.", "max_duration", "seed", "global_seed", "device_eval_", "icl_"),
    *("progress_bar", "log_", "console_log_", "callbacks.", "loggers.", "save_", "load_"),
    *("autoresume", "dist_timeout", "expandable_segments", "max_split_size_mb", "python_log_level"),
    *("metadata.", "wandb_", "use_async_eval", "local_cache_", "integrations", "command", "image"),
    *("name", "compute.", "cluster", "gpu_", "scheduling.", "models", "model.init_"),
    *("model.pretrained", "model.use_auth_token", "model.trust_remote_code", "model.verbose"),
    *("model.embedding_fraction", "model.logit_scale", "model.use_cache", "model.use_pad_tok"),
    *("model.config_overrides.max_", "model.config_overrides.n_positions", f"{ATTENTION}.rope_"),
    *("model.config_overrides.attn_config.attn_impl", f"{ATTENTION}.alibi_bias_max"),
    *(f"{ATTENTION}.softmax_scale", f"{FSDP}.state_dict_type", f"{FSDP}.sync_module_states"),
    *(f"{FSDP}.verbose", f"{FSDP}.use_orig_params", f"{FSDP}.flatten_parameters"),
    *(f"{FSDP}.load_", f"{FSDP}.sharded_ckpt_", f"{FSDP}.activation_checkpointing_reentrant"),
)
"""Prefixes of options that change neither time nor memory of a step in zsim."""

SHAPE: Mapping[str, tuple[str, int]] = {
    "layers": ("n_layers", 24),
    "hidden_size": ("d_model", 2048),
    "attention_heads": ("n_heads", 16),
    "vocab_size": ("vocab_size", 50368),
}
"""Keys of `[model]`, each with the option and the default of `MPTConfig`."""

IMPLEMENTATIONS = {"flash": "flash2", "triton": "flash", "torch": "plain"}
NORMS = {
    "low_precision_layernorm": "layer",
    "layernorm": "layer",
    "low_precision_rmsnorm": "rms",
    "rmsnorm": "rms",
}
FORMATS = {
    "amp_bf16": Precision.BF16,
    "amp_fp16": Precision.FP16,
    "fp32": Precision.FP32,
}
OFF: tuple[object, ...] = (False, "", [], 0, 0.0)


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    sections = yaml_sections(FIELD, text)
    inner = sections.get("parameters")
    ranks = None
    if isinstance(inner, dict) and "model" not in sections:  # a file of `mcli run`
        outer = SectionOptions(FIELD, sections)
        ranks = outer.take("compute.gpus", partial(read_whole, least=1))
        sections = {str(name): value for name, value in cast("dict[object, object]", inner).items()}
    options = SectionOptions(FIELD, sections)
    options.follow_references()
    if "model.name" not in options.left:
        raise TrainerFileError(f"{FIELD}: model.name: missing; it is in every file of LLM Foundry")
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    _model(options, given)
    _fsdp(options)
    _train(options, given)
    put_all(tables, options.origins.items(), source=FIELD)
    options.drop(WITHOUT_EFFECT)
    left = {name: shown(value) for name, value in options.left.items() if value not in OFF}
    need_followed(FIELD, left.items())
    return ReadTables(tables=tables, origins=options.origins, ranks=ranks)


def _model(options: SectionOptions, given: GivenTables) -> None:
    """Set the shape of MPT, or of a model of Hugging Face by its name."""
    name = options.word("model.name", "")
    length = "max_seq_len"
    found = options.take(length, partial(read_whole, least=1))
    inner = options.take("model.max_seq_len", partial(read_whole, least=1))
    options.set_field("model.sequence_length", found or inner or 2048, length)
    if name == "mpt_causal_lm":
        _mpt(options)
        return
    if name != "hf_causal_lm":
        why = "is not modelled, only mpt_causal_lm and hf_causal_lm"
        raise options.wrong("model.name", name, why)
    options.flag("model.use_flash_attention_2")
    options.set_field("model.attention", "flash2", "model.use_flash_attention_2")  # SDPA by default
    key = "model.pretrained_model_name_or_path"
    options.set_shape(key, given)


def _mpt(options: SectionOptions) -> None:
    """Set the shape of MPT, with the defaults of `MPTConfig`."""
    options.set_field("model.architecture", "gpt", "model.name")
    for key, (name, default) in SHAPE.items():
        options.set_field(f"model.{key}", options.whole(f"model.{name}", default), f"model.{name}")
    hidden = cast("int", options.origins["model.hidden_size"].value)
    name = "model.expansion_ratio"
    width = options.number(name, 4) * hidden
    if width != int(width) or width < 1:
        raise options.wrong(name, width / hidden, f"must make a whole number of {hidden}")
    options.set_field("model.intermediate_size", int(width), name)
    name = "model.no_bias"
    options.set_field("model.bias", not options.flag(name), name)
    name = "model.tie_word_embeddings"
    options.set_field("model.tied_embeddings", options.flag(name, default=True), name)
    name = "model.norm_type"
    options.set_field("model.norm", NORMS[options.word(name, "layernorm", tuple(NORMS))], name)
    name = f"{FFN}.ffn_type"
    kind = options.word(name, "mptmlp", ("mptmlp", "mptglu"))
    options.set_field("model.activation", "geglu" if kind == "mptglu" else "gelu", name)
    name = "model.loss_fn"
    loss = options.word(name, "fused_crossentropy", ("fused_crossentropy", "torch_crossentropy"))
    options.set_field("train.loss", "fused" if loss.startswith("fused") else "torch", name)
    rates = ("model.resid_pdrop", "model.emb_pdrop", f"{ATTENTION}.attn_pdrop")
    shares = [options.number(each, 0.0) for each in rates]
    if len({*shares}) > 1:
        raise options.wrong(rates[0], shares[0], f"must be that of {rates[1]} and {rates[2]}")
    options.set_field("model.dropout", shares[0] or None, rates[0])
    _attention(options)


def _attention(options: SectionOptions) -> None:
    """Set the attention of MPT, its heads and its positions."""
    name = f"{ATTENTION}.attn_impl"
    kind = options.word(name, "flash", tuple(IMPLEMENTATIONS))
    options.set_field("model.attention", IMPLEMENTATIONS[kind], name)
    name = f"{ATTENTION}.attn_type"
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    kind = options.word(name, kinds[0], kinds)
    groups = options.take(f"{ATTENTION}.kv_n_heads", partial(read_whole, least=1))
    if kind != kinds[0]:
        options.set_field("model.key_value_heads", 1 if kind == kinds[1] else groups, name)
    alibi, rope = (options.flag(f"{ATTENTION}.{each}") for each in ("alibi", "rope"))
    name = "model.learned_pos_emb"
    learned = options.flag(name, default=True)
    if not (alibi or rope or learned):
        raise options.wrong(name, value=False, why="without alibi or rope is not modelled")
    positions = "alibi" if alibi else "rotary" if rope else "learned"
    options.set_field("model.positions", positions, name)
    name = f"{ATTENTION}.sliding_window_size"
    window = options.whole(name, -1, least=-1)
    if window > 0:
        options.set_field("model.window", window, name)
    for flag, norm in (("qk_ln", "width"), ("qk_gn", "head")):
        if options.flag(f"{ATTENTION}.{flag}"):
            options.set_field("model.qk_norm", norm, f"{ATTENTION}.{flag}")


def _fsdp(options: SectionOptions) -> None:
    """Set FSDP1 as Composer wraps a model: each block, without `no_sync`; else DDP."""
    if not any(name.startswith(f"{FSDP}.") for name in options.left):
        options.set_field("zero.emulate", "ddp", FSDP)
        options.set_field("zero.stage", 0, FSDP)
        # single_auto_sync of ddp_sync_context (composer/distributed/dist_strategy.py)
        options.set_field("zero.ddp.no_sync", value=True, option=FSDP)
        return
    options.set_field("zero.emulate", "fsdp1", FSDP)
    options.set_field("zero.stage", 3, FSDP)
    name = f"{FSDP}.sharding_strategy"
    words = tuple(each.upper() for each in ShardingStrategy)
    found = options.word(name, words[0], words)
    options.set_field("zero.fsdp1.sharding_strategy", found.lower(), name)
    name = f"{FSDP}.backward_prefetch"
    words = tuple(each.upper() for each in BackwardPrefetch)
    ahead = options.word(name, "BACKWARD_POST", words)
    options.set_field("zero.fsdp1.backward_prefetch", ahead.lower(), name)
    for flag, default in (("forward_prefetch", False), ("limit_all_gathers", True)):
        name = f"{FSDP}.{flag}"
        options.set_field(f"zero.fsdp1.{flag}", options.flag(name, default=default), name)
    options.set_field("zero.fsdp1.no_sync", value=False, option=FSDP)
    name = f"{FSDP}.activation_checkpointing"
    full = options.flag(name)
    kind = Checkpointing.FULL if full else Checkpointing.NONE
    options.set_field("activations.checkpointing", kind, name)
    name = f"{FSDP}.activation_cpu_offload"
    if options.flag(name):
        if not full:
            raise options.wrong(name, value=True, why="needs activation_checkpointing")
        options.set_field("zero.fsdp1.offload_wrapper", value=True, option=name)


def _train(options: SectionOptions, given: GivenTables) -> None:
    """Set the format, batches and the optimizer."""
    name = "precision"
    precision = FORMATS[options.word(name, "amp_bf16", tuple(FORMATS))]
    options.set_field("train.precision", precision, name)
    name = f"{FSDP}.mixed_precision"
    mixed = options.word(name, "DEFAULT", ("PURE", "DEFAULT", "FULL"))
    shards = options.origins["zero.emulate"].value == "fsdp1"
    if shards and precision is not Precision.FP32 and mixed != "PURE":
        why = "gathers parameters in fp32, which is not modelled, only PURE"
        raise options.wrong(name, mixed, why)
    name = "global_train_batch_size"
    options.set_field("train.global_batch_size", options.take(name, read_whole), name)
    name = "device_train_microbatch_size"
    if options.left.get(name) == AUTO:
        del options.left[name]
        if given.value("train", "micro_batch_size") is None:
            why = "is found by running out of memory; give train.micro_batch_size"
            raise options.wrong(name, AUTO, why)
    options.set_field("train.micro_batch_size", options.take(name, read_whole), name)
    name = "device_train_grad_accum"  # before Composer 0.12
    options.set_field("train.gradient_accumulation_steps", options.take(name, read_whole), name)
    clip = "algorithms.gradient_clipping"
    options.word(f"{clip}.clipping_type", "norm", ("norm",))
    name = f"{clip}.clipping_threshold"
    options.set_field("train.clip_norm", options.number(name, 0.0) or None, name)
    _optimizer(options)


def _optimizer(options: SectionOptions) -> None:
    name = "optimizer.name"
    options.word(name, "decoupled_adamw", ("decoupled_adamw", "adamw"))
    options.set_field("train.optimizer", "adam", name)
    for key, field in (
        ("lr", "learning_rate"),
        ("eps", "epsilon"),
        ("weight_decay", "weight_decay"),
    ):
        if f"optimizer.{key}" in options.left:
            value = options.number(f"optimizer.{key}", 0.0)
            options.set_field(f"train.{field}", value, f"optimizer.{key}")
    betas = options.take("optimizer.betas", read_pair)
    for number, beta in enumerate(betas or (), 1):
        options.set_field(f"train.beta{number}", beta, "optimizer.betas")
