"""A scenario from the YAML file of Hugging Face Accelerate (`accelerate config`).

Keys, defaults and effects of options are those of Accelerate 1.15: `utils/dataclasses.py`,
`utils/fsdp_utils.py` and `commands/config/cluster.py`. They give the runtime and its options, the
precision, degrees of parallelism and activation checkpointing. The model, batches and the optimizer
are in the training script, so the scenario gives them. If the file names a DeepSpeed file, that is
read after it. Old keys are converted as in `process_config` (`commands/config/config_args.py`).
"""

from collections.abc import Mapping
from functools import partial

from zsim.runtimes.trainer_files.option_values import read_clip, read_whole
from zsim.runtimes.trainer_files.section_options import SectionOptions
from zsim.runtimes.trainer_files.tables import (
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)
from zsim.runtimes.trainer_files.unfollowed import need_followed
from zsim.runtimes.trainer_files.yaml_text import yaml_sections
from zsim.schedule.json import shown
from zsim.strategy.activations import Checkpointing
from zsim_runtimes.deepspeed.config_autos import AUTO, CLIP_NORM
from zsim_runtimes.deepspeed.config_values import read_device
from zsim_runtimes.fsdp2.torchtitan_reader import ROTATES

FIELD = "zero.accelerate_config"

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAP = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
"""Values from `utils/constants.py`; the first two may also be numbers, counted from 1."""

WITHOUT_EFFECT = (
    *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids"),
    *("machine_rank", "main_process_", "main_training_function", "rdzv_"),
    *("same_network", "tpu_", "commands", "command_file", "mpirun_config."),
    *("fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_sync_module_states"),
    *("fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_use_orig_params"),
    *("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "deepspeed_config.zero3_"),
    *("deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path"),
    *("deepspeed_config.deepspeed_hostfile", "deepspeed_config.deepspeed_multinode_launcher"),
    *("deepspeed_config.deepspeed_exclusion_filter", "deepspeed_config.deepspeed_inclusion_filter"),
    *("fsdp_config.fsdp_min_num_params", "dynamo_config.dynamo_use_dynamic"),
    *("dynamo_config.dynamo_use_fullgraph", "dynamo_config.dynamo_use_regional_compilation"),
)
"""Prefixes of options that change neither time nor memory of a step in zsim.

`host.setup` of the scenario describes how weights are loaded before the first step.
"""


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from a configuration, and warnings about its options.

    Raises:
        TrainerFileError: it is not a configuration, requests something that is not modelled, or
            contradicts the scenario.
    """
    options = SectionOptions(FIELD, yaml_sections(FIELD, text))
    full_names(options)
    tables = given.copied("parallel", "zero", "activations", "train")
    kind = _kind(options)
    assumed: tuple[str, ...] = ()
    if options.flag("use_cpu"):
        raise options.wrong("use_cpu", value=True, why="is not modelled, only GPUs")
    if kind == "MULTI_GPU":
        _precision(options)
        set_ddp(options, "distributed_type")
        options.drop(("deepspeed_config.", "fsdp_config.", "megatron_lm_config.", "fp8_config."))
    elif kind == "FSDP":
        _precision(options)
        _axes(options)
        assumed = set_fsdp(options, _replicas(options, given))
        options.drop(("deepspeed_config.", "megatron_lm_config.", "fp8_config."))
    else:
        _deepspeed(options, clips="clip_norm" in tables["train"])
        options.drop(("fsdp_config.", "megatron_lm_config.", "fp8_config."))
    _compile(options)
    ranks = options.take("num_processes", partial(read_whole, least=1))
    machines = options.take("num_machines", partial(read_whole, least=1))
    _need_ranks(options, ranks)
    put_all(tables, options.origins.items(), source=FIELD)
    options.drop(WITHOUT_EFFECT)
    off: tuple[object, ...] = (False, "", [])
    left = {name: shown(value) for name, value in options.left.items() if value not in off}
    need_followed(FIELD, left.items())
    return ReadTables(
        tables=tables,
        origins=options.origins,
        ranks=ranks,
        machines=machines,
        assumed=assumed,
    )


KINDS = ("FSDP", "DEEPSPEED", "MULTI_GPU")


def _kind(options: SectionOptions) -> str:
    """Take the kind of training: FSDP, DeepSpeed or DDP."""
    name, allowed = "distributed_type", "must be FSDP, DEEPSPEED or MULTI_GPU"
    if name not in options.left:
        raise TrainerFileError(f"{FIELD}: {name}: missing; {allowed}")
    found = options.left.pop(name)
    if found is False:  # unquoted `NO` is false in YAML 1.1
        found = "NO"
    kind = found.upper() if isinstance(found, str) else found
    if kind not in KINDS:
        why = OTHER_KINDS.get(str(kind), allowed)
        raise options.wrong(name, found, why)
    return str(kind)


OTHER_KINDS: Mapping[str, str] = {
    "NO": "is one GPU; write parallel.data = 1 and zero.stage = 0 without this file",
    "MEGATRON_LM": f"is not read, only {', '.join(KINDS)}; write zero.megatron_arguments",
}
"""Refused values of `DistributedType`. Other accelerators than GPUs are not modelled."""


def _replicas(options: SectionOptions, given: GivenTables) -> int:
    """Return the replicas of hybrid sharding: one a machine, unless the scenario decides.

    `_init_intra_and_inter_node_groups` (torch/distributed/fsdp/_init_utils.py) shards over the GPUs
    of a machine.
    """
    found = given.value("parallel", "replicate")
    machines = options.left.get("num_machines")
    is_of_file = not given.is_sized or given.nodes == machines
    if found is None and isinstance(machines, int) and is_of_file:
        return machines
    return 1 if found is None else int(found)


def _need_ranks(options: SectionOptions, ranks: int | None) -> None:
    """Raise TrainerFileError unless a mesh has one rank for each process."""
    axes = ("replicate", "tensor", "data")
    sizes = [options.origins.get(f"parallel.{each}") for each in axes]
    if ranks is None or sizes[-1] is None:
        return
    mesh = 1
    for size in sizes:
        mesh *= size.value if size is not None and isinstance(size.value, int) else 1
    if mesh != ranks:
        raise options.wrong("num_processes", ranks, f"must be {mesh}, the ranks of its mesh")


def full_names(options: SectionOptions) -> None:
    """Add the section's prefix to options, as in `_validate_launch_command`, and update old names.

    `fsdp_backward_prefetch_policy`, used before 0.26, has no effect since; it is read as before.
    """
    if options.left.pop("fp16", False) is True:  # before mixed_precision
        options.left.setdefault("mixed_precision", "fp16")
    if (backend := options.left.pop("dynamo_backend", None)) is not None:
        options.left.setdefault("dynamo_config.dynamo_backend", backend or "NO")
    for section, prefix in (("fsdp_config", "fsdp"), ("dynamo_config", "dynamo_")):
        for name in [each for each in options.left if each.startswith(f"{section}.")]:
            key = name.removeprefix(f"{section}.")
            if not key.startswith(prefix):
                full = f"{section}.{prefix.removesuffix('_')}_{key}"
                options.left.setdefault(full, options.left.pop(name))
    old, new = (f"fsdp_config.fsdp_backward_prefetch{each}" for each in ("_policy", ""))
    if old in options.left:
        options.left.setdefault(new, options.left.pop(old))


def _compile(options: SectionOptions) -> None:
    """Set compilation of the model by Inductor, the default backend."""
    name = "dynamo_config.dynamo_backend"
    backend = options.word(name, "NO", ("NO", "INDUCTOR"))
    options.set_field("train.compile", backend == "INDUCTOR" or None, "dynamo_backend")
    mode = options.word("dynamo_config.dynamo_mode", "default")
    if backend == "INDUCTOR" and mode != "default":
        raise options.wrong("dynamo_config.dynamo_mode", mode, "is not modelled, only default")


def _precision(options: SectionOptions) -> None:
    """Set the format of forward and backward; shards and gradients of the update are fp32."""
    name = "mixed_precision"
    if options.left.get(name) is False:  # unquoted `no` is false in YAML 1.1
        options.left[name] = "no"
    found = options.word(name, "no", ("no", "fp16", "bf16", "fp8"))
    if found == "fp8":
        raise options.wrong(name, found, "is not modelled, only no, fp16 and bf16")
    options.set_field("train.precision", "fp32" if found == "no" else found, name)


def _axes(options: SectionOptions) -> None:
    """Set the degrees of `parallelism_config`, if given."""
    degrees: dict[str, int] = {}
    for name, key in (
        ("dp_replicate", "replicate"),
        ("tp", "tensor"),
        ("cp", "context"),
        ("dp_shard", "data"),
    ):
        option = f"parallelism_config.parallelism_config_{name}_size"
        found = options.take(option, partial(read_whole, least=1))
        if found is not None:
            degrees[key] = found
            shared = degrees.get("context", 1) if key == "data" else 1
            options.set_field(f"parallel.{key}", found * shared, option)
    way = "parallelism_config.parallelism_config_cp_comm_strategy"
    exchange = options.word(way, "allgather", tuple(ROTATES))
    if degrees.get("context", 1) > 1:
        options.set_field("parallel.context_exchange", ROTATES[exchange], way)
    stages = "parallelism_config.parallelism_config_sp_size"
    if (degree := options.whole(stages, 1)) != 1:
        raise options.wrong(stages, degree, "is not modelled, only 1")


def set_ddp(options: SectionOptions, option: str) -> None:
    """Set DistributedDataParallel, which accumulates without communication."""
    options.set_field("zero.emulate", "ddp", option)
    options.set_field("zero.stage", 0, option)
    # `Accelerator.accumulate` uses no_sync, except with sync_each_batch.
    options.set_field("zero.ddp.no_sync", value=True, option=option)


def _no_shard(options: SectionOptions, name: str) -> tuple[str, ...]:
    """Set DDP for FSDP1 without shards, which all-reduces in the format of the mixed precision."""
    set_ddp(options, name)
    precision = options.origins.get("train.precision")
    is_narrow = precision is not None and precision.value in ("bf16", "fp16")
    if precision is not None and is_narrow:
        options.set_field("zero.ddp.comm_hook", f"{precision.value}_compress", name)
    options.drop(("fsdp_config.",))
    return (f"{name.rpartition('.')[2]} NO_SHARD is DDP with buckets of 25 MiB (zero.ddp)",)


def set_fsdp(options: SectionOptions, replicas: int) -> tuple[str, ...]:
    """Set FSDP of version `fsdp_version`, wrapped around every block; return assumptions."""
    section = "fsdp_config"
    version = options.whole(f"{section}.fsdp_version", 1)
    if version > 2:
        raise options.wrong(f"{section}.fsdp_version", version, "must be 1 or 2")
    cuts, name = _sharding(options, section) if version == 1 else ("", "")
    if cuts == "NO_SHARD":
        return _no_shard(options, name)
    runtime = f"fsdp{version}"
    options.set_field("zero.emulate", runtime, "fsdp_version")
    options.set_field("zero.stage", 3, "fsdp_version")
    wrap = f"{section}.fsdp_auto_wrap_policy"
    policy = options.word(wrap, "NO_WRAP", WRAP)
    if policy != WRAP[0]:
        raise options.wrong(wrap, policy, f"is not modelled, only {WRAP[0]}: every block")
    recomputes = f"{section}.fsdp_activation_checkpointing"
    full = options.flag(recomputes)
    kind = Checkpointing.FULL if full else Checkpointing.NONE
    options.set_field("activations.checkpointing", kind, recomputes)
    options.set_field("activations.early_stop", full or None, recomputes)  # PyTorch's default
    _offloaded_checkpoints(options, version=version, full=full)
    if version == 1:
        _fsdp1(options, section, replicas, cuts=cuts, name=name)
    else:
        _fsdp2(options, section)
    return ()


def _offloaded_checkpoints(options: SectionOptions, *, version: int, full: bool) -> None:
    """Set the wrapper that keeps inputs of checkpointed blocks in host memory."""
    name = "fsdp_config.fsdp_activation_checkpointing_offload"
    if options.flag(name):
        if version == 1 or not full:  # as FullyShardedDataParallelPlugin
            why = "needs fsdp_version 2 and fsdp_activation_checkpointing"
            raise options.wrong(name, value=True, why=why)
        options.set_field("zero.fsdp2.offload_wrapper", value=True, option=name)


def _fsdp1(options: SectionOptions, section: str, replicas: int, *, cuts: str, name: str) -> None:
    """Set the options of `FullyShardedDataParallel`; hybrid strategies need replicas.

    `cuts` is the sharding strategy, which the option `name` gives.
    """
    is_hybrid = cuts.startswith("HYBRID")
    if is_hybrid and replicas == 1 and "parallel.replicate" not in options.origins:
        why = "needs parallel.replicate, such as one replica a node"
        raise options.wrong(name, cuts, why)
    if not is_hybrid or "parallel.replicate" not in options.origins:
        count = replicas if is_hybrid else 1
        options.set_field("parallel.replicate", count, "num_machines" if is_hybrid else name)
    states = "shard_grad_op" if cuts in {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"} else "full_shard"
    options.set_field("zero.fsdp1.sharding_strategy", states, name)
    ahead = f"{section}.fsdp_backward_prefetch"
    prefetch = _numbered(options, ahead, "NO_PREFETCH", PREFETCH)
    prefetch = {"NO_PREFETCH": "none"}.get(prefetch, prefetch.lower())
    options.set_field("zero.fsdp1.backward_prefetch", prefetch, ahead)
    forward = f"{section}.fsdp_forward_prefetch"
    options.set_field("zero.fsdp1.forward_prefetch", options.flag(forward), forward)
    offload = f"{section}.fsdp_offload_params"
    if options.flag(offload):
        why = "is not modelled with fsdp_version 1, only with 2"
        raise options.wrong(offload, value=True, why=why)
    # `Accelerator.accumulate` uses no_sync, except with sync_each_batch.
    options.set_field("zero.fsdp1.no_sync", value=True, option="fsdp_version")


def _sharding(options: SectionOptions, section: str) -> tuple[str, str]:
    """Take the strategy of FSDP1, under either name; return it with the name."""
    old, new = f"{section}.fsdp_sharding_strategy", f"{section}.fsdp_reshard_after_forward"
    name = old if old in options.left else new
    found = _numbered(options, name, "FULL_SHARD", SHARDING)
    options.left.pop(new, None)
    return found, name


def _numbered(options: SectionOptions, name: str, default: str, words: tuple[str, ...]) -> str:
    """Take one of `words`, or its number counted from 1."""
    found = options.left.get(name)
    if isinstance(found, str) and found.isdecimal() and len(found) == 1:
        found = int(found)
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= len(words):
        options.left[name] = words[found - 1]
    return options.word(name, default, words)


def _fsdp2(options: SectionOptions, section: str) -> None:
    """Set the options of `fully_shard`."""
    name = f"{section}.fsdp_reshard_after_forward"
    options.set_field("zero.fsdp2.reshard_after_forward", options.flag(name, default=True), name)
    # fsdp2_prepare_model calls fully_shard without shard_placement_fn
    options.set_field("zero.fsdp2.shard_placement_fn", "first", "fsdp_version")
    offload = f"{section}.fsdp_offload_params"
    tier = "cpu" if options.flag(offload) else "none"
    options.set_field("zero.fsdp2.offload_policy", tier, offload)
    options.set_field("zero.fsdp2.gradient_sync", "last", "fsdp_version")  # as no_sync above
    for old in ("fsdp_sharding_strategy", "fsdp_backward_prefetch"):  # obsolete, and ignored
        options.left.pop(f"{section}.{old}", None)


OFFLOADS: Mapping[str, str] = {
    "offload_optimizer_device": "zero.deepspeed.offload_optimizer.device",
    "offload_param_device": "zero.deepspeed.offload_param.device",
}


def _deepspeed(options: SectionOptions, *, clips: bool) -> None:
    """Set the DeepSpeed file, or the options that replace it.

    Without a norm in the file, Accelerate clips at 1, unless the scenario clips.
    """
    section = "deepspeed_config"
    for axis in ("sp", "cp", "tp", "dp_replicate"):
        option = f"parallelism_config.parallelism_config_{axis}_size"
        if (degree := options.whole(option, 1)) != 1:
            raise options.wrong(option, degree, "is not modelled with DEEPSPEED, only 1")
    options.drop(("parallelism_config.parallelism_config_dp_shard_size",))
    path = options.word(f"{section}.deepspeed_config_file", "")
    if path:
        options.set_field("zero.deepspeed_config", path, "deepspeed_config_file")
        # It decides what is "auto" in the file, or missing: `set_mixed_precision` of the plugin.
        if options.left.get("mixed_precision") not in (None, False, "no"):
            _precision(options)
        options.left.pop("mixed_precision", None)
        return
    _precision(options)
    options.set_field("zero.emulate", "deepspeed", "distributed_type")
    name = f"{section}.zero_stage"
    stage = options.whole(name, 2, least=0)
    if stage > 3:
        raise options.wrong(name, stage, "must be 0, 1, 2 or 3")
    options.set_field("zero.stage", stage, name)
    for option, field in OFFLOADS.items():
        device = options.take(f"{section}.{option}", read_device)
        if stage == 3 or (stage and "optimizer" in option):
            options.set_field(field, device, option)
    is_given = options.left.get(f"{section}.gradient_clipping") not in (None, AUTO)
    for key, field, read in (
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps", read_whole),
        ("gradient_clipping", "train.clip_norm", read_clip),
    ):
        option = f"{section}.{key}"
        if options.left.get(option) == AUTO:
            del options.left[option]
        options.set_field(field, options.take(option, read), option)
    if not clips and not is_given:
        options.set_field("train.clip_norm", CLIP_NORM, f"{section}.gradient_clipping")
