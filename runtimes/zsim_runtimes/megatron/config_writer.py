"""A setting as arguments of Megatron-LM; `zero.megatron_arguments` reads them back."""

import shlex
from collections.abc import Sequence
from typing import Final, cast

from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion

UNSAID: Final = {
    "async_tensor_model_parallel_allreduce",
    "gradient_accumulation_fusion",
    "overlap_p2p_comm",
    "scatter_gather_tensors_in_pipeline",
    "tp_comm_overlap_rs",
}
"""Options whose arguments can only turn them off."""

ARGUMENTS: Final = {
    "num_layers_per_virtual_pipeline_stage": "num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
    "cpu_offloading_num_layers": "cpu-offloading-num-layers",
    "cuda_graph_impl": "cuda-graph-impl",
}
"""Arguments of Megatron-LM that have the value of an option."""


DISPATCHER_OPTIONS = (
    "moe_flex_dispatcher_backend",
    "moe_deepep_num_sms",
    "moe_hybridep_num_sms",
)
"""Options of the library that exchanges tokens of experts."""


def write(asked: ConfigQuestion) -> str:
    """Return the arguments of a setting.

    Raises:
        MistakeError: there is no argument for an option.
    """
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
            found.append("--cp-comm-type all_gather")  # its default is p2p, the ring
    found += _experts(asked)
    found += [
        f"--{argument} {shlex.quote(str(value))}"
        for option, argument in ARGUMENTS.items()
        if (value := asked.options.get(option))
    ]
    found += _graphs(asked)
    if asked.options.get("overlap_p2p_comm") is False:
        found.append("--no-overlap-p2p-communication")
    if not asked.options.get("gradient_accumulation_fusion"):
        found.append("--no-gradient-accumulation-fusion")
    if asked.options.get("tp_comm_overlap_rs") is False:
        found.append("--disable-tp-comm-overlap-rs")
    beside = ("async_tensor_model_parallel_allreduce", "tp_comm_overlap")
    if asked.number("parallel.tensor") > 1 and not any(map(asked.options.get, beside)):
        found.append("--no-async-tensor-model-parallel-allreduce")  # gone since 2026
    if asked.precision != "fp32":
        found.append(f"--{asked.precision}")
    if asked.precision == "bf16" and not asked.options.get("grad_reduce_in_fp32"):
        found.append("--grad-reduce-in-bf16")  # its default with bf16 is fp32
    found.append(f"--clip-grad {asked.clip_norm or 0.0}")  # its default is 1.0
    found += [
        f"--{name.replace('_', '-')}"
        for name, value in asked.options.items()
        if value is True and name not in UNSAID
    ]
    found += _recomputed(asked)
    return " \\\n".join(found) + "\n"


def _recomputed(asked: ConfigQuestion) -> list[str]:
    """Return the arguments of recomputation."""
    if asked.checkpointing == "full":
        return [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    if asked.checkpointing != "selective":
        return []
    modules = asked.options.get("recompute_modules")
    granularity = "--recompute-granularity selective"
    if not isinstance(modules, Sequence):
        return [granularity]
    listed = modules.replace(",", " ") if isinstance(modules, str) else " ".join(map(str, modules))
    return [granularity, f"--recompute-modules {listed}"]


def _experts(asked: ConfigQuestion) -> list[str]:
    """Return the arguments of expert ranks."""
    found: list[str] = []
    if (experts := asked.number("parallel.expert")) > 1:
        kind = asked.options.get("moe_token_dispatcher_type", "alltoall")  # its own: allgather
        found += [
            f"--expert-model-parallel-size {experts}",
            f"--moe-token-dispatcher-type {kind}",
        ]
        found += [
            f"--{name.replace('_', '-')} {asked.options[name]}"
            for name in DISPATCHER_OPTIONS
            if name in asked.options
        ]
    if (shards := asked.changes.get("parallel.expert_tensor")) is not None:
        found.append(f"--expert-tensor-parallel-size {shards}")
    return found


def _graphs(asked: ConfigQuestion) -> list[str]:
    """Return the arguments of CUDA graphs other than their implementation."""
    found: list[str] = []
    if scopes := asked.options.get("cuda_graph_scope"):
        words = scopes if isinstance(scopes, str) else " ".join(cast("list[str]", scopes))
        found.append(f"--cuda-graph-scope {words.replace(',', ' ')}")
    if asked.options.get("cuda_graph_impl") not in (None, "none"):
        found.append("--te-rng-tracker")  # CUDA graphs need it
    return found
