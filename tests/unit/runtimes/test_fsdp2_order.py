"""The emulated FSDP2 issues the collectives that PyTorch's own `fully_shard` issues."""

import pytest
import torch
from covering import covering
from fsdp_order import of_awkward, of_frozen_gpt, of_gpt
from staged_fsdp import gradient_formats, of_stage

from zsim.dtype import DType
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule, Sync
from zsim_runtimes.fsdp2.order import Unshard, WeightTask
from zsim_runtimes.stage_actions import Direction, Task

OPTIONS = {
    "default": FSDP2(),
    "kept after forward": FSDP2(reshard_after_forward=False),
    "sharded over two": FSDP2(reshard_after_forward=2),
    "kept after backward": FSDP2(reshard_after_backward=False),
    "kept after both": FSDP2(reshard_after_forward=False, reshard_after_backward=False),
    "no sync": FSDP2(gradient_sync=Sync.LAST),
    "one all-reduce": FSDP2(all_reduce=Sync.LAST),
    "prefetch of two": FSDP2(forward_prefetch=2),
    "reduced in fp32": FSDP2(reduce_dtype=DType.FP32),
    "root freed": FSDP2(reshard_root_after_forward=True),
    "root and no block freed": FSDP2(
        reshard_root_after_forward=True, reshard_after_forward=False, reshard_after_backward=False
    ),
    "three inputs": FSDP2(reduce_scatter_max_input_buffers=3),
}


STAGED = FSDP2(reshard_after_forward=False, reduce_dtype=DType.FP32)
"""As torchtitan wraps the stages of a pipeline."""

MANY = ("default", "kept after forward", "sharded over two", "no sync", "root freed")
"""Options that are recorded at 1,024 ranks with awkward sizes, and with replicas, in the suite."""


SIZES = {"2 ranks": (2, 1), "8 ranks": (8, 2), "1,024 ranks": (1024, 2)}
"""Ranks and micro-batches."""


@pytest.mark.matrix(12)
@pytest.mark.parametrize(("options", "size"), covering(OPTIONS, SIZES))
def test_a_gpt_is_gathered_and_reduced_as_by_fully_shard(
    options: FSDP2, size: tuple[int, int]
) -> None:
    ranks, micro_batches = size
    ours, theirs = of_gpt(
        Strategy(
            parallel=Parallel(data=ranks),
            zero=Zero(stage=3, emulate=options),
            train=Train(gradient_accumulation_steps=micro_batches),
        )
    )
    assert len(theirs) >= 10
    assert ours == theirs


@pytest.mark.matrix(12)
@pytest.mark.parametrize("ranks", [1, 2, 8, 1024])
@pytest.mark.parametrize("name", OPTIONS)
def test_awkward_sizes_and_tied_weights_are_gathered_and_reduced_as_by_fully_shard(
    name: str, ranks: int
) -> None:
    options = OPTIONS[name]
    if (ranks == 1 and options.reshard_after_forward == 2) or (ranks > 8 and name not in MANY):
        return  # two does not divide one
    ours, theirs = of_awkward(
        Strategy(
            parallel=Parallel(data=ranks),
            zero=Zero(stage=3, emulate=options),
            train=Train(gradient_accumulation_steps=2),
        )
    )
    assert ours == theirs


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in MANY else pytest.mark.long)
        for name, options in OPTIONS.items()
    ],
)
def test_hybrid_sharding_all_reduces_each_shard_as_fully_shard_does(options: FSDP2) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2, replicate=2),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=2),
    )
    ours, theirs = of_gpt(strategy)
    assert any(each.kind == "all_reduce" for each in theirs)
    assert ours == theirs


@pytest.mark.parametrize("reduce", [None, DType.FP32])
def test_formats_on_the_wire_are_those_of_fully_shard(reduce: DType | None) -> None:
    options = FSDP2(reduce_dtype=reduce)
    ours, theirs = of_awkward(
        Strategy(
            parallel=Parallel(data=4),
            zero=Zero(stage=3, emulate=options),
            train=Train(precision=Precision.BF16),
        )
    )
    assert ours == theirs


FROZEN = {
    "a block and the embedding": ("block0.*", "embedding*"),
    "all blocks but the last": ("block[0-2].*", "embedding*"),
    "all blocks": ("block*", "embedding*"),
    "biases and the head": ("*.bias", "head.*"),
    "the root and a matrix of each block": ("embedding*", "head*", "block*.up.*"),
    "norms": ("*ln*",),
}
KEPT_ON_BOTH = FSDP2(reshard_after_forward=2, reshard_after_backward=False)


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("options", "patterns", "micro_batches"),
    covering(
        OPTIONS | {"sharded over two, kept after": KEPT_ON_BOTH},
        FROZEN,
        {"1 micro-batch": 1, "2 micro-batches": 2},
    ),
)
def test_frozen_parameters_are_gathered_and_not_reduced_as_by_fully_shard(
    options: FSDP2, patterns: tuple[str, ...], micro_batches: int
) -> None:
    """Blocks before the first gradient are gathered again for nothing, or not."""
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=micro_batches, precision=Precision.BF16),
    )
    ours, theirs = of_frozen_gpt(patterns, strategy)
    assert any(each.kind == "reduce_scatter" for each in theirs)
    assert ours == theirs


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    ("options", "pipeline", "micro_batches"),
    [
        (STAGED, 2, 3),
        (STAGED.but(reshard_after_forward=True), 4, 5),
        (STAGED.but(pipeline_schedule=PipelineSchedule.INTERLEAVED), 2, 4),
        (
            STAGED.but(
                pipeline_schedule=PipelineSchedule.INTERLEAVED,
                pipeline_stages_per_rank=4,
                reduce_dtype=None,
            ),
            2,
            4,
        ),
        (STAGED.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE), 2, 4),
        (
            STAGED.but(
                pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
                pipeline_stages_per_rank=4,
            ),
            2,
            4,
        ),
        (STAGED.but(pipeline_schedule=PipelineSchedule.ZERO_BUBBLE_IN_V), 4, 5),
    ],
)
def test_stages_of_a_pipeline_are_gathered_and_reduced_as_by_fully_shard(
    options: FSDP2, pipeline: int, micro_batches: int
) -> None:
    replicate = 2 if pipeline == 4 else 1
    strategy = Strategy(
        parallel=Parallel(pipeline=pipeline, data=4, replicate=replicate),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=micro_batches, precision=Precision.BF16),
    )
    for index in range(pipeline):
        ours, theirs = of_stage(strategy, index)
        assert theirs
        assert ours == theirs


def test_pytorch_adds_up_gradients_of_second_parts_in_their_own_format() -> None:
    """FSDP adds them to those in `reduce_dtype` in the next first part, not before."""
    options = STAGED.but(
        pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, reduce_dtype=DType.FP32
    )
    strategy = Strategy(
        parallel=Parallel(pipeline=2, data=4),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=4, precision=Precision.BF16),
    )
    forwards = [Task(Direction.FORWARD, 0, number) for number in range(3)]
    firsts = [Task(Direction.BACKWARD, 0, number) for number in range(3)]
    seconds = [WeightTask(0, number) for number in range(2)]
    found = gradient_formats(
        strategy, [Unshard(0), *forwards, firsts[0], firsts[1], *seconds, firsts[2]]
    )
    assert found[:6] == [set()] * 6
    assert found[6:] == [{torch.bfloat16}, {torch.bfloat16}, {torch.float32}]
