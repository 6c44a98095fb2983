"""Every schedule trains exactly what plain data parallelism does, whatever takes how long."""

import pytest
from drawn import chains, jobs, models, zero_strategies
from drawn_examples import examples
from drawn_timings import DrawnTiming, timings
from emulated_strategies import CHECKPOINTED, EMULATED, OFFLOADED
from emulated_strategies import strategy as emulating
from exact_training import STEPS, trained, trains
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_files import small_files

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.values import train

Drawn = tuple[Model, Strategy]
overflows = st.frozensets(st.integers(0, STEPS - 1), max_size=2)


@pytest.mark.one_commit_in(6)
@examples(20)
@given(jobs(max_data=3), timings(), overflows)
def test_every_stage_trains_what_plain_data_parallelism_does(
    job: Drawn, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    trains(*job, timing, overflow_steps)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=1000)
@given(jobs(), timings(), overflows)
def test_a_thousand_drawn_schedules_train_it(
    job: Drawn, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    trains(*job, timing, overflow_steps)


SIDE_BY_SIDE = GPT(
    layers=2,
    hidden_size=4,
    attention_heads=2,
    sequence_length=2,
    vocab_size=3,
    parallel_residual=True,
)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_blocks_side_by_side_train_it_on_a_tensor_axis(checkpointing: Checkpointing) -> None:
    """Three segments read what a block is given: each contributes to its gradient."""
    strategy = Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=3),
        activations=Activations(checkpointing=checkpointing),
        train=Train(gradient_accumulation_steps=2),
    )
    model = gpt(SIDE_BY_SIDE, micro_batch_size=1, tensor=2, precision=strategy.train.precision)
    result = trained(make_schedule(model, strategy), model, train(model, strategy, STEPS), None)
    assert result.is_right, result


@st.composite
def hybrid_jobs(draw: st.DrawFn) -> Drawn:
    """States sharded inside a group and replicated, or kept a second time on fewer ranks."""
    strategy = draw(zero_strategies(max_data=2))
    hybrid = strategy.but({"parallel.replicate": 2})
    if strategy.zero.stage == 3 and draw(st.booleans()):
        hybrid = strategy.but(
            {"parallel.data": 4, "zero.secondary": 2, "parallel.replicate": draw(st.integers(1, 2))}
        )
    return draw(st.one_of(models(hybrid), chains(hybrid))), hybrid


@pytest.mark.one_commit_in(9)
@examples(8)
@given(hybrid_jobs(), timings(), overflows)
def test_hybrid_sharding_trains_it_too(
    job: Drawn, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    trains(*job, timing, overflow_steps)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", EMULATED)
@settings(max_examples=2)
@given(data=st.data(), timing=timings(), overflow_steps=overflows)
def test_every_emulated_runtime_trains_it_too(
    name: str, data: st.DataObject, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    strategy = drawn_of(EMULATED[name], data)
    trains(data.draw(models(strategy)), strategy, timing, overflow_steps)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", OFFLOADED)
@settings(max_examples=1)
@given(data=st.data(), timing=timings(), overflow_steps=overflows)
def test_every_emulated_offload_trains_it_too(
    name: str, data: st.DataObject, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    strategy = drawn_of(OFFLOADED[name], data)
    with small_files():
        trains(data.draw(models(strategy)), strategy, timing, overflow_steps)


@pytest.mark.matrix(15)
@pytest.mark.parametrize("name", CHECKPOINTED)
@settings(max_examples=2)
@given(data=st.data(), timing=timings(), overflow_steps=overflows)
def test_checkpoints_on_the_host_train_it_too(
    name: str, data: st.DataObject, timing: DrawnTiming, overflow_steps: frozenset[int]
) -> None:
    strategy = drawn_of(CHECKPOINTED[name], data, (Checkpointing.FULL,))
    trains(data.draw(models(strategy)), strategy, timing, overflow_steps)


def drawn_of(
    named: tuple[int, RuntimeOptions],
    data: st.DataObject,
    among: tuple[Checkpointing, ...] = (Checkpointing.NONE, Checkpointing.FULL),
) -> Strategy:
    """A strategy that emulates a runtime, on up to four ranks and two replicas."""
    strategy = emulating(
        named,
        data=data.draw(st.integers(1, 4)),
        replicate=data.draw(st.integers(1, 2)),
        micro_batches=data.draw(st.integers(1, 3)),
        precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16, Precision.FP16])),
        clip_norm=data.draw(st.sampled_from([None, 1.0])),
        checkpointing=data.draw(st.sampled_from(among)),
    )
    assume(strategy is not None)
    assert strategy is not None
    return strategy
