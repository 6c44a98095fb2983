"""States in bf16 without a master: what is kept, what an update moves, who has it."""

from collections import Counter

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from megatron_pipelines import SHAPE

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice, OffloadOptimizer, OffloadParam
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim_runtimes.megatron.options import Megatron


def strategy_of(zero: Zero, precision: Precision = Precision.PURE_BF16) -> Strategy:
    return Strategy(
        parallel=Parallel(data=2),
        zero=zero,
        train=Train(gradient_accumulation_steps=2, precision=precision, clip_norm=1.0),
    )


def written(strategy: Strategy) -> Schedule:
    return make_schedule(fitting(SHAPE, strategy), strategy)


ON_CPU = OffloadOptimizer(device=OffloadDevice.CPU)
SMALL_BUCKETS = DeepSpeed(reduce_bucket_size=60)
STATES = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)


def state_bytes(program: Program) -> Counter[Kind]:
    found = Counter[Kind]()
    for buffer in program.buffers:
        if buffer.name in program.persistent and buffer.kind in STATES:
            found[buffer.kind] += buffer.size_bytes
    return found


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    "zero",
    [
        Zero(stage=3, emulate=FSDP2(reduce_dtype=DType.FP32)),
        Zero(stage=3, emulate=FSDP2(offload_policy=OffloadPolicy.CPU)),
        Zero(stage=3, emulate=FSDP1()),
        *(Zero(stage=stage, emulate=SMALL_BUCKETS) for stage in (1, 2, 3)),
        *(
            Zero(stage=stage, emulate=SMALL_BUCKETS.but(offload_optimizer=ON_CPU))
            for stage in (1, 2, 3)
        ),
        Zero(
            stage=3,
            emulate=SMALL_BUCKETS.but(
                offload_optimizer=ON_CPU, offload_param=OffloadParam(device=OffloadDevice.CPU)
            ),
        ),
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


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        # `single_partition_of_fp32_groups` is a clone in any format: of 2 bytes for each parameter
        # a rank has all, of a master of 2 and two moments of 2 its half
        (1, DeepSpeed(), {Kind.PARAMETER: 2.0, Kind.MASTER: 1.0, Kind.MOMENT: 2.0}),
        (2, DeepSpeed(), {Kind.PARAMETER: 2.0, Kind.MASTER: 1.0, Kind.MOMENT: 2.0}),
        # sub-groups on the device are their own masters, unless these are on the CPU
        (3, DeepSpeed(), {Kind.PARAMETER: 1.0, Kind.MOMENT: 2.0}),
        (
            3,
            DeepSpeed(offload_optimizer=ON_CPU),
            {Kind.PARAMETER: 1.0, Kind.MASTER: 1.0, Kind.MOMENT: 2.0},
        ),
    ],
)
def test_deepspeed_keeps_masters_where_its_code_clones_them(
    stage: int, options: DeepSpeed, expected: dict[Kind, float]
) -> None:
    strategy = strategy_of(Zero(stage=stage, emulate=options))
    (program,) = written(strategy).programs
    elements = sum(each.elements for each in fitting(SHAPE, strategy).parameters)
    found = state_bytes(program)
    assert set(found) == set(expected)
    for kind, each in expected.items():
        assert found[kind] == pytest.approx(each * elements, rel=0.02)  # padding


def test_deepspeeds_masters_and_moments_in_bf16_are_half_of_those_in_fp32() -> None:
    zero = Zero(stage=1, emulate=DeepSpeed())
    narrow, wide = (
        state_bytes(written(strategy_of(zero, precision)).programs[0])
        for precision in (Precision.PURE_BF16, Precision.BF16)
    )
    assert narrow[Kind.PARAMETER] == wide[Kind.PARAMETER]
    for kind in (Kind.MASTER, Kind.MOMENT):
        assert 2 * narrow[kind] == wide[kind]


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
        (
            Zero(
                stage=3,
                emulate=DeepSpeed(offload_optimizer=OffloadOptimizer(device=OffloadDevice.NVME)),
            ),
            {},
            "train.precision: 'pure_bf16' is not modelled with states on NVMe",
        ),
    ],
)
def test_where_it_is_not_modelled_it_is_refused(
    zero: Zero, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_of(zero, Precision.BF16).but({**changes, "train.precision": "pure_bf16"})
    assert why in str(caught.value)
