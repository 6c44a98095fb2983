"""Batches in floating point under mixed precision: they enter as FSDP2 lets them enter."""

from typing import NamedTuple

import pytest
import torch
from shared_ranks import SharedPools
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zsim.dtype import DType
from zsim.runtimes.registry import make_schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.description import describe
from zsim_torch.train import train

UNITS = ("body", "head")
STEPS = 4
RATE = 0.1
HALF = (Precision.BF16, Precision.FP16)


class Sample(NamedTuple):
    """A micro-batch: features, and what they are to give; which row counts."""

    features: torch.Tensor
    wanted: torch.Tensor
    row: torch.Tensor


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, sample: Sample) -> torch.Tensor:
        made: torch.Tensor = self.linear(sample.features)
        return made.tanh()


class Head(nn.Module):
    """It has no parameters, and reads the batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def forward(self, value: torch.Tensor, sample: Sample) -> torch.Tensor:
        self.seen |= {each.dtype for each in sample}
        return (value - sample.wanted)[sample.row].float().square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Body(), Head()

    def forward(self, sample: Sample) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(sample), sample)
        return loss


def sample(step: int) -> Sample:
    generator = torch.Generator().manual_seed(step)
    features, wanted = (torch.rand(4, size, generator=generator) for size in (5, 3))
    return Sample(features, wanted, torch.tensor([0, 2, 3]))


def by_schedule(stage: int, precision: Precision) -> tuple[dict[str, torch.Tensor], Net]:
    net = Net()
    strategy = Strategy(
        zero=Zero(stage=stage),
        train=Train(
            precision=precision,
            optimizer=SGD(learning_rate=RATE),
            loss_scale=LossScale(initial=1.0),
        ),
    )
    made = make_schedule(describe(net, UNITS, sample(0), precision=precision), strategy)
    trained = train(net, UNITS, made, map(sample, range(STEPS)), steps=STEPS)
    return trained.full_parameters(), net


def by_fsdp(precision: Precision) -> dict[str, torch.Tensor]:
    net, mesh = Net(), init_device_mesh("cpu", (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(TORCH_DTYPE[precision.compute], cast_forward_inputs=True)
    for unit in (net.body, net):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(sample(step)).backward()
        optimizer.step()
    assert isinstance(net, FSDPModule)
    return {name: value.full_tensor() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("precision", HALF)
def test_floats_of_a_batch_are_cast_as_fsdp2_casts_them(
    pool_of: SharedPools, precision: Precision
) -> None:
    (expected,) = pool_of(1).run(by_fsdp, precision)
    for stage in range(4):
        found, _ = by_schedule(stage, precision)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (stage, name)


@pytest.mark.parametrize("precision", HALF)
def test_every_unit_gets_floats_in_the_format_of_parameters_and_whole_numbers_as_they_are(
    precision: Precision,
) -> None:
    _, net = by_schedule(3, precision)
    assert net.head.seen == {TORCH_DTYPE[precision.compute], torch.int64}


def test_without_mixed_precision_a_batch_enters_as_it_is() -> None:
    _, net = by_schedule(3, Precision.FP32)
    assert net.head.seen == {torch.float32, torch.int64}


def test_a_description_has_the_batch_in_the_format_that_it_enters_in() -> None:
    def size_bytes(precision: Precision) -> int:
        batch = describe(Net(), UNITS, sample(0), precision=precision).batch
        assert batch.dtype is DType.INT8  # formats differ: counted in bytes
        return batch.elements

    # 4 x (5 + 3) floats, and 3 row numbers of 8 bytes.
    assert size_bytes(Precision.FP32) == 4 * 32 + 24
    assert size_bytes(Precision.BF16) == 2 * 32 + 24
