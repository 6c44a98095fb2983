"""A scenario from the YAML file of NeMo 1 (`megatron_gpt_config.yaml` and similar ones).

NeMo trains with Megatron Core: each key is converted to the equivalent argument of Megatron-LM
(`zsim_runtimes.megatron.arguments_reader`), with the defaults of NeMo 2.5's
`nlp/models/language_modeling/megatron_gpt_model.py` and `megatron_base_model.py`. References such
as `${model.encoder_seq_length}` are resolved. Recipes of NeMo 2 are Python code, and not read.
"""

from collections.abc import Mapping
from functools import partial

from zsim.model.transformer.overlapped_layers import SPLITS
from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim.runtimes.trainer_files.option_values import read_flag, read_pair, read_whole
from zsim.runtimes.trainer_files.python_text import is_python
from zsim.runtimes.trainer_files.section_options import SectionOptions
from zsim.runtimes.trainer_files.tables import GivenTables, ReadTables, TrainerFileError
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.runtimes.trainer_files.yaml_text import yaml_sections
from zsim.schedule.json import shown
from zsim.strategy.overlap_methods import DEFAULT_METHODS, ByKernel, OverlapMethods
from zsim_runtimes.megatron.arguments_reader import with_arguments

FIELD = "zero.nemo_config"

VALUES: Mapping[str, str] = {
    "model.num_layers": "num-layers",
    "model.hidden_size": "hidden-size",
    "model.num_attention_heads": "num-attention-heads",
    "model.encoder_seq_length": "seq-length",
    "model.kv_channels": "kv-channels",
    "model.ffn_hidden_size": "ffn-hidden-size",
    "model.max_position_embeddings": "max-position-embeddings",
    "model.position_embedding_type": "position-embedding-type",
    "model.hidden_dropout": "hidden-dropout",
    "model.attention_dropout": "attention-dropout",
    "model.make_vocab_size_divisible_by": "make-vocab-size-divisible-by",
    "model.override_vocab_size": "vocab-size",
    "model.micro_batch_size": "micro-batch-size",
    "model.global_batch_size": "global-batch-size",
    "model.tensor_model_parallel_size": "tensor-model-parallel-size",
    "model.pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.context_parallel_size": "context-parallel-size",
    "model.activations_checkpoint_granularity": "recompute-granularity",
    "model.activations_checkpoint_method": "recompute-method",
    "model.activations_checkpoint_num_layers": "recompute-num-layers",
    "model.native_amp_init_scale": "initial-loss-scale",
    "model.native_amp_growth_interval": "loss-scale-window",
    "model.hysteresis": "hysteresis",
    "model.optim.lr": "lr",
    "model.optim.weight_decay": "weight-decay",
    "model.optim.eps": "adam-eps",
    "model.optim.ddp_bucket_size": "ddp-bucket-size",
    "trainer.gradient_clip_val": "clip-grad",
}
"""Keys whose value becomes that of an argument of Megatron-LM."""

FLAGS: Mapping[str, tuple[str, bool]] = {
    "model.qkv_bias": ("add-qkv-bias", False),
    "model.sequence_parallel": ("sequence-parallel", False),
    "model.ub_tp_comm_overlap": ("tp-comm-overlap", False),
    "model.multi_latent_attention": ("multi-latent-attention", False),
    "model.optim.overlap_grad_sync": ("overlap-grad-reduce", False),
    "model.optim.overlap_param_sync": ("overlap-param-gather", False),
    "model.optim.average_in_collective": ("ddp-average-in-collective", True),
}
"""Keys that, if true, become a flag of Megatron-LM, each with its default."""

NOT_FLAGS: Mapping[str, str] = {
    "model.bias": "disable-bias-linear",
    "model.share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
}
"""Keys that, if false, become a flag; they are true by default."""

OFF = {
    "model.overlap_p2p_comm": "no-overlap-p2p-communication",
    "model.gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
}
"""Keys that, if false, become a flag; unlike in Megatron-LM, they are false by default."""

METHODS = "model.ub_tp_comm_overlap_cfg"
"""Overlap methods of products and collectives in userbuffers (`ub_cfgs`, Transformer Engine)."""

WITHOUT_EFFECT = (
    *("defaults", "name", "run.", "exp_manager.", "s3_checkpointing.", "hydra.", "trainer."),
    *("model.data.", "model.tokenizer.", "model.nsys_profile.", "model.megatron_timer"),
    *("model.optim.sched.", "model.optim.contiguous_", "model.optim.bucket_cap_mb", "model.reset_"),
    *("model.init_method_std", "model.use_scaled_init_method", "model.layernorm_", "model.seed"),
    *("model.rotary_", "model.seq_len_interpolation", "model.normalize_attention_scores"),
    *("model.dist_ckpt_", "model.resume_from", "model.restore_from", "model.apex_"),
    *("model.mcore_gpt", "model.megatron_amp_O2", "model.persist_layer_norm", "model.fp8_"),
    *("model.grad_", "model.gradient_", "model.bias_", "model.masked_softmax", "model.headscale"),
    *("model.get_attention_mask", "model.apply_", "model.sync_batch_comm", "model.gc_interval"),
    *("model.batch_p2p", "model.reduce_amax", "model.barrier_with", "model.onnx_safe"),
    *("model.pre_process", "model.post_process", "model.do_layer_norm_weight_decay"),
    *("model.attention_type", "model.ffn_dropout", "model.cpu_offloading_", "model.skip_"),
    *("model.fsdp_", "model.nccl_", "model.drop_layers"),
    *("model.num_micro_batches_with", "model.activations_checkpoint_layers_per", "model.fp32_"),
    *("model.validation_", "model.enable_megatron_timers"),
)
"""Prefixes of keys that change neither time nor memory of a step in zsim."""

RECIPE = "which is not read; write the arguments of Megatron-LM as zero.megatron_arguments"
OFF_VALUES: tuple[object, ...] = (False, [], "")
OPTIMIZER = "mcore_distributed_optim"


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration, and warnings about its keys.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    if is_python(text):
        raise TrainerFileError(f"{FIELD}: is Python, a recipe of NeMo 2, {RECIPE}")
    options = SectionOptions(FIELD, yaml_sections(FIELD, text))
    built = [name for name in options.left if name.endswith(("_target_", "_factory_"))]
    if built:
        raise TrainerFileError(f"{FIELD}: {built[0]}: is of a recipe of NeMo 2, {RECIPE}")
    if "model.num_layers" not in options.left:
        why = "model.num_layers: missing; only GPT configurations of NeMo 1 are read, not recipes"
        raise TrainerFileError(f"{FIELD}: {why}")
    options.follow_references()
    _need_dense(options)
    ranks = _world(options)
    taken = _Taken(options)
    _precision(taken)
    _formats(taken)
    _shape(taken)
    _optimizer(taken)
    taken.values()
    arguments = Arguments(taken.given, field=FIELD, names=taken.names)
    _overlap_methods(options, arguments)
    found = with_arguments(given, arguments, ranks=ranks)
    options.drop(WITHOUT_EFFECT)
    rest = {name: shown(value) for name, value in options.left.items() if value not in OFF_VALUES}
    need_followed(FIELD, rest.items())
    return found


def _need_dense(options: SectionOptions) -> None:
    """Raise TrainerFileError if the model has experts: NeMo has other options of routers."""
    for name, dense in (("num_moe_experts", None), ("expert_model_parallel_size", 1)):
        key = f"model.{name}"
        value = options.left.pop(key, None)
        if value not in (None, dense):
            why = "experts are not read; write the arguments of Megatron-LM"
            raise options.wrong(key, value, f"{why} as zero.megatron_arguments")


class _Taken:
    """Arguments of Megatron-LM converted from keys, and the names of these keys."""

    def __init__(self, options: SectionOptions) -> None:
        self.options = options
        self.given: dict[str, list[str]] = {"use-distributed-optimizer": []}
        self.names: dict[str, str] = {}

    def put(self, argument: str, key: str, *values: str) -> None:
        """Set an argument that is given by a key."""
        self.given[argument] = list(values)
        self.names[argument] = key

    def values(self) -> None:
        """Convert all keys that map directly to arguments."""
        left = self.options.left
        for key, argument in VALUES.items():
            self.names.setdefault(argument, key)
            if key in left:
                self.put(argument, key, _plain(left.pop(key)))
        for key, (argument, default) in FLAGS.items():
            self.names[argument] = key
            if self.options.flag(key, default=default):
                self.put(argument, key)
        for key, argument in NOT_FLAGS.items():
            self.names[argument] = key
            if not self.options.flag(key, default=True):
                self.put(argument, key)
        for key, argument in OFF.items():
            if not self.options.flag(key):
                self.put(argument, key)


def _overlap_methods(options: SectionOptions, arguments: Arguments) -> None:
    """Set the overlap method of each product; drop options that do not affect it."""
    overlaps = "tp-comm-overlap" in arguments.given
    for name in OverlapMethods.model_fields:
        kind, prefix = type(getattr(DEFAULT_METHODS, name)), f"{METHODS}.{name}."
        by_kernel = ("pipeline",) if name.endswith("_fprop") else ("bulk",)
        usual = by_kernel if kind is ByKernel else ("ring_exchange",)
        options.word(f"{prefix}method", usual[0], usual)
        for key in kind.model_fields:
            take = partial(read_whole, least=1) if key == "num_sm" else _read_switch
            value = options.take(f"{prefix}{key}", take)
            if overlaps:
                option = f"zero.megatron.tp_comm_overlap_cfg.{name}.{key}"
                arguments.set_field(option, value, f"{prefix}{key}")
        left = ("cga_size", "fp8_buf", *(() if kind is ByKernel else ("num_sm", "set_sm_margin")))
        options.drop(tuple(f"{prefix}{each}" for each in left))
        if options.left.get(f"{prefix}num_splits") == SPLITS:
            options.drop((f"{prefix}num_splits",))


def _read_switch(value: object) -> bool:
    """Return a flag, which Transformer Engine also accepts as 0 or 1."""
    return bool(value) if value in {0, 1} else read_flag(value)


def _plain(value: object) -> str:
    """Return a value as on a command line: whole numbers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _world(options: SectionOptions) -> int | None:
    """Take the number of GPUs; None if it is not given by numbers."""
    whole = partial(read_whole, least=1)
    sizes = [
        options.take(f"trainer.{name}", whole)
        for name in ("devices", "num_nodes")
        if isinstance(options.left.get(f"trainer.{name}"), int)
    ]
    known = [each for each in sizes if each is not None]
    return known[0] * known[1] if len(known) == 2 else None


def _precision(taken: _Taken) -> None:
    """Take the format, for which Lightning has several names."""
    key = "trainer.precision"
    found = str(taken.options.left.pop(key, "32"))
    formats = {"bf16": "bf16", "16": "fp16", "32": ""}
    plain = found.removesuffix("-mixed").removesuffix("-true")
    if plain not in formats:
        raise taken.options.wrong(key, found, "must be bf16, 16 or 32")
    for name in ("bf16", "fp16"):
        taken.names[name] = key
    if formats[plain]:
        taken.put(formats[plain], key)
    # Without a limit, NeMo does not clip, and Megatron-LM clips at 1.
    taken.options.left.setdefault("trainer.gradient_clip_val", 0)


def _formats(taken: _Taken) -> None:
    """Take the format of 8-bit GEMMs, whose scaling is delayed in NeMo 1."""
    options, key = taken.options, "model.fp8"
    kinds = {"model.fp8_e4m3": "e4m3", "model.fp8_hybrid": "hybrid"}
    asked = [kind for name, kind in kinds.items() if options.flag(name)]
    taken.names |= {"fp8-format": key, "fp8-param-gather": "model.fp8_params"}
    if not options.flag(key):
        return
    if len(asked) != 1:
        why = f"needs one of {' and '.join(kinds)}"
        raise options.wrong(key, value=True, why=why)
    taken.put("fp8-format", key, asked[0])
    if options.flag("model.fp8_params"):
        taken.put("fp8-param-gather", "model.fp8_params")


def _shape(taken: _Taken) -> None:
    """Take the keys of a model that have other values in NeMo."""
    options = taken.options
    norms = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
    key = "model.normalization"
    norm = norms[options.word(key, "layernorm", tuple(norms))]
    taken.put("normalization", key, norm)
    key = "model.activation"
    activation = options.word(key, "gelu", ("gelu", "swiglu", "fast-swiglu"))
    taken.names["swiglu"] = key
    if activation != "gelu":
        taken.put("swiglu", key)
    key = "model.num_query_groups"
    groups = options.take(key, partial(read_whole, least=1))
    if groups is not None:
        taken.put("group-query-attention", key)
        taken.put("num-query-groups", key, str(groups))
    kind = "model.transformer_block_type"
    options.word(kind, "pre_ln", ("pre_ln",))
    flash = options.flag("model.use_flash_attention")
    engine = options.flag("model.transformer_engine")
    if not flash and not engine:
        taken.put("attention-backend", "model.use_flash_attention", "unfused")
    if options.flag("model.fsdp"):
        raise options.wrong("model.fsdp", value=True, why="is not modelled in NeMo")


def _optimizer(taken: _Taken) -> None:
    """Take the optimizer, which must be Megatron Core's."""
    options = taken.options
    key = "model.optim.name"
    name = options.word(key, "missing")
    if name != OPTIMIZER:
        raise options.wrong(key, name, f"is not modelled, only {OPTIMIZER}")
    taken.names["optimizer"] = key
    betas = options.take("model.optim.betas", read_pair)
    if betas is not None:
        for number, beta in enumerate(betas, 1):
            taken.put(f"adam-beta{number}", "model.optim.betas", str(beta))
    kind = "model.optim.grad_sync_dtype"
    wide = options.word(kind, "fp32", ("fp32", "bf16", "fp16")) == "fp32"
    if wide:
        taken.put("accumulate-allreduce-grads-in-fp32", kind)
    elif "bf16" in taken.given:
        taken.put("grad-reduce-in-bf16", kind)
