"""A setting of FSDP1 as code."""

from zsim.runtimes.config import ConfigQuestion
from zsim_runtimes.torch_code import TORCH_DTYPE, checkpoint_lines, head_lines


def write(asked: ConfigQuestion) -> str:
    """Return the code that wraps a model as a setting does."""
    options = asked.options
    cuts = str(options.get("sharding_strategy", "full_shard")).upper()
    if asked.number("parallel.replicate") > 1:
        cuts = {"FULL_SHARD": "HYBRID_SHARD"}.get(cuts, "_HYBRID_SHARD_ZERO2")
    names = ["FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"]
    lines = [
        *head_lines(asked, names),
        *checkpoint_lines(asked),
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
