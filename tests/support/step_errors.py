"""Errors of step times, as traces and studies have them, and features of a run."""

import json
from dataclasses import asdict, replace

from zsim.prediction.run_features import RunFeatures
from zsim.trace.trace import StepError

FEATURES = RunFeatures(
    runtime="FSDP1",
    stage=3,
    precision="bf16",
    constants="h100",
    network=True,
    states="device",
    tensor=1,
    pipeline=1,
    context=1,
    replicate=1,
    nodes=4,
    gpu_bytes_per_s=50_000_000_000,
    oversubscription=1.0,
    tokens=4096,
    width=4096,
    architecture="GPT",
    attention="flash",
    checkpointing="full",
    compiled=False,
    data=32,
    layers=32,
    spans=False,
)


def step_error(half_width: float, gpu: str = "h100") -> StepError:
    """Return an error; runs on two GPUs share none of theirs."""
    features = json.dumps(asdict(replace(FEATURES, constants=gpu)))
    return StepError(low=1 - half_width, high=1 + half_width, features=features)
