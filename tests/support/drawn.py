"""What Hypothesis draws: models, strategies, and the schedules that they make."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from zsim.closed_form.zero_stages import kept_back
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.model.transformer import transformer
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.execution import Execution
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import BUCKET_ELEMENTS, FusedBuffers, Keep
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.megatron.options import Megatron


@st.composite
def offloads(draw: st.DrawFn, stage: int) -> Offload:
    """Tiers of optimizer and parameters: most often the device, then any pair a stage can have."""
    optimizer = draw(st.sampled_from([MemoryTier.DEVICE, MemoryTier.DEVICE, *MemoryTier]))
    if optimizer is MemoryTier.DEVICE:
        return Offload()
    delayed = optimizer is MemoryTier.HOST and draw(st.booleans())
    fetches = stage == 3 and not delayed
    return Offload(
        optimizer=optimizer,
        gradients=MemoryTier.NVME
        if optimizer is MemoryTier.NVME and draw(st.booleans())
        else MemoryTier.HOST,
        parameters=draw(st.sampled_from(MemoryTier)) if fetches else MemoryTier.DEVICE,
        delayed_update=delayed,
        warm_up_steps=draw(st.integers(0, 3)) if delayed else 0,
        sub_group_elements=draw(st.sampled_from([7, 60, 10**9])),
        pipeline_read=draw(st.booleans()),
        pipeline_write=draw(st.booleans()),
        buffers=draw(st.sampled_from([None, None, 20])),
        fetch_units=draw(st.integers(0, 3)),
        read_units=draw(st.integers(0, 3)),
    )


@st.composite
def zero_strategies(
    draw: st.DrawFn, *, max_data: int = 5, max_tensor: int = 2, tiled: bool = False
) -> Strategy:
    """Any stage with any knobs; sizes small enough that buckets split and padding appears.

    Only those that may be `tiled`, which not every model can be, cut layers.
    """
    checkpointing = draw(st.sampled_from(Checkpointing))
    optimizers: list[SGD | Adam] = [
        SGD(),
        SGD(momentum=0.875, weight_decay=0.125, nesterov=True),
        Adam(),
    ]
    optimizers += [replace(each, learning_rate=LEARNING_RATE) for each in optimizers]
    stage = draw(st.integers(0, 3))
    fused = FusedBuffers.CONSTANT if stage == 3 else draw(st.sampled_from(FusedBuffers))
    constant = fused is FusedBuffers.CONSTANT
    sizes = [1, 30, 200, 1000, 10**9] if constant else [BUCKET_ELEMENTS]
    firsts = [None, 20, 300] if constant and stage < 3 else [None]
    full = checkpointing is Checkpointing.FULL
    tensor = draw(st.integers(1, max_tensor))
    may_tile = tiled and stage == 3 and tensor == 1
    may_tile = may_tile and checkpointing is not Checkpointing.OPERATIONS
    partition = full and draw(st.booleans())
    offload = draw(offloads(stage))
    on_device = offload.optimizer is MemoryTier.DEVICE
    precisions = [each for each in Precision if on_device or each is not Precision.PURE_BF16]
    return Strategy(
        offload=offload.model_copy(
            update={"checkpoints": draw(st.sampled_from(MemoryTier))} if full else {}
        ),
        parallel=Parallel(data=draw(st.integers(1, max_data)), tensor=tensor),
        zero=Zero(
            stage=stage,
            bucket_elements=draw(st.sampled_from(sizes)),
            first_bucket_elements=draw(st.sampled_from(firsts)),
            fused_buffers=fused,
            contiguous=draw(st.booleans()),
            prefetch_units=draw(st.integers(0, 6)),
            gathered_elements=draw(st.sampled_from([None, 0, 500, 5000])),
            keep_after_forward=draw(st.sampled_from(Keep)),
            reduce_once=draw(st.booleans()),
            reductions_in_flight=draw(st.integers(0, 3)),
            host_ahead_units=draw(st.sampled_from([None, 1, 2, 5])),
            tiles=draw(st.sampled_from([1, 1, 2, 3])) if may_tile else 1,
            sequence_parallel=not partition and draw(st.booleans()),
        ),
        activations=Activations(
            checkpointing=checkpointing,
            partition=partition,
            every_nth=draw(st.sampled_from([1, 1, 2, 3])) if full else 1,
        ),
        train=Train(
            gradient_accumulation_steps=draw(st.integers(1, 3)),
            precision=draw(st.sampled_from(precisions)),
            optimizer=draw(st.sampled_from(optimizers)),
            clip_norm=draw(st.sampled_from([None, 1.0])),
        ),
    )


def small_buckets(strategy: Strategy) -> Strategy:
    """`strategy` with several buckets for a module of 100 parameters, unless it wants one."""
    if strategy.bucket_limit is None:
        return strategy
    return strategy.but({"zero.bucket_elements": min(strategy.bucket_limit, 60)})


@st.composite
def models(draw: st.DrawFn, strategy: Strategy) -> Model:
    """A small GPT that `strategy` can train; widths that ranks do not divide come up often."""
    heads = strategy.parallel.tensor * draw(st.integers(1, 2))
    tiles = strategy.zero.tiles
    layers, groups, cuts = draw(st.integers(1, 3)), None, strategy.cuts_tokens
    if calls_again(strategy) and tiles == 1:
        groups = draw(st.sampled_from([None, None, 1, layers]))
    shape = GPT(
        layers=layers,
        hidden_groups=groups,
        hidden_size=heads * draw(st.integers(-(-tiles // heads), 3)),
        attention_heads=heads,
        sequence_length=draw(st.integers(1, 4)) * (strategy.parallel.tensor if cuts else 1),
        vocab_size=draw(st.integers(1, 13)),
        tied_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.5])),
        execution=Execution(tiles=tiles),
    )
    return transformer(
        shape,
        micro_batch_size=draw(st.integers(1, 2)),
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
        sequence=cuts,
        keeps_gathered=strategy.keeps_gathered,
    )


@st.composite
def chains(draw: st.DrawFn, strategy: Strategy) -> Model:
    """Units in a row with any parameters: none, empty ones, large ones, one that several share."""
    shared = Parameter(name="shared", shape=(draw(st.integers(0, 9)),))
    units: list[Unit] = []
    source = BATCH
    dtype = strategy.train.precision.compute
    count = draw(st.integers(1, 5))
    for index in range(count):
        own = [
            Parameter(name=f"unit{index}.{number}", shape=(size,))
            for number, size in enumerate(draw(st.lists(st.integers(0, 40), max_size=3)))
        ]
        if draw(st.booleans()):
            own.insert(draw(st.integers(0, len(own))), shared)
        last = index == count - 1
        output = Value(
            name=f"unit{index}/output",
            elements=1 if last else strategy.parallel.tensor * draw(st.integers(1, 7)),
            dtype=dtype,
        )
        segment = Segment(
            inputs=(source, BATCH) if last and index else (source,),
            outputs=(output,),
            parameters=tuple(parameter.name for parameter in own),
            saved_bytes=draw(st.integers(0, 9)),
            saves_input=draw(st.booleans()),
        )
        units.append(
            Unit(
                name=f"unit{index}",
                parameters=tuple(own),
                segments=(segment,),
                checkpoint=draw(st.booleans()),
            )
        )
        source = output.name
        if not last and calls_again(strategy) and draw(st.integers(0, 3)) == 0:
            called = units[draw(st.integers(0, len(units) - 1))]
            units.append(_called_again(called, f"again{index}", source))
            source = units[-1].segments[0].outputs[0].name
    return Model(
        name="chain",
        units=tuple(units),
        batch=Value(name=BATCH, elements=4, dtype=DType.INT64, requires_gradient=False),
        tensor=strategy.parallel.tensor,
    )


def calls_again(strategy: Strategy) -> bool:
    """Whether a unit can be called several times in a forward."""
    return isinstance(strategy.zero.emulate, DeepSpeed | Megatron | None)


def _called_again(unit: Unit, name: str, source: str) -> Unit:
    """Another call of a unit, or of what it is a call of, on what was made last."""
    (segment,) = unit.segments
    output = replace(segment.outputs[0], name=f"{name}/output")
    again = replace(segment, inputs=(source,), outputs=(output,))
    return replace(unit, name=name, module=unit.module or unit.name, segments=(again,))


@st.composite
def jobs(draw: st.DrawFn, *, max_data: int = 5, max_tensor: int = 2) -> tuple[Model, Strategy]:
    """A model and a strategy that fit each other."""
    strategy = draw(zero_strategies(max_data=max_data, max_tensor=max_tensor, tiled=True))
    tiled = strategy.zero.tiles > 1
    model = draw(models(strategy) if tiled else st.one_of(models(strategy), chains(strategy)))
    return model, draw(sharing_updates(model, draw(in_groups(model, strategy))))


@st.composite
def sharing_updates(draw: st.DrawFn, model: Model, strategy: Strategy) -> Strategy:
    """The strategy, perhaps with a share of what the host updates on the device, if any fits."""
    offload = strategy.offload
    if (
        offload.optimizer is not MemoryTier.HOST
        or offload.parameters is not MemoryTier.DEVICE
        or offload.delayed_update
        or len(model.frozen) == len(model.parameters)
        or draw(st.booleans())
    ):
        return strategy
    shares = strategy.but({"offload.device_share": draw(st.sampled_from([0.25, 0.5, 0.875]))})
    return with_share_that_fits(model, shares)


def with_share_that_fits(model: Model, strategy: Strategy) -> Strategy:
    """The strategy, with no share of updates on the device where the first bucket is more."""
    if strategy.offload.device_share and not kept_back(model, strategy):
        return strategy.but({"offload.device_share": 0.0})
    return strategy


@st.composite
def in_groups(draw: st.DrawFn, model: Model, strategy: Strategy) -> Strategy:
    """The strategy, perhaps with rules of their own for some parameters of the model."""
    names = [parameter.name for parameter in model.parameters]
    if not names or draw(st.booleans()):
        return strategy
    some = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    every: Any = strategy.train.optimizer
    decays = replace(every, weight_decay=0.25)
    fast = replace(strategy.train.optimizer, learning_rate=0.5)
    groups = (
        ParameterGroup(parameters=tuple(some[:3]), rule=decays),
        *([ParameterGroup(parameters=tuple(some[3:]), rule=fast)] if some[3:] else []),
    )
    if strategy.offload.optimizer is MemoryTier.NVME:  # whose sub-groups are not cut by rules
        strategy = strategy.but({"offload.optimizer": "host", "offload.gradients": "host"})
    return strategy.but({"train.groups": groups})
