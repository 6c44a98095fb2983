"""Check whether the torch backend can run a job; the reason names the field to change."""

from pathlib import Path

from zsim.backend.backend import Job
from zsim.config_error import bare
from zsim.model.architecture import Activation, Attention, Positions, QKNorm, Transformer
from zsim.model.experts import Experts
from zsim.model.model import Model
from zsim.schedule.operation import OF_SEGMENTS, Action, Compute, walk
from zsim.schedule.schedule import Place, Schedule
from zsim.strategy.execution import ContextExchange, Execution, Float8, Loss
from zsim.strategy.optimizer_rule import name_of
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.units import format_bytes
from zsim.zero.names import PIPELINE, TENSOR
from zsim_torch.capability import ledger_peak_bytes, of_schedule
from zsim_torch.execute import blocking_host
from zsim_torch.local_devices import memory_bytes
from zsim_torch.run_option import given_by_strategy
from zsim_torch.supervise.process_group import DeviceChoice, DeviceError, Placement, device_of
from zsim_torch.text import TextError, read_text

LOCAL_RANKS_MAX = 64
"""Maximum number of local ranks: each process takes memory and CPU time."""

SIMULATED_ALONE = (
    "norm_bias",
    "norm_weight",
    "head_bias",
    "embedding_norm",
    "norm_placement",
    "shared_norm",
)
"""Fields of a shape that no torch module implements, unless they have their default value."""

PARTS = ("latent", "sinks", "mtp_layers")
"""Parts of a shape that no torch module implements."""


def refusal(
    job: Job, *, device: DeviceChoice, torchrun: Placement | None, data: Path | None = None
) -> str | None:
    """Return why `job` cannot run here, in one line, or None.

    `torchrun` is this process's placement if torchrun started it; `data` is the file to train on.
    """
    return (
        _model(job)
        or _states(job.schedule)
        or _formats_of_states(job.schedule)
        or _compressed(job.schedule)
        or _text(job, data)
        or _ranks(job.schedule, torchrun)
        or _given(job.schedule)
        or of_schedule(job.schedule)
        or _machine(job, device, torchrun)
    )


def _states(schedule: Schedule) -> str | None:
    """Return why the states of the optimizer cannot be kept, or None."""
    strategy = schedule.contract.strategy
    if strategy is None or not strategy.train.optimizer.quantized:
        return None
    kind = name_of(strategy.train.optimizer)
    return f"train.optimizer: {kind} is simulated only, its states are in 8 bits; say adam"


def _compressed(schedule: Schedule) -> str | None:
    """Return why gradients cannot be all-reduced as the runtime does, or None."""
    strategy = schedule.contract.strategy
    runtime = None if strategy is None else strategy.zero.emulate
    where = "gradients" if runtime is None else f"zero.{runtime.table()}.comm_hook"
    for program in schedule.programs:
        for each in program.patterns:
            if isinstance(each, Compute) and each.action is Action.COMPRESS:
                return f"{where}: gradients in factors are simulated only; say none"
    return None


def look_at(data: Path) -> None:
    """Raise TextError unless the file at `data` can be read and is not empty."""
    read_text(data, 0)


def _model(job: Job) -> str | None:
    """Return why there are no modules for the units that the schedule runs, or None."""
    shape = job.model.architecture
    if shape is None:
        if not runs_units(job.schedule):
            return None
        return (
            f"model: there are no torch modules for {job.model.name}; give layers, hidden_size, "
            "attention_heads, sequence_length and vocab_size, or train a module of your own with "
            "zsim_torch.train"
        )
    if (field := _without_module(shape)) is not None:
        return field
    if shape.experts is not None and (why := _experts(job, shape.experts)) is not None:
        return why
    if shape.dropout:
        return f"model.dropout: {shape.dropout} is simulated only"
    if shape.lora is not None and shape.lora.dropout:
        return f"model.lora.dropout: {shape.lora.dropout} is simulated only; say 0"
    if shape.adapted_parts:
        found = ", ".join(shape.adapted_parts)
        return f"model.lora.targets: {found} of a joined layer are simulated only; say qkv"
    if shape.lora is not None and shape.lora.quantization is not None:
        found = shape.lora.quantization
        return f"model.lora.quantization: {found} is simulated only; remove it to train in 16 bits"
    if shape.positions is Positions.ALIBI and shape.attention is not Attention.PLAIN:
        return (
            f"model.attention: {shape.attention} has no torch module with positions alibi, "
            "say plain"
        )
    if shape.positions is Positions.ALIBI and job.model.tensor > 1:
        return (
            f"model.positions: alibi has no torch module for {job.model.tensor} ranks of "
            "parallel.tensor"
        )
    refused = _execution(shape.execution, tensor=job.model.tensor)
    return refused or _context(job, shape.execution.context)


def _without_module(shape: Transformer) -> str | None:
    """Return an error for the first feature of `shape` that no module implements, or None."""
    plain = Transformer.__dataclass_fields__
    for name in PARTS:
        if getattr(shape, name):
            return f"model.{name} is simulated only; train a module with zsim_torch.train"
    found = [name for name in SIMULATED_ALONE if getattr(shape, name) != plain[name].default]
    if shape.qk_norm is QKNorm.UNSCALED:
        found.append("qk_norm")
    if shape.activation not in (Activation.GELU, Activation.SWIGLU):
        found.append("activation")
    if shape.has_windows:
        found.append("window")
    if not found:
        return None
    return f"model.{found[0]}: {bare(getattr(shape, found[0]))} is simulated only"


def _experts(job: Job, experts: Experts) -> str | None:
    """Return why no module runs the experts of the model as they were counted, or None."""
    strategy = job.schedule.contract.strategy
    if strategy is None:
        return None
    apart = any(part.loads is not None for unit in job.model.units for part in unit.segments)
    if experts.losses and not apart and strategy.train.precision is Precision.FP16:
        name = "auxiliary_loss" if experts.auxiliary_loss else "z_loss"
        return (
            f"model.experts.{name}: true needs a loss that is not scaled, and "
            f"train.precision is {strategy.train.precision}; say bf16 or {name} = false"
        )
    parallel, runtime = strategy.parallel, strategy.zero.emulate
    execution = strategy.execution
    for line, has in (
        (
            "moe_token_dispatcher_type: allgather is simulated only; say alltoall",
            execution.gathers_experts,
        ),
        ("moe_shared_expert_overlap: true is simulated only; say false", execution.overlaps_shared),
        (
            "overlap_moe_expert_parallel_comm: true is simulated only; say false",
            execution.merges_micro_batches,
        ),
    ):
        if has and runtime is not None:
            return f"zero.{runtime.table()}.{line}"
    degrees = {"context": parallel.context, "expert_tensor": job.model.expert_tensor}
    for name, degree in degrees.items():
        if degree > 1:
            return f"parallel.{name}: {degree} is simulated only for a model with experts; say 1"
    return None


def _formats_of_states(schedule: Schedule) -> str | None:
    """Return why no optimizer keeps its states in the formats of the schedule, or None."""
    strategy = schedule.contract.strategy
    if strategy is None or strategy.keeps_plain_states:
        return None
    runtime = strategy.zero.emulate
    assert runtime is not None  # zsim's own stages keep all states in one format
    table = runtime.table()
    return f"zero.{table}.use_precision_aware_optimizer: true is simulated only"


def _execution(asked: Execution, *, tensor: int) -> str | None:
    """Return why no module runs as the model was counted, or None.

    Early stop of recomputation needs no check, since such a block saves the same tensors.
    """
    if asked.operations:
        return "activations.checkpointing: operations is simulated only"
    if asked.compiled:
        return "train.compile: true is simulated only"
    if asked.recipe is not None:
        key = "float8" if isinstance(asked.recipe, Float8) else "float4"
        return f"train.{key}: {asked.recipe} is simulated only"
    if asked.loss is not Loss.TORCH:
        return f"train.loss: {asked.loss} is simulated only"
    if asked.tiles > 1 and tensor > 1:
        return f"zero.tiles: {asked.tiles} with tensor ranks is simulated only; say 1"
    if asked.metrics:
        return f"train.metrics: {asked.metrics} must be 0, none is computed"
    for kind in RuntimeOptions.kinds():
        for flag, option in kind.execution_options.items():
            if getattr(asked, flag):
                return f"zero.{kind.table()}.{option} is simulated only"
    if asked.holds_logits:
        return "train.holds_logits: true is simulated only"
    if asked.context > 1 and asked.exchange is not ContextExchange.ALL_GATHER:
        return f"parallel.context_exchange: {asked.exchange} is simulated only, say all_gather"
    return None


def _context(job: Job, context: int) -> str | None:
    """Return why there are no modules for context parallel ranks, or None."""
    parts = {axis.name: axis.size for axis in job.schedule.mesh.axes}
    for axis in (TENSOR, PIPELINE):
        if context > 1 and parts.get(axis, 1) > 1:
            return (
                f"parallel.context: {context} has no torch module for {parts[axis]} ranks of "
                f"parallel.{axis}"
            )
    return None


def _text(job: Job, data: Path | None) -> str | None:
    """Return why the text cannot be used for the model, or None."""
    shape = job.model.architecture
    if shape is None:
        return None
    try:
        read_text(data, shape.sequence_length, vocab_size=shape.vocab_size)
    except TextError as error:
        return str(error)
    return None


def _given(schedule: Schedule) -> str | None:
    """Return why a host scalar has no value before each step, or None."""
    known = given_by_strategy(schedule)
    for scalar in schedule.scalars:
        if scalar.given and scalar.name not in known:
            return f"scalar {scalar.name}: is given before each step, and no learning_rates say it"
    return None


def runs_units(schedule: Schedule) -> bool:
    """Return True if an operation runs a unit of the model."""
    return any(
        isinstance(operation, Compute) and operation.action in OF_SEGMENTS
        for program in schedule.programs
        for operation in walk(program.step)
    )


def _ranks(schedule: Schedule, torchrun: Placement | None) -> str | None:
    ranks = schedule.mesh.size
    if torchrun is not None:
        if torchrun.ranks != ranks:
            return f"ranks: the schedule is for {ranks}, torchrun started {torchrun.ranks}"
        return None
    if ranks > LOCAL_RANKS_MAX:
        return (
            f"ranks: {ranks} must be at most {LOCAL_RANKS_MAX} on one machine; "
            "say --ranks N, or start with torchrun"
        )
    return None


def _machine(job: Job, choice: DeviceChoice, torchrun: Placement | None) -> str | None:
    """Return why this machine lacks devices or memory for its local ranks, or None."""
    schedule = job.schedule
    local = schedule.mesh.size if torchrun is None else torchrun.local_ranks
    try:
        device = device_of(choice, Placement(rank=0, ranks=local, local_rank=0, local_ranks=local))
    except DeviceError as error:
        return str(error)
    only = None if device.type == "cpu" else Place.DEVICE
    needed, available = local * ledger_peak_bytes(schedule, only), memory_bytes(device, local)
    if needed > available:
        return (
            f"{_largest_field(job.model)} needs {format_bytes(needed)} on {local} local ranks, "
            f"this machine has {format_bytes(available)} for them"
        )
    return blocking_host.refusal(schedule) if device.type == "cpu" else None


def _largest_field(model: Model) -> str:
    """Return the field to change so that the model fits, with its value."""
    shape = model.architecture
    if shape is None:
        return f"model: {model.name}"
    flows = sum(value.elements for value in model.values.values())
    if flows > model.parameter_count:
        return f"train.micro_batch_size: {model.micro_batch_size}"
    if shape.vocab_size > 12 * shape.layers * shape.hidden_size:  # of h parameters each
        return f"model.vocab_size: {shape.vocab_size}"
    if shape.layers > 1:
        return f"model.layers: {shape.layers}"
    return f"model.hidden_size: {shape.hidden_size}"
