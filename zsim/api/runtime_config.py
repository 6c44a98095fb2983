"""Write settings as the configuration of the runtime itself.

DeepSpeed's file holds every setting except the tensor degree and checkpointing, which belong to
the model; `zero.deepspeed_config` reads it back. FSDP is configured in code. Megatron-LM has
arguments, nanotron a file; zsim writes those of parallelism, batches and recomputation.
`zero.megatron_arguments` reads the arguments of Megatron-LM back.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zsim.mistake import MistakeError

TORCH_DTYPE: Final = {
    "bf16": "torch.bfloat16",
    "pure_bf16": "torch.bfloat16",  # the model itself is cast before wrapping
    "fp16": "torch.float16",
    "fp32": "torch.float32",
}

CHECKPOINTS: Final = {
    "none": "keep all activations",
    "operations": "keep attention and every second product of matrices (torchtitan's selective op)",
    "full": "checkpoint every block",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigQuestion:
    """A setting, and the other values of its configuration.

    Attributes:
        changes: the setting, by key of a scenario.
        precision: precision of forward and backward.
        sequences: sequences of a step.
        sequence_length: tokens of a sequence.
        clip_norm: maximum norm of the gradients; None to disable clipping.
        model: name of the model.
        train: `[train]` of the scenario without the setting.
    """

    changes: Mapping[str, object]
    precision: str
    sequences: int
    sequence_length: int
    clip_norm: float | None = None
    model: str = ""
    train: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def runtime(self) -> str:
        """Name of the runtime."""
        return str(self.changes["zero.emulate"])

    @property
    def options(self) -> dict[str, object]:
        """Options of the runtime that are not at their defaults, by name."""
        prefix = f"zero.{self.runtime}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.changes.items()
            if key.startswith(prefix)
        }

    def number(self, key: str) -> int:
        """Return the integer at a key of the scenario; 1 if the key is missing."""
        found = self.changes.get(key, 1)
        assert isinstance(found, int)
        return found

    @property
    def checkpointing(self) -> str:
        """The kind of activation checkpointing."""
        return str(self.changes["activations.checkpointing"])


def config_text(asked: ConfigQuestion) -> str:
    """Return the setting as the configuration of its runtime.

    Raises:
        MistakeError: zsim cannot write the configuration of this runtime.
    """
    writer = WRITERS.get(asked.runtime)
    if writer is None:
        known = ", ".join(WRITERS)
        raise MistakeError(f"--config: {asked.runtime} has no configuration here; {known} have")
    return writer(asked)


OF_CHECKPOINTS: Final = {"cpu_checkpointing", "checkpoint_stream"}
"""DeepSpeed options outside `zero_optimization`; the second depends on its version."""


def _deepspeed(asked: ConfigQuestion) -> str:
    zero: dict[str, object] = {"stage": asked.changes["zero.stage"]}
    for name, value in asked.options.items():
        if name in OF_CHECKPOINTS:
            continue
        table, _, inner = name.rpartition(".")
        if not table:
            zero[name] = value
            continue
        section = zero.setdefault(table, {})
        assert isinstance(section, dict)
        section[inner] = value
    found: dict[str, object] = {
        "train_batch_size": asked.sequences,
        "train_micro_batch_size_per_gpu": asked.number("train.micro_batch_size"),
        "gradient_accumulation_steps": asked.number("train.gradient_accumulation_steps"),
    }
    if asked.precision == "pure_bf16":
        flags = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
        found["bf16"] = dict.fromkeys(flags, True)
    elif asked.precision != "fp32":
        found[asked.precision] = {"enabled": True}
    if asked.options.get("cpu_checkpointing"):
        found["activation_checkpointing"] = {"cpu_checkpointing": True}
    if asked.clip_norm is not None:
        found["gradient_clipping"] = asked.clip_norm
    return json.dumps({**found, "zero_optimization": zero}, indent=2) + "\n"


def _fsdp2(asked: ConfigQuestion) -> str:
    options = asked.options
    names = ["MixedPrecisionPolicy", "fully_shard"]
    arguments = ["mesh=mesh", "mp_policy=mp_policy"]
    if options.get("offload_policy") == "cpu":
        names.insert(0, "CPUOffloadPolicy")
        arguments.append("offload_policy=CPUOffloadPolicy()")
    after = options.get("reshard_after_forward", True)
    is_freed = options.get("reshard_root_after_forward", False)
    of_root = ["reshard_after_forward=True"] if is_freed else []
    lines = [
        *_torch_head(asked, names),
        *_of_checkpoints(asked),
        f"mp_policy = MixedPrecisionPolicy(param_dtype={TORCH_DTYPE[asked.precision]})",
        "for block in model.layers:",
        f"    fully_shard(block, reshard_after_forward={after}, {', '.join(arguments)})",
        f"fully_shard(model, {', '.join([*of_root, *arguments])})",
    ]
    ahead = options.get("forward_prefetch", 0)
    if ahead:
        lines += [
            "for number, block in enumerate(model.layers):",
            f"    ahead = list(model.layers[number + 1 : number + 1 + {ahead}])",
            "    block.set_modules_to_forward_prefetch(ahead)",
        ]
    if asked.number("parallel.pipeline") > 1:
        return "\n".join([*lines, *_of_stages(asked)]) + "\n"
    if options.get("gradient_sync") == "last":
        lines += [
            "# Before each micro-batch:",
            "# model.set_requires_gradient_sync(micro_batch == micro_batches - 1)",
        ]
    return "\n".join(lines) + "\n"


def _of_stages(asked: ConfigQuestion) -> list[str]:
    """Return the code that makes the wrapped layers of a rank one or several pipeline stages."""
    count, options = asked.number("parallel.pipeline"), asked.options
    kind = str(options.get("pipeline_schedule", "1F1B"))
    chunks = options.get("pipeline_stages_per_rank", 1 if kind == "1F1B" else 2)
    assert isinstance(chunks, int)
    times = asked.number("train.gradient_accumulation_steps")
    lines = [
        "from torch.distributed.pipelining import PipelineStage",
        "from torch.distributed.pipelining.schedules import get_schedule_class",
        'pipeline = world["pipeline"]',
        'place, device = pipeline.get_local_rank(), torch.device("cuda")',
    ]
    many = "n_microbatches"
    if chunks == 1:
        return [
            *lines,
            "# model has the layers of this rank alone.",
            f"stage = PipelineStage(model, place, {count}, device, group=pipeline.get_group())",
            f'schedule = get_schedule_class("{kind}")(stage, {many}={times}, loss_fn=loss_fn)',
        ]
    places = f"[place + {count} * number for number in range({chunks})]"
    if kind == "ZBVZeroBubble":
        places = f"[place, {2 * count - 1} - place]"
    return [
        *lines,
        "# Each of chunks is wrapped as model is: the layers of a stage.",
        f"numbers = {places}",
        "stages = [",
        f"    PipelineStage(chunk, number, {count * chunks}, device,",
        "                  group=pipeline.get_group())",
        "    for number, chunk in zip(numbers, chunks)",
        "]",
        f'schedule = get_schedule_class("{kind}")(stages, {many}={times}, loss_fn=loss_fn)',
    ]


def _fsdp1(asked: ConfigQuestion) -> str:
    options = asked.options
    cuts = str(options.get("sharding_strategy", "full_shard")).upper()
    if asked.number("parallel.replicate") > 1:
        cuts = {"FULL_SHARD": "HYBRID_SHARD"}.get(cuts, "_HYBRID_SHARD_ZERO2")
    names = ["FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"]
    lines = [
        *_torch_head(asked, names),
        *_of_checkpoints(asked),
        "# block_policy wraps each block: a ModuleWrapPolicy of its class.",
        "model = FullyShardedDataParallel(",
        "    model,",
        "    device_mesh=mesh,",
        "    auto_wrap_policy=block_policy,",
        f"    sharding_strategy=ShardingStrategy.{cuts},",
        f"    mixed_precision=MixedPrecision(param_dtype={TORCH_DTYPE[asked.precision]}),",
        f"    forward_prefetch={options.get('forward_prefetch', False)},",
        f"    limit_all_gathers={options.get('limit_all_gathers', True)},",
        ")",
    ]
    if options.get("no_sync"):
        lines.append("# All micro-batches but the last of a step run in `with model.no_sync():`")
    return "\n".join(lines) + "\n"


def _torch_head(asked: ConfigQuestion, names: list[str]) -> list[str]:
    """Return the code that builds the mesh, with comments on batches and checkpointing."""
    sizes = [
        ("replicate", asked.number("parallel.replicate")),
        ("shard", asked.number("parallel.data")),
    ]
    tensor = asked.number("parallel.tensor")
    if tensor > 1:
        sizes.append(("tensor", tensor))
    if sizes[0][1] == 1:
        del sizes[0]
    if (stages := asked.number("parallel.pipeline")) > 1:
        sizes.insert(0, ("pipeline", stages))
    micro, times = (
        asked.number(f"train.{name}")
        for name in ("micro_batch_size", "gradient_accumulation_steps")
    )
    lines = [
        f"# {asked.sequences} sequences of {asked.sequence_length} tokens a step: "
        f"{times} micro-batches of {micro} on each replica.",
        f"# Activations: {CHECKPOINTS[asked.checkpointing]}.",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(names)}",
        "",
        f"world = {_mesh(sizes)}",
    ]
    sharded = [name for name, _ in sizes if name in {"replicate", "shard"}]
    inner = ", ".join(f'"{name}"' for name in sharded)
    lines.append(f"mesh = world[{inner}]")
    if tensor > 1:
        lines.append('# world["tensor"] is for parallelize_module, before what follows.')
    return [*lines, *_of_shared_sequences(asked, sizes)]


def _of_checkpoints(asked: ConfigQuestion) -> list[str]:
    """Return the code that wraps blocks with checkpoints in host memory."""
    if not asked.options.get("offload_wrapper"):
        return []
    return [
        "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints",
        "for name, block in model.layers.named_children():",
        "    block = checkpoints.offload_wrapper(checkpoints.checkpoint_wrapper(block))",
        "    model.layers.register_module(name, block)",
    ]


def _mesh(sizes: Sequence[tuple[str, int]]) -> str:
    """Return the call that builds a mesh with these axes."""
    end = "," if len(sizes) == 1 else ""
    shape = ", ".join(str(size) for _, size in sizes) + end
    words = ", ".join(f'"{name}"' for name, _ in sizes) + end
    return f'init_device_mesh("cuda", ({shape}), mesh_dim_names=({words}))'


def _of_shared_sequences(asked: ConfigQuestion, sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return the code of context parallelism: neighbours on the shard axis share sequences."""
    context = asked.number("parallel.context")
    if context == 1:
        return []
    place = [name for name, _ in sizes].index("shard")
    shard = ("shard", sizes[place][1] // context)
    split = [*sizes[:place], shard, ("context", context), *sizes[place + 1 :]]
    lines = [
        f'context = {_mesh(split)}["context"]',
        "# context_parallel(context, ...) of torch.distributed.tensor.experimental is around",
        "# forward and backward; its buffers are the tokens and the labels.",
    ]
    if asked.changes.get("parallel.context_exchange") == "ring":
        lines.append('# set_rotate_method("alltoall") of its _attention sends keys and values on.')
    return lines


UNSAID: Final = {
    "async_tensor_model_parallel_allreduce",
    "gradient_accumulation_fusion",
    "overlap_p2p_comm",
    "scatter_gather_tensors_in_pipeline",
    "tp_comm_overlap_rs",
}
"""Options of Megatron-LM whose arguments can only disable them."""


OF_MEGATRON: Final = {
    "num_layers_per_virtual_pipeline_stage": "num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
    "cpu_offloading_num_layers": "cpu-offloading-num-layers",
}
"""Arguments of Megatron-LM with the value of an option."""


def _megatron(asked: ConfigQuestion) -> str:
    if asked.options.get("allreduce_in_float32"):
        raise MistakeError("--config: Megatron-LM has no argument for allreduce_in_float32")
    found = [
        f"--tensor-model-parallel-size {asked.number('parallel.tensor')}",
        f"--micro-batch-size {asked.number('train.micro_batch_size')}",
        f"--global-batch-size {asked.sequences}",
        f"--seq-length {asked.sequence_length}",
    ]
    if asked.changes["zero.stage"]:
        found.append("--use-distributed-optimizer")
    if (stages := asked.number("parallel.pipeline")) > 1:
        found.insert(1, f"--pipeline-model-parallel-size {stages}")
    if (context := asked.number("parallel.context")) > 1:
        found.append(f"--context-parallel-size {context}")
        if asked.changes.get("parallel.context_exchange") == "all_gather":
            found.append("--cp-comm-type all_gather")  # the default is p2p, the ring
    found += [
        f"--{argument} {shlex.quote(str(value))}"
        for option, argument in OF_MEGATRON.items()
        if (value := asked.options.get(option))
    ]
    if asked.options.get("overlap_p2p_comm") is False:
        found.append("--no-overlap-p2p-communication")
    if not asked.options.get("gradient_accumulation_fusion"):
        found.append("--no-gradient-accumulation-fusion")
    if asked.options.get("tp_comm_overlap_rs") is False:
        found.append("--disable-tp-comm-overlap-rs")
    beside = ("async_tensor_model_parallel_allreduce", "tp_comm_overlap")
    if asked.number("parallel.tensor") > 1 and not any(map(asked.options.get, beside)):
        found.append("--no-async-tensor-model-parallel-allreduce")  # removed in 2026
    if asked.precision != "fp32":
        found.append(f"--{asked.precision}")
    if asked.precision == "bf16" and not asked.options.get("grad_reduce_in_fp32"):
        found.append("--grad-reduce-in-bf16")  # the default with bf16 is fp32
    found.append(f"--clip-grad {asked.clip_norm or 0.0}")  # the default is 1.0
    found += [
        f"--{name.replace('_', '-')}"
        for name, value in asked.options.items()
        if value is True and name not in UNSAID
    ]
    if asked.checkpointing == "full":
        found += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    return " \\\n".join(found) + "\n"


def _nanotron(asked: ConfigQuestion) -> str:
    options = asked.options
    mode = str(options.get("tp_mode", "all_reduce")).upper()
    gather = str(options.get("tp_recompute_allgather", True)).lower()
    return "\n".join(
        [
            "optimizer:",
            f"  zero_stage: {asked.changes['zero.stage']}",
            "parallelism:",
            f"  dp: {asked.number('parallel.data')}",
            f"  pp: {asked.number('parallel.pipeline')}",
            f"  tp: {asked.number('parallel.tensor')}",
            f"  tp_mode: {mode}",
            f"  tp_recompute_allgather: {gather}",
            f"  recompute_layer: {str(asked.checkpointing == 'full').lower()}",
            "tokens:",
            f"  sequence_length: {asked.sequence_length}",
            f"  micro_batch_size: {asked.number('train.micro_batch_size')}",
            "  batch_accumulation_per_replica: "
            f"{asked.number('train.gradient_accumulation_steps')}",
            "",
        ]
    )


WRITERS: Final[Mapping[str, Callable[[ConfigQuestion], str]]] = {
    "deepspeed": _deepspeed,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
    "nanotron": _nanotron,
}
