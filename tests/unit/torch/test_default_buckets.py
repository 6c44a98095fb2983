"""Buckets of a trainer whose strategy names none: they are reduced while backward goes on."""

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import (  # no public names
    _DEFAULT_FIRST_BUCKET_BYTES,  # pyright: ignore[reportPrivateUsage]  # torch's own default
    _compute_bucket_assignment_by_size,  # pyright: ignore[reportPrivateUsage]  # and its rule
)
from torch.nn import functional

from zsim.config_error import ConfigError
from zsim.model.model import Model
from zsim.schedule.operation import Action, AllReduce, Communication, Compute, ReduceScatter, walk
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import BUCKET_ELEMENTS, FusedBuffers
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_torch.module.description import describe
from zsim_torch.module_schedule import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LEAST_BUCKET_BYTES,
    schedule_of,
    with_buckets,
)

WIDTH, LAYERS = 1000, 9


class Loss(nn.Module):
    """Squares of what is left of a batch."""

    def forward(self, hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.mse_loss(hidden, batch[:, : hidden.shape[1]])


def module(width: int = WIDTH) -> nn.Sequential:
    """Return layers, of a million parameters each if `width` is not said, and a smaller one."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(width, 100, bias=False), Loss())


def strategy(stage: int, **knobs: object) -> Strategy:
    return Strategy.of(
        {
            "parallel": Parallel(data=2),
            "zero.stage": stage,
            **{f"zero.{name}": value for name, value in knobs.items()},
        }
    )


def schedule(given: Strategy) -> Schedule:
    """Return the schedule of a trainer of `module`."""
    made = module()
    units = [name for name, _ in made.named_children()]
    found, _, _, _ = schedule_of(made, given, units, torch.ones(2, WIDTH), None, None)
    return found


def model(width: int = WIDTH) -> Model:
    """Return what a trainer knows of `module`."""
    made = module(width)
    return describe(made, [name for name, _ in made.named_children()], torch.ones(2, width))


def reductions(given: Strategy) -> list[tuple[int, int]]:
    """Return elements of each reduction, in order, and the backwards of units issued before it."""
    found: list[tuple[int, int]] = []
    made = schedule(given)
    sizes = {each.name: each.elements for each in made.programs[0].buffers}
    backwards = 0
    for operation in walk(made.programs[0].step):
        if isinstance(operation, Compute) and operation.action is Action.BACKWARD:
            backwards += 1
        if isinstance(operation, AllReduce | ReduceScatter):
            assert isinstance(operation, Communication)
            found.append((sizes[operation.source.buffer], backwards))
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_they_are_those_of_data_parallel_training_and_reduced_while_backward_goes_on(
    stage: int,
) -> None:
    """DistributedDataParallel closes a bucket that has reached its size, ours stay below it."""
    parameters: list[torch.Tensor] = [*module().parameters()]
    groups, _ = _compute_bucket_assignment_by_size(
        parameters[::-1], [_DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    )
    # Of PyTorch: the last layer (0.4 MB) and one of 4 MB reach 1 MiB; seven of 4 MB reach 25 MiB;
    # the last one is left. Of ours: the last layer; six that stay below 25 MiB; three are left.
    assert [len(group) for group in groups] == [2, 7, 1]
    sizes, before = zip(*reductions(strategy(stage)), strict=True)
    assert sizes == (100 * WIDTH, 6 * WIDTH**2, 3 * WIDTH**2)
    # The loss has a backward, too; the first bucket is complete with the one behind it.
    assert before == (2, 2 + 6, 2 + LAYERS)


def test_in_stage_2_none_is_larger_than_the_largest_unit() -> None:
    # The first is below 1 MiB, as in the other stages; each of the others is a layer.
    sizes, before = zip(*reductions(strategy(2)), strict=True)
    assert sizes == (100 * WIDTH, *[WIDTH**2] * LAYERS)
    assert before == (2, *range(3, 3 + LAYERS))


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("width", "first", "most"),
    [
        # Units of 4 width^2 bytes: less than 512 KiB, more than 1 MiB, more than 25 MiB.
        (300, LEAST_BUCKET_BYTES // 4, LEAST_BUCKET_BYTES // 4),
        (400, 400**2, 400**2),
        (600, FIRST_BUCKET_BYTES // 4, 600**2),
        (3000, FIRST_BUCKET_BYTES // 4, BUCKET_BYTES // 4),
    ],
)
def test_in_stage_2_small_units_share_one_and_large_ones_are_cut(
    width: int, first: int, most: int
) -> None:
    zero = with_buckets(strategy(2), model(width)).zero
    assert (zero.first_bucket_elements, zero.bucket_elements) == (first, most)


def test_in_stage_2_a_unit_is_as_large_as_what_it_trains() -> None:
    made = module(600)
    made[1].requires_grad_(requires_grad=False)
    made[1] = nn.Sequential(made[1], nn.Linear(600, 600, bias=False))
    names = [name for name, _ in made.named_children()]
    found = with_buckets(strategy(2), describe(made, names, torch.ones(2, 600)))
    assert found.zero.bucket_elements == 600**2


@pytest.mark.matrix(9)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "named",
    [
        {"bucket_elements": BUCKET_ELEMENTS},
        {"first_bucket_elements": BUCKET_ELEMENTS},
        {"fused_buffers": FusedBuffers.CONSTANT},
        {"fused_buffers": FusedBuffers.MODEL},
    ],
)
def test_what_a_strategy_names_stays(stage: int, named: dict[str, object]) -> None:
    given = strategy(stage, **named)
    assert with_buckets(given, model()) is given
    # One bucket for the whole model, complete with the last backward.
    assert reductions(given) == [(LAYERS * WIDTH**2 + 100 * WIDTH, 2 + LAYERS)]


def test_stage_3_has_a_bucket_for_each_unit_as_before() -> None:
    assert with_buckets(strategy(3), model()) == strategy(3)
    sizes = [size for size, _ in reductions(strategy(3))]
    assert sizes == [100 * WIDTH, *[WIDTH**2] * LAYERS]


@pytest.mark.parametrize(
    ("stage", "fused", "why"),
    [
        (1, "model", "zero.first_bucket_elements: 9 is for fused_buffers = constant"),
        (3, "constant", "zero.first_bucket_elements: 9 is for stages 0 to 2, stage 3 reduces unit"),
    ],
)
def test_a_first_bucket_needs_others_of_another_size(stage: int, fused: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        strategy(stage, first_bucket_elements=9, fused_buffers=FusedBuffers(fused))


def test_sizes_are_bytes_of_gradients() -> None:
    narrow = Strategy(zero=Zero(stage=1), train=Train(precision=Precision.BF16))
    zero = with_buckets(narrow, model()).zero
    assert zero.first_bucket_elements == FIRST_BUCKET_BYTES // 2
    assert zero.bucket_elements == BUCKET_BYTES // 2


def test_an_emulated_runtime_has_its_own() -> None:
    emulated = Strategy.of({"zero.stage": 1, "zero.emulate": DeepSpeed()})
    assert with_buckets(emulated, model()) is emulated
