"""DeepSpeed options that a scenario does not have: without effect, reported, or refused.

Names, defaults and effects are those of DeepSpeed 0.19: `deepspeed/runtime/config.py`,
`constants.py`, `precision_config.py` and `zero/config.py`, read from source; optimizers from
memory.
"""

from collections.abc import Iterable, Mapping

DEFAULTS: Mapping[str, object] = {
    # Defaults that are not simply off: zsim emulates these values.
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "seq_parallel_communication_data_type": "fp32",
    "seq_parallel_comm_data_type": "fp32",
    "bf16.check_grad_overflow": True,
    "optimizer.params.bias_correction": True,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.dampening": 0,
    "fp16.hysteresis": 1,  # zsim's scale falls at the first overflow; DeepSpeed's default is 2
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.memory_efficient_linear": True,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.stage3_module_granularity_threshold": 0,
    "zero_optimization.stage3_model_persistence_threshold": 2**63 - 1,
}
"""Options that are ignored at this value, and refused or reported at any other."""

WITHOUT_EFFECT = frozenset(
    {
        # Printing, logging and dumps.
        "steps_per_print",
        "dump_state",
        "memory_breakdown",
        "log_level",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "zero_optimization.log_trace_cache_warnings",
        # Checkpoints on disk: how they are written, named, loaded.
        "checkpoint",
        "nebula",
        "datastates",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.pipeline_loading_checkpoint",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        # How a model is built, before the first step.
        "zero_optimization.override_module_apply",
        "zero_optimization.stage3_partition_stream_chunk_size",
        # Checks, without effect on execution.
        "zero_allow_untested_optimizer",
        "zero_optimization.ignore_unused_parameters",
        # Unused, or used only if a torch too old for DeepSpeed lacks `all_gather_into_tensor`.
        "vocabulary_size",
        "disable_allgather",
        "fp16.fused_mode",
        # Of the optimizer for bf16 without ZeRO; casts of inputs, which are token numbers here.
        "bf16.immediate_grad_update",
        "fp16.auto_cast",
        # Of Muon, which is refused.
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        # A number of slots of contiguous_memory_optimization, which is refused.
        "activation_checkpointing.number_checkpoints",
        "zero_optimization.allgather_bucket_size",
        # Access to files, and their paths; variants of CPU Adam; creation of optimizer states.
        # A copy of parameters to the device stops the host, pinned or not.
        "zero_force_ds_cpu_optimizer",
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_param.pin_memory",
        # Batches are complete in zsim: there is no last one to drop.
        "dataloader_drop_last",
    }
)
"""Options that are ignored at any value."""

NAMED: Mapping[str, str] = {
    "scheduler": "the learning rate is train.learning_rate in every step",
    "fp16.hysteresis": "the loss scale falls at the first overflow",
    "fp16.consecutive_hysteresis": "the loss scale falls at the first overflow",
    "flops_profiler": "the step that it profiles takes longer",
}
"""Options that zsim ignores, with the difference: most steps are the same, or only slower."""

CHANGING = frozenset(
    {
        *("amp", "autotuning", "compile", "compression_training"),
        *("curriculum_learning", "data_efficiency", "data_types", "eigenvalue", "elasticity"),
        *("expert_parallel", "gradient_allreduce_op", "gradient_predivide_factor"),
        *("graph_harvesting", "hybrid_engine", "managed_gradient_accumulation", "pipeline"),
        *("prescale_gradients", "progressive_layer_drop", "quantize_training"),
        *("seq_parallel_comm_data_type", "seq_parallel_communication_data_type"),
        *("sequence_parallel_size", "sparse_attention", "sparse_gradients", "tensor_parallel"),
        # Timers stop the host, so that steps take longer.
        *("wall_clock_breakdown", "comms_logger"),
        *("timers", "torch_autocast", "use_data_before_expert_parallelism", "weight_quantization"),
        *("zenflow",),
        *("fp16", "bf16", "optimizer", "aio", "activation_checkpointing", "zero_optimization"),
    }
)
"""DeepSpeed's options and sections that change a step; it ignores names it does not define."""

UNKNOWN = "no option of DeepSpeed, which ignores it"

BEFORE_STAGE_3 = frozenset(
    {
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.allgather_partitions",
        "zero_optimization.round_robin_gradients",
    }
)
"""Options of stages 1 and 2; options of stage 3 start with `stage3_`."""


def is_silent(name: str, value: object, *, stage: int | None) -> bool:
    """Return True if the option `name` changes nothing in this stage."""
    if name in WITHOUT_EFFECT:
        return True
    if name in BEFORE_STAGE_3 and stage == 3:
        return True
    if name.startswith("zero_optimization.stage3_") and stage in {1, 2}:
        return True
    if name.startswith("zero_optimization.") and stage == 0:
        return True
    if name in DEFAULTS:
        default = DEFAULTS[name]
        return value == default and isinstance(value, bool) == isinstance(default, bool)
    return _is_off(value)


def reasons(names: Iterable[str]) -> dict[str, str]:
    """Return the reason why each of `names` does not change a run; other options are absent."""
    found = {name: UNKNOWN for name in names if name.partition(".")[0] not in CHANGING}
    return {**found, **NAMED}


def _is_off(value: object) -> bool:
    """Return True if a value is false, empty, or an object that is disabled."""
    if isinstance(value, dict):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    return value is False or value == []
