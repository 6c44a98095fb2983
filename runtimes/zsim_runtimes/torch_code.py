"""Lines of code that wrap a model with FSDP."""

from collections.abc import Sequence
from typing import Final

from zsim.runtimes.config import ConfigQuestion

TORCH_DTYPE: Final = {
    "bf16": "torch.bfloat16",
    "pure_bf16": "torch.bfloat16",  # the model itself is cast before it is wrapped
    "fp16": "torch.float16",
    "fp32": "torch.float32",
}

CHECKPOINTS: Final = {
    "none": "keep all activations",
    "operations": "keep attention and every second product of matrices (torchtitan's selective op)",
    "full": "checkpoint every block",
}


def head_lines(asked: ConfigQuestion, names: list[str]) -> list[str]:
    """Return the lines that make the mesh, with comments on batches and checkpoints."""
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


def checkpoint_lines(asked: ConfigQuestion) -> list[str]:
    """Return the lines that wrap blocks whose checkpoints are in host memory, or none."""
    if not asked.options.get("offload_wrapper"):
        return []
    return [
        "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints",
        "for name, block in model.layers.named_children():",
        "    block = checkpoints.offload_wrapper(checkpoints.checkpoint_wrapper(block))",
        "    model.layers.register_module(name, block)",
    ]


def _mesh(sizes: Sequence[tuple[str, int]]) -> str:
    """Return the source of an `init_device_mesh` call with axes `sizes`."""
    end = "," if len(sizes) == 1 else ""
    shape = ", ".join(str(size) for _, size in sizes) + end
    words = ", ".join(f'"{name}"' for name, _ in sizes) + end
    return f'init_device_mesh("cuda", ({shape}), mesh_dim_names=({words}))'


def _of_shared_sequences(asked: ConfigQuestion, sizes: Sequence[tuple[str, int]]) -> list[str]:
    """Return the lines that let neighbouring ranks of the shard axis share sequences, or none."""
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
