"""The emulated FSDP1 issues the collectives of PyTorch's own `FullyShardedDataParallel`."""

import pytest
from covering import covering
from emulated_strategies import FSDP1_OPTIONS
from fsdp_order import of_awkward, of_gpt

from zsim.dtype import DType
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp1.options import FSDP1

OPTIONS = {name: runtime for name, (_, runtime) in FSDP1_OPTIONS.items()}
MANY = ("fsdp1", "fsdp1 shard_grad_op", "fsdp1 no sync")
"""Options that are recorded with replicas in the suite."""


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("options", "ranks"), covering(OPTIONS, {"2 ranks": 2, "64 ranks": 64}))
def test_a_gpt_is_gathered_and_reduced_as_by_fsdp(options: FSDP1, ranks: int) -> None:
    ours, theirs = of_gpt(
        Strategy(
            parallel=Parallel(data=ranks),
            zero=Zero(stage=3, emulate=options),
            train=Train(gradient_accumulation_steps=2),
        )
    )
    assert len(theirs) >= 10
    assert ours == theirs


@pytest.mark.matrix(6)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_awkward_sizes_and_tied_weights_are_gathered_and_reduced_as_by_fsdp(
    options: FSDP1, ranks: int
) -> None:
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
def test_hybrid_sharding_all_reduces_each_shard_as_fsdp_does(options: FSDP1) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2, replicate=2),
        zero=Zero(stage=3, emulate=options),
        train=Train(gradient_accumulation_steps=2),
    )
    ours, theirs = of_gpt(strategy)
    assert any(each.kind == "all_reduce" for each in theirs)
    assert ours == theirs


@pytest.mark.parametrize("reduce", [None, DType.FP32])
def test_formats_on_the_wire_are_those_of_fsdp(reduce: DType | None) -> None:
    options = FSDP1(reduce_dtype=reduce)
    ours, theirs = of_awkward(
        Strategy(
            parallel=Parallel(data=4),
            zero=Zero(stage=3, emulate=options),
            train=Train(precision=Precision.BF16),
        )
    )
    assert ours == theirs
