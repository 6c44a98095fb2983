"""Ranks that begin with other parameters or buffers are refused, whatever these come from."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_modules import WIDTH, Net, batch, sgd, with_
from shared_ranks import SharedPools
from torch import Tensor, distributed, nn

import zsim
from zsim.backend.backend import RefusedError
from zsim_torch.equal_start import CHUNK, digest_of
from zsim_torch.module.initializer import Initializer
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        module = Net()
    for block in module.blocks:
        block.mean = torch.zeros(WIDTH)
    return module


def drawn(seed: int, name: str) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(dict(on_meta().named_parameters())[name].shape)


def with_buffer(value: float) -> nn.Module:
    return with_(net(0), lambda module: module.blocks[1].mean.fill_(value))


def wider(rank: int) -> nn.Module:
    return with_(net(0), lambda each: setattr(each, "last", nn.Linear(WIDTH, WIDTH + rank)))


VALUES = "rank 1 begins with other values than rank 0; call torch.manual_seed with one seed"

Start = tuple[nn.Module, Option]

UNEQUAL: dict[str, tuple[Callable[[int], Start], str]] = {
    "another seed": (lambda rank: (net(rank), Option()), f"parameter .*: {VALUES}"),
    "a last bit": (lambda rank: (last_bit(rank), Option()), rf"parameter last\.bias: {VALUES}"),
    "another buffer": (
        lambda rank: (with_buffer(rank), Option()), rf"buffer blocks\.1\.mean: {VALUES}"
    ),
    "another shape": (
        lambda rank: (wider(rank), Option()),
        r"parameter last\.weight: it is 5 x 4 float32 on rank 1, and 4 x 4 float32 on rank 0; make",
    ),
    "another order": (
        lambda rank: (reordered(rank), Option()),
        r"module: rank 1 has parameter last\.weight where rank 0 has parameter first\.weight; make",
    ),
    "a frozen parameter": (
        lambda rank: (frozen(rank), Option()),
        r"module: rank 1 has parameter first\.bias \(frozen\) where rank 0 has parameter first\.bi",
    ),
    "a parameter more": (
        lambda rank: (longer(rank), Option()),
        r"module: rank 1 has parameter more where rank 0 has parameter first\.weight; make",
    ),
    "a buffer more": (
        lambda rank: (buffered(rank), Option()),
        r"module: rank 1 has buffer more where rank 0 has buffer blocks\.0\.mean; make the same",
    ),
    "a function": (
        lambda rank: (on_meta(), Option(initial=partial(drawn, rank))), f"parameter .*: {VALUES}"
    ),
    "an initializer": (
        lambda rank: (on_meta(), Option(initial=Initializer(seed=rank))),
        f"parameter .*: {VALUES}",
    ),
}  # fmt: skip


OF_NAMES = ("another order", "a frozen parameter", "a parameter more", "a buffer more")
"""Starts that differ in names, which no stage reads: one stage shows all."""


def reordered(rank: int) -> nn.Module:
    module: Any = net(0)
    if rank:
        first, blocks = module.first, module.blocks
        del module.first, module.blocks
        module.first, module.blocks = first, blocks
    return cast("nn.Module", module)


def frozen(rank: int) -> nn.Module:
    return with_(net(0), lambda each: each.first.bias.requires_grad_(rank == 0))


def longer(rank: int) -> nn.Module:
    more = nn.Parameter(torch.ones(2)) if rank else None
    return with_(net(0), lambda each: setattr(each, "more", more))


def buffered(rank: int) -> nn.Module:
    more = torch.ones(2) if rank else None
    return with_(net(0), lambda each: each.register_buffer("more", more))


def last_bit(rank: int) -> nn.Module:
    module = net(0)
    with torch.no_grad():
        module.get_parameter("last.bias").view(torch.int32)[-1] ^= rank
    return module


def lines(name: str, stage: int) -> list[tuple[int, str]]:
    """Return why a start is refused in which rank 1 is unequal, and one with equal ranks.

    Of each also its number on rank 1: 1 for the unequal start, and else 0.
    """
    found: list[tuple[int, str]] = []
    rank = distributed.get_rank()
    make, _ = UNEQUAL[name]
    for number in (rank, 0):
        module, option = make(number)
        before = [each.detach().clone() for each in module.parameters()]
        line = ""
        try:
            strategy = sgd(stage).but({"parallel.data": 2})
            with Trainer(module, strategy, batch=batch(rank), option=option) as trainer:
                trainer.step(batch(rank))
        except RefusedError as error:
            line = str(error)
            kept = zip(before, module.parameters(), strict=True)
            assert all(one.is_meta or torch.equal(one, its) for one, its in kept)
        found.append((number, line))
    return found


@pytest.mark.matrix(21)
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, stage) for name in UNEQUAL for stage in ((0,) if name in OF_NAMES else range(4))],
)
def test_ranks_that_begin_with_other_values_are_refused_in_all_stages(
    pool_of: SharedPools, name: str, stage: int
) -> None:
    first, second = pool_of(2).run(partial(lines, name, stage))
    assert [line for _, line in first] == [line for _, line in second]
    assert [is_unequal for is_unequal, _ in second] == [1, 0]
    for is_unequal, line in second:
        assert bool(line) == bool(is_unequal), line
        assert not is_unequal or re.match(UNEQUAL[name][1], line), line


def seeded() -> str:
    """Begin a job with a seed of each rank, along the tensor axis, and return why it is refused."""
    job = zsim.load("tiny", changes={"parallel.tensor": 2, "parallel.data": 1}).job
    with pytest.raises(RefusedError) as caught:
        Trainer.of_job(job, seed=distributed.get_rank())
    return str(caught.value)


@pytest.mark.one_commit_in(6)
def test_ranks_of_a_job_have_one_seed(pool_of: SharedPools) -> None:
    line = "seed: 1 on rank 1, and 0 on rank 0; give all ranks one seed"
    assert list(pool_of(2).run(seeded)) == [line, line]


def test_a_rank_alone_is_not_refused() -> None:
    with Trainer(net(3), sgd(3), batch=batch(0)) as trainer:
        trainer.step(batch(0))


@given(st.data())
def test_a_digest_changes_with_each_bit_and_not_with_the_strides(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool]))
    shape = data.draw(st.sampled_from([(), (3,), (5, 7), (2, 3, 4)]))
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    known = digest_of(tensor)
    strided = torch.stack([tensor, tensor], -1)[..., 0]
    assert digest_of(strided) == known
    octets = tensor.clone().reshape(-1).view(torch.uint8)
    octets[data.draw(st.integers(0, octets.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if dtype is not torch.bool:
        assert digest_of(octets.view(dtype).reshape(shape)).values != known.values


@pytest.mark.parametrize("size", [0, 1, 8 * CHUNK - 1, 8 * CHUNK + 3])
def test_a_digest_sees_every_chunk_and_negated_values(size: int) -> None:
    tensor = torch.arange(size, dtype=torch.float32) + 1
    assert digest_of(tensor) == digest_of(tensor.clone())
    if size:
        assert digest_of(-tensor) != digest_of(tensor)
        assert digest_of(tensor.flip(0)) != digest_of(tensor) or size == 1
        changed = tensor.clone()
        changed[-1] += 1
        assert digest_of(changed) != digest_of(tensor)
