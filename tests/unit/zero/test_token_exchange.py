"""Tokens of experts are sent to the ranks of their experts and back, and so are their gradients."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from exact_training import cluster
from faults.findings import families
from faults.schedules import edited
from fitting import fitting

from zsim.backend.backend import Job
from zsim.closed_form.exchanged_tokens import tokens_of_experts
from zsim.model.architecture import Llama
from zsim.model.experts import ExpertKernels, Experts, RouterFormat
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced
from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import AllToAll, Operation, walk
from zsim.schedule.program import ScheduleError
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.options import Megatron

EXPERTS = Experts(count=4, top_k=2, intermediate_size=6, shared_intermediate_size=4)
SHAPE = Llama(
    layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6, experts=EXPERTS
)
MEGATRON = Zero(stage=1, emulate=Megatron(overlap_grad_reduce=True, bucket_size=100))


def strategy_of(
    zero: Zero = MEGATRON,
    kept: Checkpointing = Checkpointing.NONE,
    *,
    compiled: bool = True,
    **degrees: int,
) -> Strategy:
    return Strategy(
        parallel=Parallel.of(degrees),
        zero=zero,
        activations=Activations(checkpointing=kept),
        train=Train(
            gradient_accumulation_steps=2,
            precision=Precision.BF16,
            clip_norm=1.0,
            compile=compiled,
        ),
    )


def model_of(strategy: Strategy, shape: Llama = SHAPE) -> Model:
    again = strategy.activations.checkpointing is Checkpointing.SELECTIVE
    shape = replace(shape, execution=strategy.execution, recompute_attention=again)
    model = fitting(shape, strategy)
    return in_blocks(model) if strategy.parallel.pipeline > 1 else model


@cache
def made() -> tuple[Schedule, Model]:
    """Return a schedule with two expert ranks, and two ranks of the same experts; its model."""
    strategy = strategy_of(data=4, expert=2)
    model = model_of(strategy)
    return make_schedule(model, strategy), model


def exchanges(schedule: Schedule) -> list[AllToAll]:
    (program, *_) = schedule.programs
    return [each for each in walk(program.step) if isinstance(each, AllToAll)]


@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(data=2, expert=2),
        strategy_of(data=4, expert=2, compiled=False),
        strategy_of(kept=Checkpointing.FULL, data=4, expert=4),
        strategy_of(kept=Checkpointing.SELECTIVE, data=4, expert=2, context=2),
        strategy_of(data=4, expert=2, pipeline=2),
        strategy_of(Zero(stage=2), data=4, expert=4),
        strategy_of(Zero(stage=3), Checkpointing.FULL, data=4, expert=2, replicate=2),
    ],
)
def test_experts_of_other_ranks_are_proved(strategy: Strategy) -> None:
    model = model_of(strategy)
    assert check(make_schedule(model, strategy), model) == ()


@pytest.mark.parametrize(
    "experts",
    [
        replace(EXPERTS, kernels=ExpertKernels.LOOP, shared_intermediate_size=0),
        replace(EXPERTS, router_format=RouterFormat.FP32, shared_gate=True, bias=True),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_experts_of_every_sort_are_proved_with_exchanges(
    experts: Experts, *, compiled: bool
) -> None:
    strategy = strategy_of(data=4, expert=2, compiled=compiled)
    model = model_of(strategy, replace(SHAPE, experts=experts))
    assert check(make_schedule(model, strategy), model) == ()


def test_a_layer_exchanges_tokens_and_weights_there_and_results_back() -> None:
    schedule, _ = made()
    found = Counter(
        (each.id.split("/")[1], each.source.size, each.wire.value)
        for each in exchanges(bound(schedule, Balanced()).schedule)
        if "/mb1/block1/" in each.id
    )
    copies = 4 * 2  # tokens of a rank, two experts each
    assert found == {
        (part, *kind): count
        for part in ("forward", "backward")
        for kind, count in (((copies * 8, "bf16"), 2), ((copies, "fp32"), 1))
    }


def test_a_recomputed_layer_sends_its_tokens_again_but_no_result_that_nobody_reads() -> None:
    strategy = strategy_of(kept=Checkpointing.FULL, data=4, expert=2)
    schedule = make_schedule(model_of(strategy), strategy)
    found = Counter(each.id.split("/")[1] for each in exchanges(schedule))
    assert found == {"forward": 2 * 2 * 3, "backward": 2 * 2 * (3 + 3)}


def without(name: str) -> Callable[[Operation], Iterable[Operation]]:
    """Return a change that leaves out an operation."""
    return lambda each: () if each.id == name else (each,)


@pytest.mark.parametrize(
    "name",
    [
        "step/forward/mb0/block0/forward1/exchange/block0/experts/permuted",
        "step/forward/mb1/block1/forward1/exchange/block1/experts/weights",
        "step/forward/mb0/block1/forward3/exchange/block1/experts/fc2",
        "step/backward/mb1/block1/backward3/exchange/block1/experts/fc2/gradient",
        "step/backward/mb0/block0/backward1/exchange/block0/experts/permuted/gradient",
        "step/backward/mb0/block1/backward1/exchange/block1/experts/weights/gradient",
    ],
)
def test_an_exchange_that_is_left_out_or_over_other_ranks_is_found(name: str) -> None:
    schedule, model = made()
    assert name in {each.id for each in exchanges(schedule)}
    assert "values" in families(edited(schedule, without(name)), model)
    with pytest.raises(ScheduleError, match="group expert_data, but routed is of expert"):
        edited(
            schedule,
            lambda each: (but(each, group="expert_data"),) if each.id == name else (each,),
        )


def test_counts_that_the_host_does_not_read_are_found() -> None:
    schedule, model = made()
    name = "step/forward/mb1/block0/forward1/counts/read"
    assert "counts" in families(edited(schedule, without(name)), model)


@pytest.mark.parametrize(("layer", "micro_batch"), [(0, 1), (1, 0)])
def test_counts_of_another_micro_batch_or_layer_are_found(layer: int, micro_batch: int) -> None:
    schedule, model = made()
    name = "step/forward/mb1/block1/forward1/counts/read"

    def change(each: Operation) -> Iterable[Operation]:
        other = {"layer": layer, "micro_batch": micro_batch}
        return (but(each, **other),) if each.id == name else (each,)

    assert "counts" in families(edited(schedule, change), model)


def test_blocks_of_another_layer_are_refused() -> None:
    schedule, _ = made()
    first = "step/backward/mb0/block0/backward1/exchange/block0/experts/permuted/gradient"
    second = "step/backward/mb0/block0/backward3/exchange/block0/experts/fc2/gradient"
    by_id = {each.id: each for each in exchanges(schedule)}
    with pytest.raises(ScheduleError, match="both buffers hold rows by own source"):
        edited(
            schedule,
            lambda each: (
                (but(each, source=by_id[second].source),)
                if each.id == first and isinstance(each, AllToAll)
                else (each,)
            ),
        )


@pytest.mark.parametrize(
    ("hidden", "wide", "count", "top_k", "ranks", "sent", "held"),
    [  # tokens 4096, bf16: Mixtral 8x7B, Qwen3 30B A3B, DeepSeek-V3
        (4096, 14336, 8, 2, 8, 58.7, 176.2),
        (2048, 768, 128, 8, 8, 117.4, 75.5),
        (7168, 2048, 256, 8, 64, 462.4, 176.2),
    ],
)
def test_bytes_and_parameters_of_published_models_are_those_of_their_formulas(
    *, hidden: int, wide: int, count: int, top_k: int, ranks: int, sent: float, held: float
) -> None:
    shape = Llama(
        layers=1,
        hidden_size=hidden,
        attention_heads=16,
        sequence_length=4096,
        vocab_size=64,
        experts=Experts(count=count, top_k=top_k, intermediate_size=wide),
    )
    strategy = strategy_of(data=ranks, expert=ranks).but({"train.gradient_accumulation_steps": 1})
    model = model_of(strategy, shape)
    volume, counts = tokens_of_experts(model, strategy)
    tokens = 4096 * top_k * hidden * 2 * (ranks - 1) // ranks
    weights = 4096 * top_k * 4 * (ranks - 1) // ranks
    assert volume.bytes == 4 * tokens + 2 * weights
    assert counts.bytes == (ranks - 1) * 8 * count  # a 64-bit number for each expert
    assert round(tokens / 1e6, 1) == sent
    experts = sum(each.elements for each in model.parameters if each.expert)
    assert experts == count // ranks * 3 * hidden * wide
    assert round(experts / 1e6, 1) == held
    whole = model_of(strategy.but({"parallel.expert": 1}), shape)
    assert model.parameter_count == whole.parameter_count


def test_received_tokens_have_memory_for_twice_the_mean() -> None:
    schedule, _ = made()
    (program,) = schedule.programs
    assert [(each.sent, each.maximum) for each in schedule.counts] == [(8, 16)]
    for each in exchanges(schedule):
        one, other = (program.by_name[view.buffer] for view in (each.source, each.target))
        assert one.rows is not None
        assert other.rows is not None
        sizes = {each.own: each.width for each in (one.rows, other.rows)}
        assert sizes.keys() == {RowIndex.SOURCE, RowIndex.EXPERT}
        assert {one.elements, other.elements} == {8 * one.rows.width, 16 * one.rows.width}


def test_copies_that_expert_ranks_do_not_divide_are_proved() -> None:
    strategy = strategy_of(data=4, expert=4)
    model = model_of(strategy, replace(SHAPE, sequence_length=3))
    assert check(make_schedule(model, strategy), model) == ()


def test_ranks_that_represent_others_take_as_long_as_all_of_them() -> None:
    schedule, model = made()
    schedule = bound(schedule, Balanced()).schedule
    job = Job(schedule=schedule, model=model, cluster=cluster(schedule.mesh.size), steps=2)
    assert SimBackend().step_ends_ps(job) == SimBackend(unfold=True).step_ends_ps(job)


@pytest.mark.parametrize(
    ("shape", "degrees", "why"),
    [
        (replace(SHAPE, experts=None), {"expert": 2}, "expert: 2 needs a model with experts"),
        (
            replace(SHAPE, experts=replace(EXPERTS, count=6)),
            {"expert": 4},
            "expert: 4 must divide the 6 experts",
        ),
        (
            SHAPE,
            {"expert": 2, "expert_tensor": 2},
            "expert_tensor: 2 is not modelled with tensor 1 in built blocks; use 1",
        ),
    ],
)
def test_expert_ranks_that_do_not_fit_the_model_are_refused(
    shape: Llama, degrees: dict[str, int], why: str
) -> None:
    changes = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    strategy = strategy_of(data=4).but(changes)
    with pytest.raises(ModelError, match=rf"parallel\.{why}"):
        make_schedule(model_of(strategy, shape), strategy)
