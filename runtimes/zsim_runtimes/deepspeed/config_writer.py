"""A setting as the configuration file of DeepSpeed; `zero.deepspeed_config` reads it back.

Degrees of the tensor axis and checkpoints are of the model, not of the file.
"""

import json
from typing import Final

from zsim.runtimes.config import ConfigQuestion

ELSEWHERE: Final = {"cpu_checkpointing", "checkpoint_stream", "expert_layer"}
"""Options that are not of `zero_optimization`; the second depends on the version."""


def write(asked: ConfigQuestion) -> str:
    """Return the configuration file of a setting."""
    zero: dict[str, object] = {"stage": asked.changes["zero.stage"]}
    for name, value in asked.options.items():
        if name in ELSEWHERE:
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
    native = asked.options.get("expert_layer") == "native"
    if (ranks := asked.number("parallel.expert")) > 1 and not native:
        found["expert_parallel"] = {"enabled": True, "autoep_size": ranks}
    if asked.clip_norm is not None:
        found["gradient_clipping"] = asked.clip_norm
    return json.dumps({**found, "zero_optimization": zero}, indent=2) + "\n"
