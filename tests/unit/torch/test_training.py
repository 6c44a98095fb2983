from functools import cache

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import (
    BOUND,
    STEPS,
    WIDTH,
    Case,
    Parameters,
    by_plain_loop,
    by_schedule,
    by_schedule_and_fsdp,
    distance,
    grid,
    trained_on_ranks,
    whole_grid,
)

from zsim.backend.backend import RefusedError
from zsim.schedule.operation import Copy, Operation
from zsim.schedule.replace import replace
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


SHARES = {1: slice(0, None, 3), 2: slice(None), 3: slice(1, None, 3), 4: slice(2, None, 3)}
"""In the suite each case trains on two ranks, and on one other number."""
Plain = tuple[Parameters, Parameters, tuple[float, ...]]


def id_of(value: object) -> str:
    if not isinstance(value, Case):
        return f"{value}"
    strategy = value.strategy
    train = strategy.train
    kept = strategy.activations.checkpointing
    rule = type(train.optimizer).__name__
    accumulated = train.gradient_accumulation_steps
    return f"stage {strategy.zero.stage}, {rule}, {train.precision}, x{accumulated}, {kept}"


@cache
def plain(case: Case) -> Plain:
    """Train in one process what several cases are compared with."""
    return by_plain_loop(case)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks, share in SHARES.items() for case in grid(ranks)[share]],
    ids=id_of,
)
def test_every_stage_trains_as_one_process_and_as_fsdp_do(
    pool_of: SharedPools, ranks: int, case: Case
) -> None:
    assert_as_others(pool_of(ranks), case)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (1, 2, 3, 4) for case in whole_grid(ranks)]
)
def test_every_combination_trains_as_one_process_and_as_fsdp_do(
    pool_of: SharedPools, ranks: int, case: Case
) -> None:
    assert_as_others(pool_of(ranks), case)


def assert_as_others(pool: RankPool, case: Case) -> None:
    kind = alike(case)
    result, by_fsdp = pool.run(by_schedule_and_fsdp, case, case.schedule(), kind)[0]
    before, after, losses = plain(kind)
    bound = BOUND[case.strategy.train.precision]
    assert distance(result.parameters, after, before) <= bound
    assert distance(result.parameters, by_fsdp, before) <= bound
    assert result.losses == pytest.approx(losses, rel=10 * bound)


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


@pytest.mark.matrix(12)
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


def with_knobs(number: int, *, poison: bool) -> Case:
    changes: dict[str, object] = {
        "parallel.data": 2,
        "train.gradient_accumulation_steps": 2,
        "train.precision": Precision.FP64,
        "train.optimizer": ADAM,
    }
    return Case(KNOBS[number].but(changes), steps=STEPS, poison=poison)


@pytest.mark.matrix(18)
@pytest.mark.parametrize("number", range(len(KNOBS)))
def test_no_knob_changes_what_is_trained_and_nothing_reads_poison(
    pool_of: SharedPools, number: int
) -> None:
    """Whoever reads what was freed, or what nobody wrote, trains other values with poison only."""
    assert_as_plain(pool_of(2), with_knobs(number, poison=True))


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(KNOBS)))
def test_no_knob_changes_what_is_trained_without_poison(pool_of: SharedPools, number: int) -> None:
    assert_as_plain(pool_of(2), with_knobs(number, poison=False))


def assert_as_plain(pool: RankPool, case: Case) -> None:
    result = trained_on_ranks(pool, [case])[0][0]
    before, after, _ = by_plain_loop(case)
    assert distance(result.parameters, after, before) <= BOUND[Precision.FP64]


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


@pytest.mark.matrix(6)
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_half_formats_train_near_the_full_one(pool_of: SharedPools, precision: Precision) -> None:
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
    pool = pool_of(2)
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
