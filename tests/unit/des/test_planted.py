"""Gradients that are not finite, in every place on its own: who sees them, and what is compared."""

import numpy as np
import pytest
from exact_training import STEPS, cluster
from faults.schedules import changed, edited, without

from zsim.backend.backend import Job
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, Fill, Role, SetScalar
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_des.values import (
    Planted,
    Result,
    plantable,
    train,
    train_by_schedule,
    unseen,
)
from zsim_des.values.field import NOT_FINITE, product, reduced, times

SHAPE = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)
STRATEGY = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=2, bucket_elements=40),
    train=Train(
        gradient_accumulation_steps=2, precision=Precision.FP16, loss_scale=LossScale(interval=2)
    ),
)


def made(strategy: Strategy = STRATEGY) -> tuple[Model, Schedule]:
    model = gpt(
        SHAPE,
        micro_batch_size=1,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
    )
    return model, make_schedule(model, strategy)


def job(model: Model, given: Schedule) -> Job:
    return Job(schedule=given, model=model, cluster=cluster(given.mesh.size), steps=STEPS)


def ran(given: Schedule, model: Model, planted: tuple[Planted, ...] = ()) -> Result:
    expected = train(model, STRATEGY, STEPS, frozenset(each.step for each in planted))
    return train_by_schedule(job(model, given), expected, planted=planted)


def first_of(given: Schedule, action: Action) -> Compute:
    return next(
        each
        for each in given.programs[0].by_id.values()
        if isinstance(each, Compute) and each.action is action
    )


def test_what_is_not_finite_stays_so_and_what_nobody_wrote_is_another_mark() -> None:
    large, nothing = np.array([NOT_FINITE, NOT_FINITE, 3.0]), np.array([1.0, np.nan, 0.0])
    assert str(product(large, nothing)) == "[inf nan  0.]"
    assert str(reduced(large + nothing)) == "[inf nan  3.]"
    assert times(NOT_FINITE, 0.0) == NOT_FINITE
    assert np.isnan(times(NOT_FINITE, np.nan))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_anywhere_is_seen_and_the_step_skipped(stage: int) -> None:
    model, given = made(STRATEGY.but({"zero.stage": stage}))
    places = list(plantable(given, model, step=1))
    # Two replicas of two micro-batches; 98 elements over the tensor axis, and 2 of the tied
    # embedding's second use for each of its 3 rows.
    assert len(places) >= 4 * model.parameter_count
    assert unseen(job(model, given), [replace(place, step=0) for place in places]) == []
    for place in places[:: len(places) // 7]:
        assert ran(given, model, (place,)).is_right


@pytest.mark.matrix(4)
@pytest.mark.parametrize("number", [0, -2])
def test_a_flag_that_leaves_out_a_gradient_is_seen(number: int) -> None:
    model, given = made()
    finite = first_of(given, Action.FINITE)
    left = tuple(each for each in finite.operands if each is not finite.operands[number])
    wrong = changed(given, finite.id, operands=left)
    missed = unseen(job(model, wrong), list(plantable(given, model)))
    assert missed
    assert not ran(wrong, model, (missed[0],)).is_right
    assert ran(wrong, model).is_right


def test_a_flag_of_something_that_nobody_wrote_is_a_fault() -> None:
    model, given = made()
    finite = first_of(given, Action.FINITE)
    (flag,) = (each.view for each in finite.operands if each.role is Role.OUTPUT)
    wrong = changed(
        given, finite.id, operands=(*finite.operands, replace(finite.operands[0], view=flag))
    )
    assert [each.why for each in ran(wrong, model).faults[:1]] == ["reads what nobody wrote"]


@pytest.mark.one_commit_in(2)
def test_moments_scalars_and_steps_are_compared_with_those_of_one_process() -> None:
    model, given = made()
    (fill, *_) = (
        each
        for each in given.programs[0].setup
        if isinstance(each, Fill) and "moment2" in each.target.buffer
    )
    assert "moment2" in str(ran(changed(given, fill.id, value=1.0), model).differences)
    update = first_of(given, Action.UPDATE)
    assert not ran(changed(given, update.id, scalars=()), model).is_right
    for each in given.programs[0].by_id.values():
        if isinstance(each, SetScalar) and not each.id.startswith("step/skip"):
            assert f"scalar {each.scalar}" in str(ran(without(given, each.id), model).differences)


def test_every_host_may_count_wrong_alike() -> None:
    model, given = made()
    wrong = edited(
        given,
        lambda each: (
            (replace(each, add=2.0),)
            if isinstance(each, SetScalar) and each.scalar == "good_steps" and each.add
            else (each,)
        ),
    )
    assert "scalar good_steps" in str(ran(wrong, model).differences)
