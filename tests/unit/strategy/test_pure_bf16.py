"""States in bf16 without a master: what is kept, what an update moves, who has it."""

from collections import Counter
from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from megatron_pipelines import SHAPE

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.proof import check
from zsim.runtimes.fsdp1.options import FSDP1
from zsim.runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train


def strategy_of(zero: Zero, precision: Precision = Precision.PURE_BF16) -> Strategy:
    return Strategy(
        parallel=Parallel(data=2),
        zero=zero,
        train=Train(gradient_accumulation_steps=2, precision=precision, clip_norm=1.0),
    )


def written(strategy: Strategy) -> Schedule:
    return make_schedule(fitting(SHAPE, strategy), strategy)


STATES = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)


def state_bytes(program: Program) -> Counter[Kind]:
    found = Counter[Kind]()
    for buffer in program.buffers:
        if buffer.name in program.persistent and buffer.kind in STATES:
            found[buffer.kind] += buffer.size_bytes
    return found


@pytest.mark.parametrize(
    "zero",
    [
        Zero(stage=3, emulate=FSDP2(reduce_dtype=DType.FP32)),
        Zero(stage=3, emulate=FSDP2(offload_policy=OffloadPolicy.CPU)),
        Zero(stage=3, emulate=FSDP1()),
        Zero(stage=1),
        Zero(stage=3),
    ],
)
def test_training_in_bf16_alone_is_proved(zero: Zero) -> None:
    strategy = strategy_of(zero)
    model = fitting(SHAPE, strategy)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_states_are_six_bytes_for_each_parameter_and_their_update_moves_half_as_much() -> None:
    zero = Zero(stage=3, emulate=FSDP2(reduce_dtype=DType.FP32))
    moved: list[int] = []
    kept: list[int] = []
    for precision in (Precision.PURE_BF16, Precision.BF16):
        (program,) = written(strategy_of(zero, precision)).programs
        kept.append(state_bytes(program).total())
        moved.append(
            sum(
                kernel.bytes
                for each in walk(program.step)
                if isinstance(each, Compute) and each.action is Action.UPDATE
                for kernel in each.kernels
            )
        )
    # A rank's half of 2 for the parameter and 2 for each moment of Adam; as FSDP2 has it in mixed
    # precision, 4 and 4 each.
    assert (kept[0] * 2, moved[0] * 2) == (kept[1], moved[1])
    elements = sum(each.elements for each in fitting(SHAPE, strategy_of(zero)).parameters)
    assert kept[0] >= 6 * elements / 2
    assert kept[0] - 6 * elements / 2 < 6 * 2 * 100  # padding


def test_moments_in_bf16_beside_masters_in_fp32_are_found() -> None:
    strategy = strategy_of(Zero(stage=1), Precision.BF16)
    made = written(strategy)

    def narrowed(program: Program) -> Program:
        buffers = tuple(
            replace(each, dtype=DType.BF16) if each.kind is Kind.MOMENT else each
            for each in program.buffers
        )
        return replace(program, buffers=buffers)

    found = check(
        replace(made, programs=tuple(map(narrowed, made.programs))), fitting(SHAPE, strategy)
    )
    assert "formats" in {each.invariant for each in found}


@pytest.mark.parametrize(
    ("zero", "changes", "why"),
    [
        (
            Zero(stage=1, emulate=Megatron()),
            {},
            "train.precision: 'pure_bf16' is not modelled for Megatron",
        ),
        (
            Zero(stage=1),
            {"offload.optimizer": "host"},
            "train.precision: 'pure_bf16' is not modelled for offload.optimizer = host",
        ),
    ],
)
def test_where_it_is_not_modelled_it_is_refused(
    zero: Zero, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_of(zero, Precision.BF16).but({**changes, "train.precision": "pure_bf16"})
    assert why in str(caught.value)
