"""Ranks that share sequences exchange keys and values, gathered or around a ring, and gradients."""

from collections.abc import Iterator

import pytest
from covering import covering
from exact_training import proves_and_trains
from faults.schedules import changed, without
from fitting import fitting

from zsim.analysis.schedule_plan import plan
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT, Llama
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    AllGather,
    Communication,
    Free,
    Operation,
    PointToPoint,
    ReduceScatter,
    Reduction,
    Send,
    Together,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.execution import ContextExchange, Execution
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

LLAMA = Llama(
    layers=2,
    hidden_size=8,
    attention_heads=4,
    key_value_heads=2,
    sequence_length=12,
    vocab_size=6,
)
GPT_BESIDE = GPT(
    layers=2,
    hidden_size=8,
    attention_heads=2,
    sequence_length=12,
    vocab_size=7,
    parallel_residual=True,
    dropout=0.1,
)
BASE = Strategy(
    parallel=Parallel(data=4, context=2),
    zero=Zero(stage=3),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
EXCHANGES = {str(each): each for each in ContextExchange}
AXES = {
    "two groups": Parallel(data=4, context=2),
    "a group of three": Parallel(data=3, context=3),
    "tensor": Parallel(data=2, context=2, tensor=2),
    "replicas": Parallel(data=2, context=2, replicate=2),
}
ORDERS: dict[str, Zero] = {
    "stage 0": Zero(stage=0),
    "stage 2, tokens cut": Zero(stage=2, sequence_parallel=True),
    "stage 3": Zero(stage=3, bucket_elements=200),
    "FSDP2": Zero(stage=3, emulate=FSDP2()),
    "Megatron-LM": Zero(stage=1, emulate=Megatron(sequence_parallel=True)),
}
CHECKPOINTS = {each: {"activations.checkpointing": each} for each in ("none", "full")}
SHAPES = {"Llama": LLAMA, "GPT": GPT_BESIDE}


def made_of(shape: Llama | GPT, strategy: Strategy) -> tuple[Model, Schedule]:
    model = fitting(replace(shape, execution=strategy.execution), strategy)
    return model, make_schedule(model, strategy)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("exchange", "axes", "zero", "checkpoints", "shape"),
    covering(EXCHANGES, AXES, ORDERS, CHECKPOINTS, SHAPES),
)
def test_every_rank_trains_on_its_tokens_what_plain_data_parallelism_does(
    exchange: ContextExchange,
    axes: Parallel,
    zero: Zero,
    checkpoints: dict[str, object],
    shape: Llama | GPT,
) -> None:
    parallel = axes.but(context_exchange=exchange)
    strategy = BASE.but({"parallel": parallel, "zero": zero, **checkpoints})
    model, made = made_of(shape, strategy)
    proves_and_trains(made, model, strategy)


SHARED = {"all_gather": {"all_gather", "reduce_scatter"}, "ring": {"send"}}
"""Collectives of each exchange."""


def test_keys_and_values_of_the_heads_that_there_are_go_to_every_other_rank() -> None:
    once = BASE.but({"train.gradient_accumulation_steps": 1, "parallel.context": 4})
    shape, others, layers, bf16, fp32 = replace(LLAMA, sequence_length=16), 3, LLAMA.layers, 2, 4
    own = 2 * 16 // 4 * shape.shared_heads * shape.head_width  # keys, and values
    for checkpointing, runs in (("none", 2), ("full", 3)):
        strategy = once.but({"activations.checkpointing": checkpointing})
        found = exchanged(shape, strategy)
        assert found == {
            "all_gather": runs * layers * others * own * bf16,
            "reduce_scatter": layers * others * own * bf16,
        }
        ring = exchanged(shape, strategy.but({"parallel.context_exchange": "ring"}))
        assert ring == {"send": layers * others * own * (runs * bf16 + fp32)}


def exchanged(shape: Llama, strategy: Strategy) -> dict[str, int]:
    """Bytes that a rank sends to those that share its sequences, as a plan shows them."""
    model, made = made_of(shape, strategy)
    said = [each for each in plan(made, model).wire_bytes or () if each.group == "context"]
    promised = made.contract.wire_bytes or ()
    assert said == [each for each in promised if each.group == "context"]
    return {each.collective: each.bytes for each in said}


def test_a_ring_holds_keys_of_two_other_ranks_and_a_gather_those_of_all() -> None:
    strategy = BASE.but({"parallel": Parallel(data=3, context=3), "train.clip_norm": None})
    for exchange in ContextExchange:
        _, made = made_of(LLAMA, strategy.but({"parallel.context_exchange": exchange}))
        (program,) = made.programs
        alive = most = 0
        for operation in program.step:
            size = others_keys(made, operation)
            alive += size
            most = max(most, alive)
        own = program.by_name["block0/keys"].elements
        assert alive == 0
        assert most == own * (3 if exchange is ContextExchange.ALL_GATHER else 2)


def others_keys(made: Schedule, operation: Operation) -> int:
    """Elements of other ranks' keys that an operation takes, or gives back."""
    name = getattr(operation, "buffer", "")
    if "/keys/" not in name or "gradient" in name:
        return 0
    size = made.programs[0].by_name[name].elements
    return -size if isinstance(operation, Free) else size


def test_the_next_keys_come_while_a_rank_attends_to_those_that_are_there() -> None:
    parallel = Parallel(data=3, context=3, context_exchange=ContextExchange.RING)
    _, made = made_of(LLAMA, BASE.but({"parallel": parallel}))
    (program,) = made.programs
    order = [each.id for each in program.step]
    prefix = "step/forward/mb0/block0"
    for number in (1, 2):
        passed = order.index(f"{prefix}/forward{number}/pass/block0/keys/forward/from{number}")
        assert order.index(f"{prefix}/forward{number}") > passed
        waits = program.by_id[f"{prefix}/forward{number + 1}"]
        assert order[passed] in getattr(waits, "after", ())


def wrong(made: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield schedules in which one thing about an exchange is wrong."""
    (program,) = made.programs
    exchanges = {
        each.id: each
        for each in program.step
        if isinstance(each, Communication | Together) and each.group == "context"
    }
    for name, each in exchanges.items():
        yield f"{name} left out", without(made, name)
        if each.after:
            yield f"{name} waits for nothing", changed(made, name, after=())
        if isinstance(each, Together):
            turned = tuple(
                replace(one, offset=-one.offset)
                for one in each.members
                if isinstance(one, PointToPoint)
            )
            yield f"{name} the other way", changed(made, name, members=turned)
        elif isinstance(each, ReduceScatter):
            yield f"{name} averages", changed(made, name, reduction=Reduction.AVERAGE)
        elif isinstance(each, AllGather):  # queries are as large
            source = replace(each.source, buffer=each.source.buffer.replace("keys", "queries"))
            yield f"{name} of queries", changed(made, name, source=source)
    for operation in walk(program.step):
        for field in ("after", "uses"):
            edges = getattr(operation, field, ())
            if not exchanges.keys().isdisjoint(edges):
                kept = tuple(each for each in edges if each not in exchanges)
                yield (
                    f"{operation.id} without {field}",
                    changed(made, operation.id, **{field: kept}),
                )


@pytest.mark.matrix(2)
@pytest.mark.parametrize("exchange", ContextExchange)
def test_an_exchange_that_is_dropped_turned_or_not_waited_for_is_found(
    exchange: ContextExchange,
) -> None:
    strategy = BASE.but(
        {
            "parallel": Parallel(data=3, context=3, context_exchange=exchange),
            "zero.stage": 0,
            "train": Train(),
        }
    )
    model, made = made_of(replace(LLAMA, layers=1), strategy)
    assert not check(made, model)
    tried = list(wrong(made))
    assert len(tried) > (20 if exchange is ContextExchange.RING else 5)
    missed = [what for what, each in tried if not check(each, model)]
    assert not missed


def test_megatron_passes_keys_around_a_ring_by_default_and_others_gather_them() -> None:
    def of(zero: Zero, **parallel: object) -> Execution:
        made = BASE.but({"zero": zero, "parallel": Parallel(data=2, context=2)})
        return made.but({f"parallel.{name}": each for name, each in parallel.items()}).execution

    megatron = Zero(stage=1, emulate=Megatron())
    assert of(megatron).exchange is ContextExchange.RING
    assert of(megatron, context_exchange="all_gather").exchange is ContextExchange.ALL_GATHER
    for zero in (Zero(stage=2), Zero(stage=3, emulate=FSDP2())):
        assert of(zero).exchange is ContextExchange.ALL_GATHER
    assert of(Zero(stage=3, emulate=FSDP2())).merges
    assert not of(megatron).merges


def test_what_is_not_modelled_of_it_is_refused_by_name() -> None:
    for changes, why in (
        ({"parallel.data": 3}, "parallel.context: 2 must divide data = 3"),
        ({"zero.secondary": 2}, "parallel.context: 2 is not modelled with zero.secondary = 2"),
        ({"zero.tiles": 2}, "zero.tiles: 2 is not modelled for context = 2"),
        (
            {
                "parallel.context_exchange": "ring",
                "activations.checkpointing": "operations",
            },
            "parallel.context_exchange: 'ring' is not modelled for checkpointing = operations",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            BASE.but(changes)
        assert str(error.value) == why
    with pytest.raises(ModelError, match=r"^parallel.context: the model is for 1 .* not 2"):
        make_schedule(fitting(LLAMA, BASE), BASE)


def test_a_send_goes_to_the_next_rank_and_back_in_backward() -> None:
    zero = Zero(stage=2, emulate=DeepSpeed())
    parallel = Parallel(data=2, context=2, context_exchange=ContextExchange.RING)
    _, made = made_of(LLAMA, BASE.but({"zero": zero, "parallel": parallel}))
    (program,) = made.programs
    sends = [
        (each.id.split("/")[1], one.offset)
        for each in program.step
        if isinstance(each, Together)
        for one in each.members
        if isinstance(one, Send)
    ]
    assert set(sends) == {("forward", 1), ("backward", -1)}
