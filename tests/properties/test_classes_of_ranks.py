"""What is shown of a few ranks that stand for all is what is shown by running every one of them."""

from itertools import islice

import pytest
from drawn import jobs, with_share_that_fits
from drawn_emulated import emulated_jobs
from drawn_examples import examples
from faults.of_schedules.registry import AIMED_BY_NAME as AIMED
from hypothesis import HealthCheck, assume, example, given
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.proof.context import Context
from zsim.proof.values import shown
from zsim.runtimes.registry import make_schedule
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2

Job = tuple[Model, Strategy]
RANKS = st.integers(12, 40)
DATA = [
    "rate times 1000 in one update",
    "contribution missing",
    "not divided",
    "one rank twice, others nothing",
    "one rank divides after the reduction",
    "reduced twice",
    "mean for a sum",
    "norm of this rank alone",
    "half of an update",
    "another rate on one rank",
    "pieces of a layout swapped",
]
"""Kinds of faults of which some are at one rank alone."""


def with_ranks(model: Model, strategy: Strategy, data: int) -> Strategy:
    """The strategy with as many ranks along the data axis, or a few more.

    Padded for more ranks, the first bucket may be more than the share that stays on the device.
    """
    runtime = strategy.zero.emulate
    multiple = 1
    if isinstance(runtime, DeepSpeed):
        multiple = runtime.zero_hpz_partition_size
    elif isinstance(runtime, FSDP2) and not isinstance(runtime.reshard_after_forward, bool):
        multiple = runtime.reshard_after_forward
    many = strategy.but({"parallel.data": -(-data // multiple) * multiple})
    return with_share_that_fits(model, many)


@pytest.mark.one_commit_in(2)
@given(st.one_of(jobs(), emulated_jobs()))
@examples(40)
def test_a_right_schedule_is_proved_of_classes_and_of_every_rank(job: Job) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    assert check(made, model) == ()
    every = shown(Context.of(made, model), unfolded=True)
    assert every.findings == ()
    assert every.classes == every.ranks


def small(strategy: Strategy) -> Model:
    """A small model."""
    shape = GPT(layers=1, hidden_size=8, attention_heads=2, sequence_length=2, vocab_size=50)
    return gpt(
        shape,
        micro_batch_size=1,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
    )


def sharing_updates_barely() -> Job:
    """A job whose first bucket is 712 of 1704 elements on two ranks, and 720 of 1716 on twelve."""
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=2, bucket_elements=1000),
        offload=Offload(optimizer=MemoryTier.HOST, device_share=0.418),
    )
    return small(strategy), strategy


@pytest.mark.one_commit_in(4)
@given(st.one_of(jobs(max_tensor=1), emulated_jobs()), RANKS)
@example(sharing_updates_barely(), 12)
@examples(25, suppress_health_check=[HealthCheck.too_slow])
def test_a_right_schedule_of_many_ranks_is_proved_of_fewer(job: Job, data: int) -> None:
    model, strategy = job
    strategy = with_ranks(model, strategy, data).but({"parallel.replicate": 1})
    assume(strategy.ranks <= 100)
    made = make_schedule(model, strategy)
    context = Context.of(made, model)
    few, every = shown(context), shown(context, unfolded=True)
    assert few.findings == every.findings == ()
    assert every.classes == every.ranks == strategy.ranks
    assert few.classes <= few.ranks


@pytest.mark.parametrize("stage", range(4))
def test_classes_are_fewer_than_ranks(stage: int) -> None:
    strategy = Strategy(
        parallel=Parallel(data=40),
        zero=Zero(stage=stage),
        train=Train(gradient_accumulation_steps=2, clip_norm=1.0),
    )
    model = small(strategy)
    found = shown(Context.of(make_schedule(model, strategy), model))
    assert found.findings == ()
    assert found.classes < found.ranks == 40


@pytest.mark.one_commit_in(5)
@given(st.one_of(jobs(max_tensor=1), emulated_jobs()), RANKS, st.sampled_from(DATA), st.data())
@examples(40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_classes_and_every_rank_agree_on_faults(
    job: Job, data: int, kind: str, draws: st.DataObject
) -> None:
    model, strategy = job
    strategy = with_ranks(model, strategy, data).but(
        {"parallel.replicate": 1, "parallel.tensor": strategy.parallel.tensor}
    )
    assume(strategy.ranks <= 100)
    edits = list(islice(AIMED[kind].mutants(make_schedule(model, strategy)), 4))
    assume(edits)
    edit = draws.draw(st.sampled_from(edits))
    context = Context.of(edit.made, model)
    few, every = shown(context), shown(context, unfolded=True)
    assert bool(few.findings) == bool(every.findings), (edit.text, few.findings, every.findings)
