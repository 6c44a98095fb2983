"""The scheduler's promises hold for every drawn model and strategy."""

from collections import Counter
from itertools import accumulate

import pytest
from drawn import jobs
from hypothesis import given

from zsim.analysis.schedule_plan import plan
from zsim.memory import memory_ledger
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Kind
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Parallel, Strategy, Zero


@given(jobs())
def test_operations_move_what_the_closed_form_says(job: tuple[Model, Strategy]) -> None:
    made = make_schedule(*job)
    found = plan(made, job[0])
    assert found.wire_bytes == made.contract.wire_bytes
    assert (found.host_bytes,) == made.contract.host_bytes
    assert made.contract.file_bytes in (None, found.file_bytes)
    assert (made.contract.file_bytes is not None) == job[1].offload.uses_nvme


@given(jobs())
def test_the_promised_peaks_are_the_peaks_of_the_book(job: tuple[Model, Strategy]) -> None:
    made = make_schedule(*job)
    (program,) = made.programs
    alive: Counter[str] = Counter()
    largest = dict.fromkeys((pool.name for pool in made.pools), 0)
    steps = 3 if job[1].offload.delayed_update else 1  # gradients of a step go in the next one
    for entry in memory_ledger(program, steps):
        alive[entry.pool] += entry.change_bytes
        largest[entry.pool] = max(largest[entry.pool], alive[entry.pool])
    assert {pool: size for _, pool, size in made.contract.peak_bytes} == largest
    assert plan(made, job[0]).peak.bytes == largest["device"]


@given(jobs())
def test_no_pool_of_slots_is_larger_than_what_is_used_of_it(job: tuple[Model, Strategy]) -> None:
    made = make_schedule(*job)
    peaks = {pool: size for _, pool, size in made.contract.peak_bytes}
    for pool in made.pools:
        if pool.slot_bytes is not None and job[1].offload.buffers is None:
            assert pool.capacity_bytes is not None
            assert peaks.get(pool.name, 0) <= pool.capacity_bytes


@pytest.mark.one_commit_in(6)
@given(jobs())
def test_generating_twice_gives_equal_schedules(job: tuple[Model, Strategy]) -> None:
    assert make_schedule(*job) == make_schedule(*job)


@given(jobs())
def test_model_state_is_the_formula_of_the_paper_with_padding(job: tuple[Model, Strategy]) -> None:
    """(parameters + gradients + optimizer state), each whole or a 1/data share, section 3.1."""
    model, strategy = job
    made = make_schedule(model, strategy)
    if strategy.zero.stage > 1 and strategy.zero.reduce_once:
        return  # whole gradients collect beside the shards; the test below has them
    padded = sum(layout.elements for layout in made.layouts)
    share = {
        stage: strategy.parallel.data if strategy.zero.stage >= stage else 1 for stage in (1, 2, 3)
    }
    width, wide = (
        dtype.size_bytes
        for dtype in (strategy.train.precision.compute, strategy.train.precision.optimizer)
    )
    state = sum((strategy.train.precision.has_master, strategy.moments))
    on_device = strategy.offload.optimizer is MemoryTier.DEVICE
    held = padded * width // share[3] if strategy.offload.parameters is MemoryTier.DEVICE else 0
    expected = held
    if on_device or strategy.zero.contiguous:
        expected += padded * width // share[2]
    if on_device:
        expected += padded * wide * state // share[1]
    else:
        ends = accumulate(layout.elements for layout in made.layouts)
        stays = max([0, *(end for end in ends if end <= strategy.offload.device_share * padded)])
        expected += stays * wide * (1 + strategy.moments) // share[1]
        expected += 0 if strategy.zero.contiguous else stays * width // share[2]
    assert plan(made, model).model_state_bytes == expected


@given(jobs())
def test_whole_gradients_collect_where_reduction_happens_once(job: tuple[Model, Strategy]) -> None:
    model, strategy = job
    (program,) = make_schedule(model, strategy).programs
    collected = [buffer for buffer in program.buffers if buffer.name.endswith("/accumulated")]
    collects = (
        strategy.zero.stage > 1
        and strategy.zero.reduce_once
        and strategy.train.gradient_accumulation_steps > 1
    )
    assert bool(collected) == (collects and bool(model.parameters))
    assert all(buffer.kind is Kind.GRADIENT for buffer in collected)


def test_a_schedule_has_the_same_size_on_400_and_on_400_000_ranks() -> None:
    model = gpt(
        GPT(layers=125, hidden_size=64, attention_heads=4, sequence_length=8, vocab_size=64),
        micro_batch_size=1,
    )
    small, large = (
        make_schedule(model, Strategy(parallel=Parallel(data=data), zero=Zero(stage=3)))
        for data in (400, 400_000)
    )
    assert len(small.programs[0].step) == len(large.programs[0].step)
    assert len(small.programs[0].buffers) == len(large.programs[0].buffers)
