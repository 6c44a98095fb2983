"""A scenario from the TOML file of a torchtitan run.

Sections, defaults and effects of options are those of `torchtitan/config/job_config.py` and
`models/llama3/infra/parallelize.py` of torchtitan 0.2.2 (February 2026), the last version that
reads TOML; names of 0.1.0 are also read. With a pipeline, the batch of a step is split into
micro-batches, as in `distributed/pipeline_parallel.py`. The options set `[model]`, `[parallel]`,
`[zero]`, `[activations]` and `[train]`; the scenario gives the cluster and its allocator. Options
that change a step and are not modelled are refused.
"""

from collections.abc import Callable, Mapping, Sequence

from zsim.bounded_text import bounded_toml
from zsim.runtimes.trainer_files.python_text import is_python
from zsim.runtimes.trainer_files.section_options import SectionOptions
from zsim.runtimes.trainer_files.tables import (
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.schedule.json import shown
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8, Loss
from zsim.strategy.precision import Precision
from zsim_runtimes.fsdp2.options import PipelineSchedule

FIELD = "zero.torchtitan_config"

FLAVORS: Mapping[str, Mapping[str, str]] = {
    "llama3": {"8B": "llama3.1-8b", "70B": "llama3.1-70b", "405B": "llama3.1-405b"},
    "qwen3": {
        "0.6B": "qwen3-0.6b",
        "1.7B": "qwen3-1.7b",
        "4B": "qwen3-4b",
        "8B": "qwen3-8b",
        "14B": "qwen3-14b",
        "32B": "qwen3-32b",
        "30B-A3B": "qwen3-30b-a3b",
        "235B-A22B": "qwen3-235b-a22b",
    },
    "deepseek_v3": {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"},
}
"""Models that ship with zsim, by name and flavor (`models/*/__init__.py`)."""

DEBUG: Mapping[str, object] = {
    "architecture": "llama",
    "layers": 6,
    "hidden_size": 256,
    "attention_heads": 16,
    "intermediate_size": 768,
    "vocab_size": 2048,
}
"""Shape of `debugmodel` of llama3, the default flavor."""

IN_FLOAT8 = ("float8", "quantize.linear.float8")
IN_MX = ("mx", "quantize.linear.mx")
"""Names of the converters of linear layers, of 0.1.0 and later."""

OLD_NAMES = {
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp": (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "mx.recipe_name": "quantize.linear.mx.recipe_name",
    "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
    "mx.mxfp8_dim1_cast_kernel_choice": "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
}
"""Options of 0.1.0, with their current names."""

TOO_OLD = (
    "training.batch_size",
    "training.data_parallel_degree",
    "training.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree",
    "training.tensor_parallel_degree",
    "training.fsdp_reshard_after_forward",
    "experimental.context_parallel_degree",
    "experimental.pipeline_parallel_degree",
    "float8.enable_float8_linear",
    "model.norm_type",
)
"""Options of versions before 0.1.0, which are refused since they would be ignored."""

ROTATES = {"allgather": "all_gather", "alltoall": "ring"}
"""Methods of `set_rotate_method` (torch.distributed.tensor.experimental), with zsim's names."""

WITHOUT_EFFECT = (
    *("job.", "profiling.", "metrics.", "checkpoint.", "comm.", "validation.", "lr_scheduler."),
    *("memory_estimation.", "experimental.custom_args_module", "debug.seed", "training.seed"),
    *("model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion"),
    *("training.dataset", "training.dataloader.", "training.steps", "training.gc_"),
    *("parallelism.pipeline_parallel_expert_parallel_overlap", "parallelism.pp_"),
    *("quantize.grouped_mm.", "float8.", "mx."),
    *("parallelism.context_parallel_", "compile.backend", "debug.moe_", "fault_tolerance."),
    *("activation_checkpoint.visualize_", "activation_checkpoint.memory_budget"),
    *("activation_checkpoint.determinism_check", "activation_checkpoint.preserve_rng_state"),
    *("quantize.linear.float8.emulate",),
)
"""Prefixes of options that change neither time nor memory of a step in zsim.

Options of other formats have no effect, since these features are refused.
"""

OF_EXPERTS_IN_8_BITS = ("float8.moe_fqns_prototype", "mx.moe_fqns_prototype")
"""Options that convert layers of experts to 8 bits, in torchtitan 0.1 and 0.2."""

OF_EXPERTS = "parallelism.expert_"
"""Prefix of options that have no effect in models without experts."""

DEGREE = "parallelism.pipeline_parallel_degree"
OF_PIPELINES = ("parallelism.pipeline_parallel_", "parallelism.module_fqns_per_model_part")
"""Prefixes of options that have no effect without a pipeline."""

SILENT: Mapping[str, object] = {
    "optimizer.implementation": "fused",
    "optimizer.early_step_in_backward": False,
    "parallelism.enable_async_tensor_parallel": False,  # by row in 8 bits
    "parallelism.enable_compiled_autograd": False,
    "quantize.linear.float8.filter_fqns": ["output"],
    "quantize.linear.mx.filter_fqns": ["output"],
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "activation_checkpoint.debug": False,
    "debug.deterministic": False,
    "debug.deterministic_warn_only": False,
    "experimental.custom_import": "",
}
"""Options that are accepted only at this value, which is the one that zsim models."""

NAMED: Mapping[str, str] = {"experimental.custom_import": "zsim does not know that module"}
"""Options that zsim does not follow, with the possible difference."""


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration, and warnings about its options.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    options = SectionOptions(FIELD, _tree(text))
    for old, new in OLD_NAMES.items():
        if old in options.left:
            options.left.setdefault(new, options.left.pop(old))
    for name in TOO_OLD:
        if name in options.left:
            raise TrainerFileError(
                f"{FIELD}: {name}: is of torchtitan before 0.1.0, which is not read"
            )
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    stages = options.whole(DEGREE, 1)
    _runtime(options, stages)
    _parallel(options)
    layers = given.value("model", "layers")
    _model(options, given.shape_of, has_shape=layers is not None)
    _experts(options, has_experts=given.value("model", "experts") is not None)
    _train(options)
    said = options.origins.get("model.layers")
    _pipeline(options, stages, layers=layers if said is None else said.value)
    _checkpoints(options)
    put_all(tables, options.origins.items(), source=FIELD)
    if "global_batch_size" not in tables["train"]:  # torchtitan's default
        tables["train"].setdefault("gradient_accumulation_steps", 1)
    options.drop(WITHOUT_EFFECT)
    left = {
        name: shown(value) for name, value in options.left.items() if SILENT.get(name, ...) != value
    }
    ignored = need_followed(FIELD, left.items(), NAMED)
    return ReadTables(tables=tables, origins=options.origins, ignored=ignored)


def _tree(text: str) -> dict[str, object]:
    if is_python(text):
        raise TrainerFileError(
            f"{FIELD}: is Python, as torchtitan's configurations since 0.2.2 are, which are not "
            "read; write the same options as TOML ([training] local_batch_size = 1)"
        )
    try:
        return bounded_toml(text)
    except ValueError as error:
        raise TrainerFileError(f"{FIELD}: not TOML: {error}") from None


def _runtime(options: SectionOptions, stages: int) -> None:
    """Set FSDP2 as configured by `apply_fsdp`."""
    said = "parallelism.fsdp_reshard_after_forward"
    policy = options.word(said, "default", ("default", "always", "never"))
    options.set_field("zero.emulate", "fsdp2", said)
    options.set_field("zero.stage", 3, said)
    # apply_fsdp: stages of a pipeline keep their parameters by default
    frees = policy == "always" or (policy == "default" and stages == 1)
    options.set_field("zero.fsdp2.reshard_after_forward", frees, said)
    reduce = "training.mixed_precision_reduce"
    options.word(reduce, "float32", ("float32",))
    options.set_field("zero.fsdp2.reduce_dtype", "fp32", reduce)
    offload = "training.enable_cpu_offload"
    policy = "cpu" if options.flag(offload) else "none"
    options.set_field("zero.fsdp2.offload_policy", policy, offload)
    if options.flag("fault_tolerance.enable"):
        raise options.wrong("fault_tolerance.enable", value=True, why="is not modelled")


def _parallel(options: SectionOptions) -> None:
    degrees = {
        axis: options.whole(f"parallelism.{axis}_degree", 1)
        for axis in ("data_parallel_replicate", "tensor_parallel", "context_parallel")
    }
    for axis, key in (
        ("data_parallel_replicate", "replicate"),
        ("tensor_parallel", "tensor"),
        ("context_parallel", "context"),
    ):
        options.set_field(f"parallel.{key}", degrees[axis], f"parallelism.{axis}_degree")
    name = "parallelism.data_parallel_shard_degree"
    shards = options.whole(name, -1, least=-1)
    if shards == 0:
        raise options.wrong(name, shards, "must be at least 1, or -1 for what is left")
    context = degrees["context_parallel"]
    if shards * context == 1 and degrees["data_parallel_replicate"] > 1:
        raise options.wrong(name, shards, "with replicas is DDP, which is not modelled")
    name = "parallelism.context_parallel_rotate_method"
    method = options.word(name, "allgather", tuple(ROTATES))
    if context > 1:
        options.set_field("parallel.context_exchange", ROTATES[method], name)
    name = "parallelism.data_parallel_shard_degree"
    if shards > 0:  # FSDP shards over the context axis, too
        options.set_field("parallel.data", shards * context, name)
    if degrees["tensor_parallel"] > 1:
        name = "parallelism.disable_loss_parallel"
        options.set_field("zero.fsdp2.disable_loss_parallel", options.flag(name), name)
        cuts = "zero.fsdp2.enable_sequence_parallel"
        options.set_field(cuts, value=True, option="parallelism.tensor_parallel_degree")
    else:
        options.left.pop("parallelism.disable_loss_parallel", None)


def _model(
    options: SectionOptions, shape_of: Callable[[str], Mapping[str, object]], *, has_shape: bool
) -> None:
    """Set the shape of a flavor; for an unknown flavor, the scenario must give it."""
    name = options.word("model.name", "llama3")
    flavor = options.word("model.flavor", "debugmodel")
    if name not in FLAVORS:
        why = f"is not modelled, only {', '.join(FLAVORS)}"
        raise options.wrong("model.name", name, why)
    flavors = FLAVORS[name]
    length = "training.seq_len"
    is_debug = (name, flavor) == ("llama3", "debugmodel") and not has_shape
    if is_debug or flavor in flavors:
        for key, value in (DEBUG if is_debug else shape_of(flavors[flavor])).items():
            if key != "sequence_length":
                options.set_field(f"model.{key}", value, "model.flavor")
    elif not has_shape:
        known = ", ".join(flavors)
        why = f"of {name} is not known, only {known}; give its shape in [model]"
        raise options.wrong("model.flavor", flavor, why)
    options.set_field("model.sequence_length", options.whole(length, 2048), length)
    options.set_field("model.attention", "flash2", "model.flavor")  # PyTorch's own, since 2.2


def _experts(options: SectionOptions, *, has_experts: bool) -> None:
    """Set the ranks of experts, if the model has some, or the scenario's shape `has_experts`."""
    if not (has_experts or any(key.startswith("model.experts") for key in options.origins)):
        options.drop((OF_EXPERTS,))
        return
    name, parts = f"{OF_EXPERTS}parallel_degree", f"{OF_EXPERTS}tensor_parallel_degree"
    ranks = options.whole(name, 1)
    options.set_field("parallel.expert", ranks, name)
    if ranks == 1:
        options.drop((OF_EXPERTS,))
        return
    if (asked := options.whole(parts, 1)) != 1:
        raise options.wrong(parts, asked, "must be 1: torchtitan removed it in April 2026 (#3167)")
    library = f"{OF_EXPERTS}parallel_comm_backend"
    if (by := options.word(library, "standard")) != "standard":
        raise options.wrong(library, by, "is not modelled, only standard")


def _train(options: SectionOptions) -> None:
    micro = "training.local_batch_size"
    options.set_field("train.micro_batch_size", options.whole(micro, 8), micro)
    total = "training.global_batch_size"
    sequences = options.whole(total, -1, least=-1)
    if sequences > 0:
        options.set_field("train.global_batch_size", sequences, total)
    norm = "training.max_norm"
    options.set_field("train.clip_norm", options.number(norm, 1.0), norm)
    kept = options.word("training.dtype", "float32", ("float32", "bfloat16"))
    formats = {"bfloat16": Precision.BF16, "float32": Precision.FP32}
    narrow = "training.mixed_precision_param"
    if kept == "bfloat16":  # trained parameters are in bf16, without fp32 copies
        formats = {"bfloat16": Precision.PURE_BF16}
    precision = formats[options.word(narrow, "bfloat16", tuple(formats))]
    options.set_field("train.precision", precision, narrow)
    _compile(options)
    _optimizer(options)


def _pipeline(options: SectionOptions, stages: int, *, layers: object) -> None:
    """Set the stages of a pipeline, its order, and its micro-batches; nothing without one."""
    section = "parallelism.pipeline_parallel"
    if stages == 1:
        options.drop(OF_PIPELINES)
        return
    options.set_field("parallel.pipeline", stages, DEGREE)
    for name in (f"{section}_schedule_csv", "parallelism.module_fqns_per_model_part"):
        if value := options.left.pop(name, None):
            raise options.wrong(name, value, "is not modelled")
    name = f"{section}_schedule"
    kind = options.word(name, PipelineSchedule.ONE_FORWARD_ONE_BACKWARD)
    known = {each.lower(): each for each in PipelineSchedule}  # get_schedule_class takes any case
    if kind.lower() not in known:
        raise options.wrong(name, kind, f"is not modelled, only {', '.join(PipelineSchedule)}")
    options.set_field("zero.fsdp2.pipeline_schedule", known[kind.lower()], name)
    less = 0
    for end in ("first_stage_less_layers", "last_stage_less_layers"):
        fewer = options.whole(f"{section}_{end}", 1, least=0)
        options.set_field(f"zero.fsdp2.{end}", fewer, f"{section}_{end}")
        less += fewer
    name = f"{section}_layers_per_stage"
    if name in options.left:
        each = options.whole(name, 1)
        if not isinstance(layers, int):
            raise options.wrong(name, each, "needs model.layers")
        virtual = -(-(layers + less) // each)  # pipeline_llm
        if virtual % stages:
            why = f"makes {virtual} stages, which must be a multiple of {DEGREE} = {stages}"
            raise options.wrong(name, each, why)
        chunks = virtual // stages
        if (chunks == 1) != (known[kind.lower()] is PipelineSchedule.ONE_FORWARD_ONE_BACKWARD):
            raise options.wrong(name, each, f"makes {chunks} on each rank, which {kind} has not")
        options.set_field("zero.fsdp2.pipeline_stages_per_rank", chunks, name)
    # build_pipeline_schedule
    name, local = f"{section}_microbatch_size", "training.local_batch_size"
    size, batch = options.whole(name, 1), options.origins["train.micro_batch_size"].value
    assert isinstance(batch, int)
    if batch % size:
        raise options.wrong(name, size, f"must divide {local} = {batch}")
    options.set_field("train.micro_batch_size", size, name)
    options.set_field("train.gradient_accumulation_steps", batch // size, local)
    # forward_one_chunk keeps the outputs of a stage, for the last one logits, until their backward
    options.set_field("train.holds_logits", value=True, option=DEGREE)


def _compile(options: SectionOptions) -> None:
    """Set the compiled parts, the loss as one kernel, and the layers that multiply in 8 bits."""
    parts = options.words("compile.components", ("model", "loss"))
    compiled = parts if options.flag("compile.enable") else ()
    options.set_field("train.compile", "model" in compiled, "compile.enable")
    loss = Loss.FUSED if "loss" in compiled else Loss.TORCH
    options.set_field("train.loss", loss, "compile.components")
    converters = options.words("model.converters", ())
    others = [each for each in converters if each not in (*IN_FLOAT8, *IN_MX)]
    if others:
        raise options.wrong("model.converters", others[0], "is not modelled, only float8 and mx")
    for name in OF_EXPERTS_IN_8_BITS if converters else ():
        if value := options.left.get(name):
            why = "is not modelled: experts multiply in the format of the model; remove it"
            raise options.wrong(name, value, why)
    if any(each in IN_MX for each in converters):
        _mx(options, converters)
        return
    name = "quantize.linear.float8.recipe_name"
    has_recipe = name in options.left
    recipe = options.word(name, "tensorwise", (Float8.TENSORWISE, Float8.ROWWISE))
    if converters:
        options.set_field("train.float8", recipe, "model.converters")
        _float8_gathers(options, has_recipe=has_recipe)
        # Without a filter the output layer is also converted, which is not modelled.
        options.left.setdefault("quantize.linear.float8.filter_fqns", [])
    else:
        options.drop(("quantize.linear.float8.", "quantize.linear.mx."))
    _fused_tokens(options, by_row=bool(converters) and recipe != Float8.TENSORWISE)


def _mx(options: SectionOptions, converters: Sequence[str]) -> None:
    """Set MXFP8, the recipe of the converter `mx`."""
    if any(each in IN_FLOAT8 for each in converters):
        raise options.wrong("model.converters", converters[-1], f"contradicts {converters[0]}")
    name, section = "quantize.linear.mx.recipe_name", "quantize.linear.mx"
    options.word(name, "mxfp8_cublas", ("mxfp8_cublas", "mxfp8"))  # MXLinearConfig of torchao
    options.set_field("train.float8", Float8.MXFP8, "model.converters")
    options.drop((f"{section}.mxfp8_dim1_cast_kernel_choice", "quantize.linear.float8."))
    options.left.setdefault(f"{section}.filter_fqns", ["output"])
    _fused_tokens(options, by_row=True)


def _fused_tokens(options: SectionOptions, *, by_row: bool) -> None:
    """Set the fusion of products with collectives of tokens, as in `maybe_enable_async_tp`.

    If tokens are cast to 8 bits by row, after their gather, leave the option to be refused.
    """
    name = "parallelism.enable_async_tensor_parallel"
    if options.origins["parallel.tensor"].value == 1:
        options.left.pop(name, None)
    elif not by_row:
        fuses = options.flag(name)
        if fuses and options.origins["train.compile"].value is False:
            raise options.wrong(name, value=True, why="needs compile.enable, with model")
        options.set_field("zero.fsdp2.enable_async_tensor_parallel", fuses, name)


def _float8_gathers(options: SectionOptions, *, has_recipe: bool) -> None:
    """Set the cast of weights before they are gathered, if scales are computed once a step."""
    section = "quantize.linear.float8"
    name, once = (
        f"{section}.enable_fsdp_float8_all_gather",
        "precompute_float8_dynamic_scale_for_fsdp",
    )
    gathers, precomputes = options.flag(name), options.flag(f"{section}.{once}")
    if gathers and has_recipe:  # Float8LinearConverter asserts it
        raise options.wrong(name, value=True, why="goes with no recipe_name")
    if gathers and not precomputes:
        raise options.wrong(name, value=True, why=f"is not modelled without {once}")
    options.set_field("zero.fsdp2.enable_fsdp_float8_all_gather", gathers, name)


def _optimizer(options: SectionOptions) -> None:
    options.word("optimizer.name", "AdamW", ("AdamW",))
    options.set_field("train.optimizer", "adam", "optimizer.name")
    for name, field, default in (
        ("lr", "learning_rate", 8e-4),
        ("beta1", "beta1", 0.9),
        ("beta2", "beta2", 0.95),
        ("eps", "epsilon", 1e-8),
        ("weight_decay", "weight_decay", 0.1),
    ):
        option = f"optimizer.{name}"
        options.set_field(f"train.{field}", options.number(option, default), option)


def _checkpoints(options: SectionOptions) -> None:
    """Set which blocks are recomputed, as wrapped by `apply_ac`."""
    name, nth = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode = options.word(name, "selective", ("selective", "full", "none", "memory_budget"))
    option = options.take(nth, str) or "2"
    early = "activation_checkpoint.early_stop"
    options.set_field("activations.early_stop", options.flag(early), early)
    if mode == "memory_budget":
        raise options.wrong(name, mode, "is not modelled, only selective, full and none")
    kind = Checkpointing(mode) if mode != "selective" else Checkpointing.FULL
    if mode == "selective" and option == "op":
        kind = Checkpointing.OPERATIONS
    elif mode == "selective":
        if not option.isdecimal() or len(option) > 9:
            raise options.wrong(nth, option, 'must be "op" or a whole number')
        options.set_field("activations.every_nth", int(option) or 1, nth)  # 0 is also each block
    options.set_field("activations.checkpointing", kind, name)
