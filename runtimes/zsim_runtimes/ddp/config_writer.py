"""A setting of DistributedDataParallel as code."""

from typing import Final

from zsim.runtimes.config import ConfigQuestion
from zsim_runtimes.ddp.options import OF_POWER_SGD, CommunicationHook
from zsim_runtimes.torch_code import CHECKPOINTS

AUTOCAST: Final = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
HOOKS: Final = "torch.distributed.algorithms.ddp_comm_hooks"
FLAGS: Final = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")


def write(asked: ConfigQuestion) -> str:
    """Return the code that wraps a model as a setting does."""
    options = asked.options
    micro, times = (
        asked.number(f"train.{name}")
        for name in ("micro_batch_size", "gradient_accumulation_steps")
    )
    lines = [
        f"# {asked.sequences} sequences of {asked.sequence_length} tokens a step: "
        f"{times} micro-batches of {micro} on each replica.",
        f"# Activations: {CHECKPOINTS[asked.checkpointing]}.",
    ]
    if asked.precision == "pure_bf16":
        lines.append("# The model itself is bf16.")
    elif asked.precision in AUTOCAST:
        lines.append(f'# Forward runs in torch.autocast("cuda", {AUTOCAST[asked.precision]}).')
    hook = str(options.get("comm_hook", "none"))
    is_low_rank = hook == CommunicationHook.POWER_SGD
    if is_low_rank:
        lines.append(f"from {HOOKS}.powerSGD_hook import PowerSGDState, powerSGD_hook")
    elif hook != "none":
        lines.append(f"from {HOOKS}.default_hooks import {hook}_hook")
    lines += [
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        "model = DistributedDataParallel(",
        "    model,",
        "    device_ids=[local_rank],",
    ]
    if cap := options.get("bucket_cap_mb"):
        lines.append(f"    bucket_cap_mb={cap},")
    lines += [f"    {flag}={options.get(flag, False)}," for flag in FLAGS]
    if not options.get("broadcast_buffers"):
        lines.append("    forward_sync_buffers=False,")
    lines.append(")")
    if is_low_rank:
        lines.append("state = PowerSGDState(")
        lines.append("    process_group=None,")
        lines += [f"    {name}={options[name]}," for name in OF_POWER_SGD if name in options]
        lines += [")", "model.register_comm_hook(state, powerSGD_hook)"]
    elif hook != "none":
        lines.append(f"model.register_comm_hook(None, {hook}_hook)")
    if times > 1 and options.get("no_sync", True):
        lines.append("# All micro-batches but the last of a step run in `with model.no_sync():`")
    return "\n".join(lines) + "\n"
