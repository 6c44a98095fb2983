from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_training import (
    BOUND,
    STEPS,
    WIDTH,
    Case,
    all_by_fsdp,
    by_plain_loop,
    by_schedule,
    distance,
    grid,
    trained_on_ranks,
    whole_grid,
)

from zsim.backend.backend import RefusedError
from zsim.schedule.operation import Copy, Operation
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.learning_rate import LearningRates
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim.strategy.zero_knobs import FusedBuffers, Keep
from zsim_torch.supervise.ranks import RankPool


def alike(case: Case) -> Case:
    """The case that trains to the same end: stage, buckets and checkpointing do not matter."""
    strategy = case.strategy
    return replace(
        case,
        strategy=Strategy(
            parallel=Parallel(data=strategy.parallel.data),
            zero=Zero(stage=0),
            train=Train(
                gradient_accumulation_steps=strategy.train.gradient_accumulation_steps,
                optimizer=strategy.train.optimizer,
                precision=strategy.train.precision,
            ),
        ),
    )


@pytest.mark.parametrize(
    ("ranks", "cases_of", "share"),
    [
        (1, grid, slice(0, None, 3)),
        (2, grid, slice(None)),
        (3, grid, slice(1, None, 3)),
        (4, grid, slice(2, None, 3)),
        *(
            pytest.param(ranks, whole_grid, slice(None), marks=pytest.mark.long)
            for ranks in (1, 2, 3, 4)
        ),
    ],
)
def test_every_stage_trains_as_one_process_and_as_fsdp_do(
    ranks: int, cases_of: Callable[[int], list[Case]], share: slice
) -> None:
    cases = cases_of(ranks)[share]
    kinds = list(dict.fromkeys(alike(case) for case in cases))
    with RankPool(ranks) as pool:
        found = trained_on_ranks(pool, cases)[0]
        by_fsdp = dict(zip(kinds, pool.run(all_by_fsdp, kinds)[0], strict=True))
    plain = {case: by_plain_loop(case) for case in kinds}
    for case, result in zip(cases, found, strict=True):
        before, after, losses = plain[alike(case)]
        bound = BOUND[case.strategy.train.precision]
        assert distance(result.parameters, after, before) <= bound, case
        assert distance(result.parameters, by_fsdp[alike(case)], before) <= bound, case
        assert result.losses == pytest.approx(losses, rel=10 * bound), case


def drop_a_bias_gradient(made: Schedule) -> Schedule:
    """`made` without the second micro-batch's gradient of the bias of unit "middle"."""
    (program,) = made.programs

    def planted(operation: Operation) -> Operation:
        if not isinstance(operation, Copy) or "mb1/middle/add" not in operation.id:
            return operation
        size = operation.source.size - WIDTH  # the bias is last
        return replace(
            operation,
            source=replace(operation.source, size=size),
            target=replace(operation.target, size=size),
        )

    step = tuple(planted(operation) for operation in program.step)
    assert step != program.step
    return replace(made, programs=(replace(program, step=step),))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP64])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), Adam(epsilon=1e-5)],
)
def test_one_bias_gradient_dropped_in_one_micro_batch_exceeds_the_bounds(
    stage: int, precision: Precision, optimizer: SGD | Adam
) -> None:
    strategy = Strategy(
        zero=Zero(stage=stage, reduce_once=True),
        train=Train(gradient_accumulation_steps=3, precision=precision, optimizer=optimizer),
    )
    case = Case(strategy, steps=STEPS)
    before, after, _ = by_plain_loop(case)
    assert distance(by_schedule(case).parameters, after, before) <= BOUND[precision]
    planted = by_schedule(case, drop_a_bias_gradient(case.schedule()))
    assert distance(planted.parameters, after, before) > 100 * BOUND[precision]


ADAM = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1)
BIASES = (ParameterGroup(parameters=("*.bias",), rule=replace(ADAM, weight_decay=0.0)),)
KNOBS = (
    Strategy(zero=Zero(stage=3, prefetch_units=0, reductions_in_flight=0)),
    Strategy(zero=Zero(stage=3, prefetch_units=3, reductions_in_flight=5)),
    Strategy(zero=Zero(stage=3, gathered_elements=50)),
    Strategy(zero=Zero(stage=3, keep_after_forward=Keep.EVERYTHING)),
    Strategy(zero=Zero(stage=3, reduce_once=True)),
    Strategy(zero=Zero(stage=3, host_ahead_units=1)),
    Strategy(zero=Zero(stage=3, bucket_elements=1)),
    Strategy(zero=Zero(stage=3), train=Train(clip_norm=0.05)),
    Strategy(zero=Zero(stage=0), train=Train(groups=BIASES)),
    Strategy(zero=Zero(stage=1, bucket_elements=50), train=Train(groups=BIASES, clip_norm=0.05)),
    Strategy(zero=Zero(stage=3), train=Train(groups=BIASES)),
    Strategy(zero=Zero(stage=2, reductions_in_flight=0, host_ahead_units=1)),
    Strategy(zero=Zero(stage=2, bucket_elements=50, reduce_once=True)),
    Strategy(zero=Zero(stage=1, bucket_elements=1), train=Train(clip_norm=0.05)),
    Strategy(zero=Zero(stage=0, bucket_elements=50), train=Train(clip_norm=0.05)),
    Strategy(
        zero=Zero(stage=3),
        activations=Activations(checkpointing=Checkpointing.FULL),
        offload=Offload(checkpoints=MemoryTier.HOST),
    ),
    Strategy(
        zero=Zero(stage=2, contiguous=True, reduce_once=True),
        activations=Activations(checkpointing=Checkpointing.FULL),
    ),
    Strategy(
        zero=Zero(stage=1, contiguous=True, fused_buffers=FusedBuffers.MODEL),
        activations=Activations(checkpointing=Checkpointing.FULL),
        offload=Offload(checkpoints=MemoryTier.HOST),
    ),
)


@pytest.mark.parametrize("poison", [True, pytest.param(False, marks=pytest.mark.long)])
def test_no_knob_changes_what_is_trained_and_nothing_reads_poison(*, poison: bool) -> None:
    """Whoever reads what was freed, or what nobody wrote, trains other values with poison only."""
    cases = [
        Case(
            knobs.but(
                {
                    "parallel.data": 2,
                    "train.gradient_accumulation_steps": 2,
                    "train.precision": Precision.FP64,
                    "train.optimizer": ADAM,
                }
            ),
            steps=STEPS,
            poison=poison,
        )
        for knobs in KNOBS
    ]
    with RankPool(2) as pool:
        found = trained_on_ranks(pool, cases)[0]
    for case, result in zip(cases, found, strict=True):
        before, after, _ = by_plain_loop(case)
        assert distance(result.parameters, after, before) <= BOUND[Precision.FP64], case


@pytest.mark.parametrize("stage", [0, 2])
def test_a_learning_rate_that_is_given_is_that_of_its_step(stage: int) -> None:
    rates = LearningRates(peak=0.1, warmup_steps=2, decay_steps=4, minimum=0.01)
    given = Adam(learning_rate=LEARNING_RATE, epsilon=1e-5)
    case = Case(
        Strategy(
            zero=Zero(stage=stage),
            train=Train(precision=Precision.FP64, optimizer=given, learning_rates=rates),
        )
    )
    before, after, _ = by_plain_loop(case)
    result = by_schedule(case)
    assert distance(result.parameters, after, before) <= BOUND[Precision.FP64]
    assert result.scalars[LEARNING_RATE] == rates.at(case.steps - 1)


def test_a_learning_rate_that_nobody_gives_is_refused() -> None:
    case = Case(
        Strategy(zero=Zero(stage=0), train=Train(optimizer=SGD(learning_rate=LEARNING_RATE)))
    )
    with pytest.raises(RefusedError, match="given: learning_rate: missing"):
        by_schedule(case)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_half_formats_train_near_the_full_one(precision: Precision) -> None:
    cases = [
        Case(
            Strategy(
                parallel=Parallel(data=2),
                zero=Zero(stage=stage, bucket_elements=60),
                activations=Activations(checkpointing=Checkpointing.FULL),
                train=Train(
                    gradient_accumulation_steps=2,
                    precision=precision,
                    optimizer=SGD(learning_rate=0.1),
                    clip_norm=0.5,
                    loss_scale=LossScale(initial=1024.0),
                ),
            )
        )
        for stage in (0, 1, 2, 3)
    ]
    with RankPool(2) as pool:
        found = trained_on_ranks(pool, cases)[0]
    before, after, _ = by_plain_loop(
        replace(cases[0], strategy=cases[0].strategy.but({"train.precision": Precision.FP32}))
    )
    # A gradient of 8 bits of mantissa (bf16) is off by up to 2^-9, sums of them by some more.
    bound = 0.05 if precision is Precision.BF16 else 0.01
    for case, result in zip(cases, found, strict=True):
        assert distance(result.parameters, after, before) <= bound, case


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    case = Case(
        Strategy(
            zero=Zero(stage=2),
            train=Train(
                precision=Precision.FP16,
                optimizer=SGD(learning_rate=0.1),
                loss_scale=LossScale(initial=2.0**30, backoff=2.0**-10),
            ),
        ),
        steps=3,
    )
    result = by_schedule(case)
    assert result.scalars == {
        "step": 1,
        "skipped_steps": 2,
        "good_steps": 1,
        "loss_scale": 2.0**10,
    }
    before, _, _ = by_plain_loop(Case(Strategy(zero=Zero(stage=0))))
    skipped = by_schedule(replace(case, steps=2)).parameters
    assert all(torch.equal(skipped[name], before[name]) for name in before)
    assert not any(torch.equal(result.parameters[name], before[name]) for name in before)


def test_the_loss_scale_grows_after_enough_good_steps() -> None:
    case = Case(
        Strategy(
            zero=Zero(stage=1),
            train=Train(precision=Precision.FP16, loss_scale=LossScale(initial=4.0, interval=2)),
        ),
        steps=5,
    )
    assert by_schedule(case).scalars["loss_scale"] == 16.0
