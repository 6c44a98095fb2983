"""A simulated run that carries torch tensors trains the module as one process does."""

from collections.abc import Mapping

import pytest
import torch
from drawn import small_buckets, zero_strategies
from drawn_clusters import NO_MODEL
from drawn_timings import DrawnTiming, timings
from emulated_strategies import EMULATED
from emulated_strategies import strategy as emulating
from exact_training import cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import UNITS, Case, Tiny, by_plain_loop, distance

from zsim.backend.backend import Job
from zsim.schedule.operation import Action, Compute, Read, Role
from zsim.schedule.parameter_copy import held
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des.engine.watch import Durations
from zsim_des.values import Carrier, carry
from zsim_torch.values import TorchValues

STEPS = 2
BOUND = 1e-6


def simulated(case: Case, durations: Durations | None) -> Mapping[str, torch.Tensor]:
    """Parameters as ranks hold them at the end, each element from whoever updates it."""
    made = case.schedule()
    module = Tiny(case.strategy.train.precision)

    def feed(replica: int, step: int, micro_batch: int) -> torch.Tensor:
        return case.batch(step, micro_batch, replica)

    carrier = Carrier(made, TorchValues(made, module, UNITS, feed))
    size = made.mesh.size
    job = Job(schedule=made, model=NO_MODEL, cluster=cluster(size), steps=case.steps)
    carry(job, carrier, durations=durations)
    assert carrier.faults == []
    found = {name: torch.full_like(each, float("nan")) for name, each in module.named_parameters()}
    for seat in carrier.seats:
        everything = seat.program.by_id.values()
        filed = {each.target: each.source for each in everything if isinstance(each, Read)}
        for operation in everything:
            if not isinstance(operation, Compute) or operation.action is not Action.UPDATE:
                continue
            (view,) = (
                filed.get(each.view, each.view)
                for each in operation.operands
                if each.role in (Role.MASTER, Role.PARAMETER)
            )
            buffer = seat.program.by_name[view.buffer]
            start, count = made.extent(view, seat.coordinates)
            memory = carrier.memory[seat.rank].blocks[view.buffer].memory
            for each in held(made, buffer, seat.coordinates):
                low, high = max(start, each.position), min(start + count, each.position + each.size)
                if low < high:
                    flat = found[each.parameter].view(-1)
                    shift = each.offset - each.position
                    flat[low + shift : high + shift] = memory[low:high]
    return found


def holds(case: Case, timing: DrawnTiming) -> None:
    """As one process within the bound, and to the bit whatever takes how long."""
    before, after, _ = by_plain_loop(case)
    one, other = simulated(case, None), simulated(case, timing)
    assert distance(dict(one), after, before) <= BOUND
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


AT_ONCE = zero_strategies(max_data=3, max_tensor=1).filter(
    lambda drawn: not drawn.offload.delayed_update
)
"""Delayed updates have a plain loop of their own (test_delayed_training)."""


@pytest.mark.one_commit_in(6)
@settings(max_examples=8)
@given(AT_ONCE, timings())
def test_every_stage_trains_a_module_as_one_process_does(
    drawn: Strategy, timing: DrawnTiming
) -> None:
    strategy = small_buckets(drawn).but(
        {
            "train.precision": Precision.FP64,
            "train.optimizer": SGD(learning_rate=0.1)
            if isinstance(drawn.train.optimizer, SGD)
            else Adam(learning_rate=0.01, epsilon=1e-5),
        }
    )
    holds(Case(strategy, steps=STEPS), timing)


@pytest.mark.one_commit_in(6)
@settings(max_examples=5)
@given(st.sampled_from(list(EMULATED)), timings())
def test_every_emulated_runtime_does_too(name: str, timing: DrawnTiming) -> None:
    strategy = emulating(
        EMULATED[name],
        data=2,
        replicate=2,
        micro_batches=2,
        clip_norm=0.1,
        precision=Precision.FP64,
    )
    if strategy is not None:
        holds(Case(strategy, steps=STEPS), timing)
