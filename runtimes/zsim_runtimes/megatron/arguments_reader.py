"""A scenario from the command line of a Megatron-LM run.

The file contains the arguments in shell syntax, with every variable expanded: the output of `set
-x` for a script. Everything up to the name of a Python file belongs to the launcher. The arguments
set `[model]`, `[parallel]`, `[zero]`, `[activations]` and `[train]`, with the defaults of
`megatron/training/arguments.py` (2026-08). The scenario gives the cluster, and the vocabulary if a
tokenizer defines it. Names of recomputation arguments from before 2023 are also read. An argument
without a reader is refused, unless it does not change a step or is reported with the difference.
"""

from zsim.runtimes.trainer_files.command_line import words_by_name
from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim.runtimes.trainer_files.tables import GivenTables, ReadTables, put_all
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Loss
from zsim.strategy.precision import Precision
from zsim_runtimes.megatron.deepspeed_arguments import set_deepspeed, takes_deepspeed
from zsim_runtimes.megatron.expert_arguments import set_experts
from zsim_runtimes.megatron.format_arguments import read_formats, state_options
from zsim_runtimes.megatron.graph_arguments import graph_options
from zsim_runtimes.megatron.stage_arguments import stage_options

FIELD = "zero.megatron_arguments"

WITHOUT_EFFECT = (
    *("adlr", "async-save", "ckpt", "data-args", "data-cache", "data-path", "dataloader"),
    *("data-per-class", "decay", "dist-ckpt", "distributed-backend", "distributed-timeout"),
    *("eval", "exit", "app-tag", "num-dataset-builder", "per-dataset", "per-split", "otel"),
    *("one-logger", "no-one-logger", "object-storage", "ft-", "calc-ft", "enable-ft", "inprocess"),
    *(
        "eod-mask-loss",
        "reset-position-ids",
        "reset-attention-mask",
        "fim-",
        "use-dist-ckpt",
    ),
    *("short-seq-prob", "mask-prob", "disable-msc", "enable-msc", "run-workload", "result-reject"),
    *("no-check-for-nan", "check-for", "use-cpu-initialization", "perform-initialization"),
    *("override-ckpt", "titles-", "onnx-safe", "lazy-mpu-init", "local-rank", "data-impl"),
    *("mmap-warmup", "finetune", "no-initialization", "no-log-", "reset-iteration"),
    *("trust-remote-code", "universal-checkpoint", "kill-switch"),
    *("barrier-with-L1-time", "no-ckpt", "use-persistent-ckpt", "straggler"),
    *("use-rope-scaling", "rope-scaling", "rope-type", "rotary-seq-len", "rotary-scaling"),
    *("apply-query-key-layer", "no-query-key-layer", "layernorm-epsilon", "tp-comm-bootstrap"),
    *("rerun-mode", "error-injection", "langrl", "rl-", "grpo-", "mid-level-dataset"),
    *("init-method", "inference", "load", "log-", "lr-", "manual-gc", "merge-file", "min-lr"),
    *("mock-data", "no-load", "no-mmap", "no-save", "num-workers", "override-opt", "profile"),
    *("rotary-base", "save", "seed", "split", "tensorboard"),
    *("test-data", "tiktoken", "timing", "tokenizer", "train-data", "train-iters"),
    *("train-samples", "use-checkpoint", "use-mcore-models", "valid-data"),
    *("vocab-file", "wandb", "no-create-attention-mask", "rotary-percent", "attention-softmax"),
    *("norm-epsilon", "no-rope-f"),
)
"""Prefixes of arguments that change neither time nor memory of a training step."""

NAMED = {
    "hysteresis": "the loss scale falls at the first overflow",
    "weight-decay-incr-style": "the decay is train.weight_decay in every step",
    "start-weight-decay": "the decay is train.weight_decay in every step",
    "end-weight-decay": "the decay is train.weight_decay in every step",
}
"""Arguments that zsim does not follow, with the difference; time and memory stay the same."""

DEFAULTS = {
    "cpu-offloading-num-layers": "0",
    "empty-unused-memory-level": "0",
    "num-distributed-optimizer-instances": "1",
    "weight-decay-incr-style": "constant",
}
"""Arguments with their default values; at these they are ignored."""

OF_FP16 = ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
OF_RULES = {
    "sgd": {"sgd-momentum": ("momentum", 0.9)},
    "adam": {
        "adam-beta1": ("beta1", 0.9),
        "adam-beta2": ("beta2", 0.999),
        "adam-eps": ("epsilon", 1e-8),
    },
}
"""Arguments of an optimizer: their fields in `[train]`, and their defaults."""

GATES = {"swiglu": "swiglu", "geglu": "geglu"}
"""Values of `--glu-activation` of BigScience's Megatron-DeepSpeed, and activations."""

OF_OLD_VERSIONS = frozenset(
    {
        *("checkpoint-activations", "checkpoint-num-layers", "activations-checkpoint-method"),
        *("distribute-checkpointed-activations", "DDP-impl", "glu-activation", "data-impl"),
        *("activations-checkpoint-num-layers", "activations-checkpoint-granularity"),
        *("no-contiguous-buffers-in-local-ddp", "scaled-upper-triang-masked-softmax-fusion"),
    }
)
"""Arguments of versions before 2024, which store scores of attention by default."""

OLD_NAMES = {
    "checkpoint-num-layers": "recompute-num-layers",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "activations-checkpoint-granularity": "recompute-granularity",
    "distribute-checkpointed-activations": "distribute-saved-activations",
}
"""Arguments of recomputation before 2023, and their current names."""

REFUSED = {
    "multi-latent-attention": "multi-latent attention",
    "hybrid-layer-pattern": "layers of several kinds",
    "mtp-num-layers": "heads of several tokens",
    "use-megatron-fsdp": "Megatron-FSDP",
    "use-torch-fsdp2": "FSDP2 inside Megatron-LM (write a scenario with zero.emulate = fsdp2)",
    "squared-relu": "a squared ReLU",
    "quick-geglu": "quick GEGLU",
    "optimizer-cpu-offload": "its optimizer on the host",
    "fine-grained-activation-offloading": "activations of modules on the host",
    "overlap-p2p-communication-warmup-flush": "another order of sends and receives",
    "ds-sequence-parallel-size": "DeepSpeed's sequence parallelism",
    "sft": "fine-tuning on packed samples",
    "batch-size": "the global batch of versions before 2020 (write --micro-batch-size)",
    "model-parallel-size": "an old name (write --tensor-model-parallel-size)",
}
"""Arguments that select a model or runtime that is not modelled."""


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from the arguments in `text`, and warnings about them.

    Raises:
        TrainerFileError: these are not arguments, request something that is not modelled, or
            contradict the scenario.
    """
    words = words_by_name(text, field=FIELD, any_value=WITHOUT_EFFECT)
    return with_arguments(given, Arguments(words, field=FIELD))


def with_arguments(
    given: GivenTables, arguments: Arguments, *, ranks: int | None = None
) -> ReadTables:
    """Return the same for arguments from a file of any form.

    Raises:
        TrainerFileError: as `configured`.
    """
    tables = given.copied("model", "parallel", "zero", "activations", "train")
    is_old = not OF_OLD_VERSIONS.isdisjoint(arguments.given)
    arguments.drop(name for name, value in DEFAULTS.items() if arguments.given.get(name) == [value])
    for name, other in REFUSED.items():
        if name in arguments.given:
            raise arguments.wrong(name, f"{other}: not modelled")
    _need_one_batch(arguments)
    by_deepspeed = takes_deepspeed(arguments)
    is_old = is_old or by_deepspeed
    _parallel(arguments)
    _model(arguments)
    set_experts(arguments)
    _attention(arguments, is_old=is_old)
    _train(arguments)
    _optimizer(arguments)
    _checkpoints(arguments)
    runtime = tables["zero"].get("megatron") or {}
    if by_deepspeed:
        set_deepspeed(arguments)
    else:
        _runtime(arguments, has_methods=METHODS_KEY in runtime)
    put_all(tables, arguments.origins.items(), source=arguments.field)
    if (
        "global_batch_size" not in tables["train"] and not by_deepspeed
    ):  # the default is one micro-batch per replica
        tables["train"].setdefault("gradient_accumulation_steps", 1)
    left = [
        (arguments.called(name), " ".join(values))
        for name, values in arguments.given.items()
        if name in NAMED or not name.startswith(WITHOUT_EFFECT)
    ]
    reasons = {arguments.called(name): reason for name, reason in NAMED.items()}
    ignored = need_followed(arguments.field, left, reasons)
    return ReadTables(tables=tables, origins=arguments.origins, ignored=ignored, ranks=ranks)


def _need_one_batch(arguments: Arguments) -> None:
    """Drop a growing batch that does not grow.

    Raises:
        TrainerFileError: the batch grows, so steps differ.
    """
    for name in ("rampup-batch-size", "step-batch-size-schedule"):
        values = arguments.given.pop(name, None)
        if values is None or values[:1] == arguments.given.get("global-batch-size"):
            continue
        why = (
            f"{' '.join(values)}: a batch that grows is not modelled; remove it to simulate a step "
            f"of {arguments.called('global-batch-size')}, or set that to the batch of another step"
        )
        raise arguments.wrong(name, why)


EXCHANGES = {"p2p": "ring", "all_gather": "all_gather"}  # `cp_comm_type` of Transformer Engine


def _parallel(arguments: Arguments) -> None:
    arguments.set_field(
        "parallel.tensor",
        arguments.whole("tensor-model-parallel-size", 1),
        "tensor-model-parallel-size",
    )
    name = "pipeline-model-parallel-size"
    arguments.set_field("parallel.pipeline", arguments.whole(name, 1), name)
    name = "context-parallel-size"
    context = arguments.whole(name, 1)
    arguments.set_field("parallel.context", context, name)
    exchange = arguments.word("cp-comm-type", "p2p", ("p2p", "all_gather", "a2a", "a2a+p2p"))
    if exchange not in EXCHANGES:
        raise arguments.wrong("cp-comm-type", f"{exchange} is not modelled")
    if context != 1:
        arguments.set_field("parallel.context_exchange", EXCHANGES[exchange], "cp-comm-type")


def _model(arguments: Arguments) -> None:
    """Set the shape: a GPT, any part of which can be replaced."""
    for name, field in (
        ("num-layers", "layers"),
        ("hidden-size", "hidden_size"),
        ("num-attention-heads", "attention_heads"),
        ("seq-length", "sequence_length"),
        ("kv-channels", "head_size"),
    ):
        arguments.set_field(f"model.{field}", arguments.whole(name), name)
    groups = arguments.whole("num-query-groups", 1)
    if arguments.flag("group-query-attention"):
        arguments.set_field("model.key_value_heads", groups, "num-query-groups")
    heads = "num-key-value-heads"  # Megatron-DeepSpeed
    arguments.set_field("model.key_value_heads", arguments.whole(heads), heads)
    kind = _positions(arguments)
    most = arguments.whole("max-position-embeddings")
    if kind == "learned":
        arguments.set_field("model.position_embeddings", most, "max-position-embeddings")
    norm = NORMS[arguments.word("normalization", "LayerNorm", tuple(NORMS))]
    arguments.set_field("model.norm", norm, "normalization")
    _mlp(arguments)
    has_bias = not arguments.flag("disable-bias-linear")
    arguments.set_field("model.bias", has_bias, "disable-bias-linear")
    arguments.set_field("model.norm_bias", norm == "layer" or None, "normalization")
    arguments.set_field("model.qkv_bias", arguments.flag("add-qkv-bias") or None, "add-qkv-bias")
    if arguments.flag("qk-layernorm"):
        arguments.set_field("model.qk_norm", "head", "qk-layernorm")
    untied = arguments.flag("untie-embeddings-and-output-weights")
    arguments.set_field("model.tied_embeddings", not untied, "untie-embeddings-and-output-weights")
    _vocabulary(arguments)
    dropout = arguments.number("hidden-dropout", 0.1)
    arguments.set_field("model.dropout", dropout, "hidden-dropout")
    if (other := arguments.number("attention-dropout", 0.1)) != dropout:
        hidden = arguments.called("hidden-dropout")
        raise arguments.wrong("attention-dropout", f"{other} must be {dropout}, as {hidden}")


NORMS = {"LayerNorm": "layer", "RMSNorm": "rms", "layernorm": "layer", "rmsnorm": "rms"}
"""Values of `--normalization`; the latter two are Megatron-DeepSpeed's."""

POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "absolute": "learned",
    "rotary": "rotary",
}
"""Values of `--position-embedding-type`, including BigScience's fork."""


def _positions(arguments: Arguments) -> str:
    """Set the kind of positions and return it; rotary positions also have an older flag."""
    name, old, none = (
        "position-embedding-type",
        "use-rotary-position-embeddings",
        "no-position-embedding",
    )
    found = POSITIONS[arguments.word(name, "learned_absolute", tuple(POSITIONS))]
    if arguments.flag(old):  # validate_args
        found, name = "rotary", old
    if arguments.flag(none) and found == "learned":
        raise arguments.wrong(none, "a model without positions: not modelled")
    arguments.set_field("model.positions", found, name)
    return found


def _attention(arguments: Arguments, *, is_old: bool) -> None:
    """Set whether attention stores its scores: in old versions unless flash is requested."""
    name = "attention-backend"
    backend = arguments.word(name, "auto", BACKENDS)
    impl = arguments.word("transformer-impl", "", IMPLEMENTATIONS)
    flashes = [each for each in FLASH if arguments.flag(each)]
    is_local = backend in {"unfused", "local"}
    if backend == "auto" and not impl and is_old and not flashes:
        is_local, name = True, "use-flash-attn"
    elif backend == "auto" and impl == "local":
        is_local, name = True, "transformer-impl"
    plain = is_local and not flashes
    arguments.set_field("model.attention", "plain" if plain else "flash2", name)
    unfused = "no-masked-softmax-fusion"
    if arguments.flag(unfused) and plain:
        raise arguments.wrong(unfused, "stores more of attention, which is not modelled")


IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")
FLASH = ("use-flash-attn", "use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton")
"""Flags of flash attention; the latter three are Megatron-DeepSpeed's."""

BACKENDS = ("auto", "flash", "fused", "unfused", "local")
"""Implementations of attention; all but the last two store no scores."""


def _mlp(arguments: Arguments) -> None:
    """Set the MLP; the default width is that of `validate_args`."""
    is_gated = arguments.flag("swiglu")
    name = "glu-activation"
    gate = arguments.word(name, "", tuple(GATES))
    if is_gated or not gate:
        arguments.set_field("model.activation", "swiglu" if is_gated else "gelu", "swiglu")
    else:
        arguments.set_field("model.activation", GATES[gate], name)
    hidden = arguments.origins.get("model.hidden_size")
    width = arguments.whole("ffn-hidden-size")
    if width is None and is_gated and hidden is not None and isinstance(hidden.value, int):
        width = int(4 * hidden.value * 2 / 3 / 64) * 64
    arguments.set_field("model.intermediate_size", width, "ffn-hidden-size")


def _vocabulary(arguments: Arguments) -> None:
    """Set the size of the vocabulary, padded for the tensor axis."""
    size = arguments.whole("vocab-size")
    divisor = arguments.whole("make-vocab-size-divisible-by", 128)
    tensor = arguments.origins["parallel.tensor"].value
    if size is not None and divisor is not None and isinstance(tensor, int):
        multiple = divisor * tensor
        arguments.set_field("model.vocab_size", -(-size // multiple) * multiple, "vocab-size")


def _train(arguments: Arguments) -> None:
    for name in ("micro-batch-size", "global-batch-size"):
        arguments.set_field(f"train.{name.replace('-', '_')}", arguments.whole(name), name)
    formats = [name for name in ("bf16", "fp16") if arguments.flag(name)]
    if len(formats) > 1:
        raise arguments.wrong("bf16", f"contradicts {arguments.called('fp16')}")
    precision = Precision(formats[0]) if formats else Precision.FP32
    read_formats(arguments)
    arguments.set_field("train.precision", precision, formats[0] if formats else "fp32")
    clip = arguments.number("clip-grad", 1.0)
    arguments.set_field("train.clip_norm", clip or None, "clip-grad")
    implementation = arguments.word("cross-entropy-fusion-impl", "native", ("native", "te"))
    fused = "cross-entropy-loss-fusion"
    if arguments.flag(fused):
        if implementation != "te":
            raise arguments.wrong(fused, "is modelled with --cross-entropy-fusion-impl te alone")
        arguments.set_field("train.loss", Loss.FUSED, fused)  # one kernel, its gradient in place
    if precision is not Precision.FP16:
        arguments.drop(OF_FP16)
        return
    scale = "train.loss_scale"
    constant = arguments.number("loss-scale", 0.0)
    first = arguments.number("initial-loss-scale", 2.0**32)
    least = arguments.number("min-loss-scale", 1.0)
    interval = int(arguments.number("loss-scale-window", 1000.0))
    if constant:
        first = least = constant
        for name in ("growth", "backoff"):
            arguments.set_field(f"{scale}.{name}", 1.0, "loss-scale")
        arguments.given.pop("hysteresis", None)
    elif arguments.number("hysteresis", 2.0) != 1:
        arguments.given["hysteresis"] = []  # here the scale falls at the first overflow
    arguments.set_field(f"{scale}.initial", first, "initial-loss-scale")
    arguments.set_field(f"{scale}.minimum", least, "min-loss-scale")
    arguments.set_field(f"{scale}.interval", interval, "loss-scale-window")


def _optimizer(arguments: Arguments) -> None:
    arguments.word("DDP-impl", "local", ("local",))  # before 2023; torch is PyTorch's
    kind = arguments.word("optimizer", "adam", ("adam", "sgd"))
    arguments.set_field("train.optimizer", kind, "optimizer")
    if "lr" in arguments.given:
        arguments.set_field("train.learning_rate", arguments.number("lr", 0.0), "lr")
    arguments.set_field(
        "train.weight_decay", arguments.number("weight-decay", 0.01), "weight-decay"
    )
    for name, (field, default) in OF_RULES[kind].items():
        arguments.set_field(f"train.{field}", arguments.number(name, default), name)
    for names in OF_RULES.values():
        arguments.drop(names)  # of the other rule


def _checkpoints(arguments: Arguments) -> None:
    """Set recomputation: whole layers one by one, or the core of attention."""
    old = [name for name in OLD_NAMES if name in arguments.given]
    for name in old:
        arguments.rename(name, OLD_NAMES[name])
    # before granularity was an argument, either of these recomputed whole layers
    if arguments.flag("checkpoint-activations") or "activations-checkpoint-method" in old:
        arguments.given.setdefault("recompute-granularity", ["full"])
    granularity = arguments.word("recompute-granularity", "", ("full", "selective"))
    if arguments.flag("recompute-activations"):
        granularity = "selective"
    kinds = {"full": Checkpointing.FULL, "selective": Checkpointing.SELECTIVE}
    kind = kinds.get(granularity, Checkpointing.NONE)
    arguments.set_field("activations.checkpointing", kind, "recompute-granularity")
    modules = arguments.given.pop("recompute-modules", [])  # without effect on other granularities
    if kind is Checkpointing.SELECTIVE and modules not in ([], ["core_attn"]):
        arguments.set_field("zero.megatron.recompute_modules", modules, "recompute-modules")
    if kind is Checkpointing.FULL:
        arguments.word("recompute-method", "uniform", ("uniform",))
        if (layers := arguments.whole("recompute-num-layers", 1)) != 1:
            raise arguments.wrong("recompute-num-layers", f"{layers} is not modelled, only 1")
    else:
        arguments.drop(("recompute-method", "recompute-num-layers"))
    cuts = "distribute-saved-activations"
    arguments.set_field("activations.partition", arguments.flag(cuts) or None, cuts)


def _runtime(arguments: Arguments, *, has_methods: bool) -> None:
    """Set the stage, given by the distributed optimizer, and the options of the runtime."""
    shards = arguments.flag("use-distributed-optimizer")
    arguments.set_field("zero.emulate", "megatron", "use-distributed-optimizer")
    arguments.set_field("zero.stage", 1 if shards else 0, "use-distributed-optimizer")
    is_bf16 = arguments.origins["train.precision"].value is Precision.BF16
    states = state_options(arguments)
    is_wide = is_bf16 and states["main_grads_dtype"][1] == "fp32"
    in_bf16 = arguments.flag("grad-reduce-in-bf16")
    in_fp32 = arguments.flag("accumulate-allreduce-grads-in-fp32") or is_wide
    options: dict[str, tuple[str, object]] = {
        "bucket_size": ("ddp-bucket-size", arguments.whole("ddp-bucket-size")),
        "cpu_offloading_num_layers": (
            "cpu-offloading-num-layers",
            arguments.whole("cpu-offloading-num-layers"),
        ),
        "grad_reduce_in_fp32": ("accumulate-allreduce-grads-in-fp32", in_fp32 and not in_bf16),
        **{
            field: (name, arguments.flag(name))
            for field, name in (
                ("overlap_grad_reduce", "overlap-grad-reduce"),
                ("overlap_param_gather", "overlap-param-gather"),
                ("average_in_collective", "ddp-average-in-collective"),
            )
        },
    }
    options |= _tensor_options(arguments, has_methods=has_methods)
    apart = "no-gradient-accumulation-fusion"
    options["gradient_accumulation_fusion"] = (apart, not arguments.flag(apart))
    whole = "no-scatter-gather-tensors-in-pipeline"
    if arguments.flag(whole):  # otherwise the version decides: see the option
        options["scatter_gather_tensors_in_pipeline"] = (whole, False)
    options |= states | dict(stage_options(arguments))
    options |= graph_options(arguments)
    for field, (name, value) in options.items():
        arguments.set_field(f"zero.megatron.{field}", value, name)


METHODS, METHODS_KEY = "tp-comm-overlap-cfg", "tp_comm_overlap_cfg"


def _tensor_options(arguments: Arguments, *, has_methods: bool) -> dict[str, tuple[str, object]]:
    """Return options of tensor ranks: sharding by tokens, and overlap with products."""
    cuts_tokens = arguments.flag("sequence-parallel")
    tensor = arguments.origins["parallel.tensor"].value
    overlaps = arguments.flag("tp-comm-overlap")
    if (path := arguments.word(METHODS, "")) and overlaps and not has_methods:
        raise arguments.wrong(METHODS, f"{path!r} is not read; write zero.megatron.{METHODS_KEY}")
    if overlaps and not (cuts_tokens and tensor != 1):  # validate_args
        raise arguments.wrong("tp-comm-overlap", "needs --sequence-parallel and tensor ranks")
    behind = "disable-tp-comm-overlap-rs"
    is_behind = arguments.flag(behind) and overlaps
    # on unless turned off, always on with sequence parallelism; later versions ignore it
    waits = "no-async-tensor-model-parallel-allreduce"
    is_off = arguments.flag(waits) and not cuts_tokens
    return {
        "sequence_parallel": ("sequence-parallel", cuts_tokens and tensor != 1),
        "tp_comm_overlap": ("tp-comm-overlap", overlaps),
        "tp_comm_overlap_rs": (behind, not is_behind),
        "async_tensor_model_parallel_allreduce": (
            waits,
            tensor != 1 and not (overlaps or is_off),
        ),
    }
