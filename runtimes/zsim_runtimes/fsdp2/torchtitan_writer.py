"""Write an FSDP2 setting as the TOML file of torchtitan 0.2.2; `zero.torchtitan_config` reads it.

Settings without an option in torchtitan become comments.
"""

import json
from collections.abc import Iterator, Mapping

from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.torchtitan_reader import FLAVORS, ROTATES

MODES: Mapping[str, tuple[str, ...]] = {
    "none": ('mode = "none"',),
    "operations": ('mode = "selective"', 'selective_ac_option = "op"'),
    "full": ('mode = "full"',),
}
"""Lines of `[activation_checkpoint]`."""

UNSAID = {
    "forward_prefetch": "blocks gathered ahead",
    "gradient_sync": "micro-batches in which gradients are communicated",
    "all_reduce": "micro-batches in which replicas are reduced",
    "reshard_after_backward": "parameters kept from one micro-batch to the next",
    "reduce_scatter_max_input_buffers": "inputs of reduce-scatters that may be alive",
    "pin_memory": "pinned host memory",
    "repeat_kv": "copies of shared keys and values",
    "offload_wrapper": "checkpoints in host memory",
}
"""FSDP2 options that torchtitan does not set."""


def _unsaid(asked: ConfigQuestion) -> Iterator[str]:
    """Yield a comment for each option that torchtitan does not set, unless it does so itself."""
    ahead = FSDP2().gathered_ahead(expert_order=asked.number("parallel.expert") > 1)
    for name, value in asked.options.items():
        if name in UNSAID and not (name == "forward_prefetch" and value == ahead):
            yield f"# torchtitan does not set {UNSAID[name]}"


def _rotated(asked: ConfigQuestion) -> list[str]:
    """Return the line of the context-parallel rotation method; empty for the default."""
    methods = {exchange: method for method, exchange in ROTATES.items()}
    exchange = asked.changes.get("parallel.context_exchange")
    if exchange is None:
        return []
    return [f'context_parallel_rotate_method = "{methods[str(exchange)]}"']


def _need_its_own_plan(asked: ConfigQuestion) -> None:
    """Raise MistakeError unless torchtitan supports the setting's tensor and root options."""
    options = asked.options
    if options.get("input_gathers", "module") != "module":
        raise MistakeError("--config: torchtitan's modules gather what their layers read")
    if options.get("replicate_embedding", False):
        raise MistakeError("--config: torchtitan's tensor ranks have parts of the token embedding")
    one_scale, tensor = asked.train.get("float8") == "tensorwise", asked.number("parallel.tensor")
    if one_scale and tensor > 1 and not options.get("enable_float8_tensorwise_tp", True):
        raise MistakeError("--config: torchtitan's tensor ranks gather tokens in 8 bits")
    if options.get("reshard_root_after_forward", False):
        raise MistakeError("--config: torchtitan keeps the root until its backward")


def write(asked: ConfigQuestion) -> str:
    """Return the setting as torchtitan's file.

    Raises:
        MistakeError: torchtitan has no option for it.
    """
    if asked.precision == "fp16":
        raise MistakeError("--config: torchtitan trains in bf16 or fp32, not fp16")
    options = asked.options
    reshard = options.get("reshard_after_forward", True)
    if not isinstance(reshard, bool):
        raise MistakeError(f"--config: torchtitan cannot keep shards over {reshard} ranks")
    if options.get("enable_sequence_parallel", True) is not True:
        raise MistakeError("--config: torchtitan's tensor axis always cuts tokens")
    _need_its_own_plan(asked)
    offloads = options.get("offload_policy", "none") == "cpu"
    context, experts = asked.number("parallel.context"), asked.number("parallel.expert")
    checkpoints = MODES.get(asked.checkpointing)
    if checkpoints is None:
        raise MistakeError(f"--config: torchtitan has no checkpointing {asked.checkpointing}")
    micro, stages = asked.number("train.micro_batch_size"), asked.number("parallel.pipeline")
    if options.get("pipeline_stages_per_rank") is not None:
        raise MistakeError("--config: torchtitan says layers of a stage, not stages of a rank")
    # a pipeline cuts the batch of a rank into its micro-batches
    local = micro * (asked.number("train.gradient_accumulation_steps") if stages > 1 else 1)
    lines = [
        *_unsaid(asked),
        *_model(asked),
        "",
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {asked.sequences}",
        f"seq_len = {asked.sequence_length}",
        f"max_norm = {_norm(asked)}",
        f'mixed_precision_param = "{"bfloat16" if asked.precision == "bf16" else "float32"}"',
        'mixed_precision_reduce = "float32"  # the only format that it has',
        f"enable_cpu_offload = {str(offloads).lower()}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {asked.number('parallel.replicate')}",
        f"data_parallel_shard_degree = {asked.number('parallel.data') // context}",
        f'fsdp_reshard_after_forward = "{"always" if reshard else "never"}"',
        f"tensor_parallel_degree = {asked.number('parallel.tensor')}",
        f"disable_loss_parallel = {str(options.get('disable_loss_parallel', False)).lower()}",
        *["enable_async_tensor_parallel = true"] * _fuses(options),
        f"context_parallel_degree = {context}",
        *[f"expert_parallel_degree = {experts}"] * (experts > 1),
        *(_staged(options, stages, micro) if stages > 1 else ()),
        *_rotated(asked),
        "",
        "[activation_checkpoint]",
        *checkpoints,
        f"early_stop = {str(asked.changes.get('activations.early_stop', False)).lower()}",
        "",
        "[compile]",
        *_compiled(asked),
        "",
    ]
    return "\n".join(lines)


def _fuses(options: Mapping[str, object]) -> bool:
    """Return True if matrix products are fused with collectives of tokens (async TP)."""
    return options.get("enable_async_tensor_parallel", False) is True


def _model(asked: ConfigQuestion) -> list[str]:
    """Return the model section: its flavor if torchtitan has one, and the float8 converter."""
    converters = ['converters = ["float8"]'] if asked.train.get("float8") else []
    for name, flavors in FLAVORS.items():
        for flavor, model in flavors.items():
            if model == asked.model:
                return ["[model]", f'name = "{name}"', f'flavor = "{flavor}"', *converters]
    return ["# No flavor of torchtitan is this model: give it one.", "[model]", *converters]


def _staged(options: Mapping[str, object], stages: int, micro: int) -> list[str]:
    """Return the stages of a pipeline, their schedule and their micro-batch size."""
    lines = [
        f"pipeline_parallel_degree = {stages}",
        f'pipeline_parallel_schedule = "{options.get("pipeline_schedule", "1F1B")}"',
        f"pipeline_parallel_microbatch_size = {micro}",
    ]
    for name in ("first_stage_less_layers", "last_stage_less_layers"):
        if (layers := options.get(name)) is not None:
            lines.append(f"pipeline_parallel_{name} = {layers}")
    return lines


def _compiled(asked: ConfigQuestion) -> list[str]:
    """Return the compile section, and the float8 section with its scaling."""
    parts = ["model"] if asked.train.get("compile") else []
    parts += ["loss"] if asked.train.get("loss") == "fused" else []
    lines = [f"enable = {str(bool(parts)).lower()}"]
    lines += [f"components = {json.dumps(parts)}"] if parts else []
    if scale := asked.train.get("float8"):
        lines += ["", "[quantize.linear.float8]"]
        lines += ['filter_fqns = ["output"]']
        if asked.options.get(
            "enable_fsdp_float8_all_gather", False
        ):  # torchtitan accepts no recipe_name with it
            lines += ["enable_fsdp_float8_all_gather = true"]
            lines += ["precompute_float8_dynamic_scale_for_fsdp = true"]
        else:
            lines += [f'recipe_name = "{scale}"']
    return lines


def _norm(asked: ConfigQuestion) -> str:
    """Return the maximum norm of gradients; without clipping, one that is never reached."""
    return "1e30  # it always clips" if asked.clip_norm is None else str(float(asked.clip_norm))
