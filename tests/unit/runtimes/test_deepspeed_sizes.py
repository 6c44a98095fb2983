"""Sizes of DeepSpeed's sub-groups, buckets and slots: a step is right, or refused by name."""

from contextlib import nullcontext

import pytest
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_files import small_files

from zsim.config_error import ConfigError
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import (
    Aio,
    DeepSpeed,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
)

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5)
SIZES = st.sampled_from([1, 7, 100, 1000, 10**9])
COUNTS = st.sampled_from([1, 4, 5, 12, 50])
DEVICES = st.sampled_from(OffloadDevice)


def findings_of(runtime: DeepSpeed, train: Train, data: int) -> int:
    """How many things are wrong with a step of a small GPT."""
    strategy = Strategy(
        parallel=Parallel(data=data), zero=Zero(stage=3, emulate=runtime), train=train
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=train.precision)
    return len(check(make_schedule(model, strategy), model))


@pytest.mark.matrix(9)
@pytest.mark.parametrize("parameters", [OffloadDevice.NONE, OffloadDevice.NVME])
def test_sub_groups_that_are_all_too_small_for_files_stay_in_memory(
    parameters: OffloadDevice,
) -> None:
    """A step that is skipped has no gradient file to drop, and no drive."""
    runtime = DeepSpeed(
        sub_group_size=100,
        offload_optimizer=OffloadOptimizer(device=OffloadDevice.NVME),
        offload_param=OffloadParam(device=parameters),
    )
    for train in (Train(clip_norm=1.0), Train(precision=Precision.FP16)):
        assert findings_of(runtime, train, 2) == 0


runtimes = st.builds(
    DeepSpeed,
    sub_group_size=SIZES,
    reduce_bucket_size=SIZES,
    stage3_prefetch_bucket_size=SIZES,
    stage3_param_persistence_threshold=SIZES,
    stage3_max_live_parameters=SIZES,
    offload_optimizer=st.builds(
        OffloadOptimizer,
        device=DEVICES,
        buffer_count=COUNTS,
        pipeline_read=st.booleans(),
        pipeline_write=st.booleans(),
    ),
    offload_param=st.builds(
        OffloadParam, device=DEVICES, buffer_count=COUNTS, buffer_size=SIZES, max_in_cpu=SIZES
    ),
    aio=st.builds(Aio, block_size=SIZES, intra_op_parallelism=st.sampled_from([1, 2, 8])),
)
trains = st.builds(
    Train,
    precision=st.sampled_from([Precision.FP16, Precision.BF16, Precision.FP32]),
    clip_norm=st.sampled_from([None, 1.0]),
    gradient_accumulation_steps=st.integers(1, 2),
)


def holds(runtime: DeepSpeed, train: Train, data: int, *, small: bool) -> None:
    """Assert that a step is right, or refused by the name of an option."""
    found, refusal = 0, ""
    with small_files() if small else nullcontext():
        try:
            found = findings_of(runtime, train, data)
        except (ConfigError, ModelError) as error:
            refusal = str(error)
    assert found == 0
    assert not refusal or refusal.startswith("zero.deepspeed.offload_")


@pytest.mark.one_commit_in(6)
@given(runtimes, trains, st.integers(1, 3), st.booleans())
@examples(8)
def test_a_step_of_any_sizes_is_right_or_refused_by_name(
    runtime: DeepSpeed, train: Train, data: int, small: bool
) -> None:
    holds(runtime, train, data, small=small)


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(runtimes, trains, st.integers(1, 4), st.booleans())
@examples(1000)
def test_a_thousand_steps_of_any_sizes_are_right_or_refused_by_name(
    runtime: DeepSpeed, train: Train, data: int, small: bool
) -> None:
    holds(runtime, train, data, small=small)
