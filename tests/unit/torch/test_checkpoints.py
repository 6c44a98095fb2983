"""Checkpoints of a training: resumed bit for bit, on other ranks and stages, by FSDP2 as well."""

import os
import resource
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_tensors import assert_same_checkpoint, damage, tensors_in
from saved_tiny import Ended, Part, fsdp_goes_on, fsdp_saves, run_all
from shared_ranks import SharedPools
from tiny_training import Case
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from zsim.backend.backend import RefusedError
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.flat_range import boxes
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

ADAM = Adam(learning_rate=0.01, epsilon=1e-5)


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


def strategy(stage: int, ranks: int = 2, **train: object) -> Strategy:
    return Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=stage, bucket_elements=60),
        train=Train.model_validate({"optimizer": ADAM, **train}),
    )


NVME = Offload(optimizer=MemoryTier.NVME, parameters=MemoryTier.NVME, sub_group_elements=7)
HOST = Offload(optimizer=MemoryTier.HOST, sub_group_elements=7)
WAYS = {
    **{
        f"stage {stage} {precision}": strategy(stage, precision=precision)
        for stage, precision in product(range(4), (Precision.FP32, Precision.BF16))
    },
    "momentum": strategy(2, optimizer=SGD(learning_rate=0.1, momentum=0.9)),
    "plain sgd": strategy(3, optimizer=SGD(learning_rate=0.1)),
    "fp16": strategy(
        1, precision=Precision.FP16, loss_scale=LossScale(initial=4.0, interval=2), clip_norm=0.1
    ),
    "accumulated": strategy(2, gradient_accumulation_steps=2),
    "host": strategy(1).model_copy(update={"offload": HOST}),
    "nvme": strategy(3, precision=Precision.BF16).model_copy(update={"offload": NVME}),
    "fsdp2": strategy(3).model_copy(update={"zero": Zero(stage=3, emulate=FSDP2())}),
    "deepspeed 3": strategy(3, precision=Precision.BF16).model_copy(
        update={"zero": Zero(stage=3, emulate=DeepSpeed(reduce_bucket_size=500))}
    ),
    "deepspeed 2": strategy(2, precision=Precision.BF16).model_copy(
        update={"zero": Zero(stage=2, emulate=DeepSpeed(reduce_bucket_size=500))}
    ),
}


SOME = ("stage 0 fp32", "momentum", "fp16", "nvme", "deepspeed 3")
"""Ways that the suite draws from; the others are under `long`."""


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    "name",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in WAYS],
)
def test_three_steps_and_three_more_from_a_checkpoint_are_six_steps_bit_for_bit(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    first = Part(Case(WAYS[name]), stop=3, saved=tmp_path / name)
    asked = [replace(first, stop=6, saved=None), first, first.then(6)]
    for whole, half, rest in pool.run(run_all, asked):
        assert half.losses + rest.losses == whole.losses
        assert (rest.scalars, rest.steps_done) == (whole.scalars, 6)
        assert_equal(rest, whole)


def assert_equal(one: Ended, other: Ended) -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.mark.one_commit_in(9)
def test_four_ranks_of_stage_3_go_on_as_two_of_stage_1_and_back(
    pool_of: SharedPools, pool: RankPool, tmp_path: Path
) -> None:
    four = Part(Case(strategy(3, ranks=4)), stop=2, saved=tmp_path / "four")
    two = Part(Case(strategy(1)), start=2, stop=2, loaded=four.saved, saved=tmp_path / "two")
    wide = pool_of(4)
    first = wide.run(run_all, [four])
    (moved,) = pool.run(run_all, [two])[0]
    again = replace(four, start=2, loaded=two.saved, saved=tmp_path / "again")
    (back,) = wide.run(run_all, [again])[0]
    assert_equal(moved, first[0][0])
    assert_equal(back, moved)
    assert moved.steps_done == back.steps_done == 2
    assert_same_checkpoint(tmp_path / "four", tmp_path / "two", parameters=5)
    assert_same_checkpoint(tmp_path / "four", tmp_path / "again", parameters=5)
    # A rank holds its shard: 107 parameters in buckets that are padded for 4 ranks.
    assert sum(ended.held for (ended,) in first) == 107
    assert max(ended.held for (ended,) in first) <= 29


@pytest.mark.one_commit_in(9)
def test_fsdp2_goes_on_from_a_checkpoint_of_ours_and_we_from_one_of_fsdp2(
    pool: RankPool, tmp_path: Path
) -> None:
    case = Case(strategy(3))
    ours = Part(case, stop=3, saved=tmp_path / "ours")
    saved, more = pool.run(run_all, [ours, ours.then(6)])[0]
    losses, parameters = pool.run(fsdp_goes_on, case, 3, tmp_path / "ours")[0]
    for name, value in saved.parameters.items():
        assert torch.equal(value, parameters[name]), name
    assert losses == pytest.approx(more.losses, rel=1e-5)
    theirs = pool.run(fsdp_saves, case, 3, tmp_path / "theirs")[0]
    for stage in (0, 3):
        part = Part(Case(strategy(stage)), start=3, stop=6, loaded=tmp_path / "theirs")
        (ended,) = pool.run(run_all, [part])[0]
        assert ended.losses == pytest.approx(theirs, rel=1e-5)
        assert ended.steps_done == 6


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - first))
    whole = torch.arange(size).view(shape)
    found = list(boxes(tuple(shape), first, count))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for box in found:
        window = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        wanted = torch.arange(first + box.start, first + box.start + box.elements)
        assert torch.equal(whole[window].flatten(), wanted)
    assert sum(box.elements for box in found) == count


class Loss(nn.Module):
    """The last unit."""

    def forward(self, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


def net(width: int = 4, layers: int = 2) -> nn.Sequential:
    """A module with buffers that change, and random numbers in its forward."""
    torch.manual_seed(1)
    body = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*body, nn.BatchNorm1d(width), nn.Dropout(0.5), Loss())


def trainer(module: nn.Module | None = None) -> Trainer:
    """Train it on one rank."""
    module = module or net()
    width = next(module.parameters()).shape[-1]
    return Trainer(module, strategy(1, ranks=1), batch=torch.ones(3, width))


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def test_buffers_of_the_module_and_generators_go_on_too(tmp_path: Path) -> None:
    torch.manual_seed(7)
    with trainer() as whole:
        first = [float(whole.step(batch(step))) for step in range(2)]
        whole.save(tmp_path)
        rest = [float(whole.step(batch(step))) for step in range(2, 4)]
    torch.manual_seed(8)
    module = net()
    with trainer(module) as other:
        other.load(tmp_path)
        assert [float(other.step(batch(step))) for step in range(2, 4)] == rest
    assert first != rest
    assert module.state_dict()["2.num_batches_tracked"] == 4


class TiedHead(nn.Module):
    """A head that shares the table of an embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, value: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits = value @ self.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def tied() -> tuple[nn.Sequential, Trainer]:
    torch.manual_seed(3)
    table = nn.Embedding(5, 4)
    module = nn.Sequential(table, nn.Linear(4, 4), TiedHead(table))
    return module, Trainer(module, strategy(3, ranks=1), batch=torch.tensor([[1, 2, 3]]))


def test_a_tied_parameter_has_both_names_in_a_checkpoint_and_one_is_enough(tmp_path: Path) -> None:
    module, one = tied()
    with one:
        one.step(torch.tensor([[1, 2, 3]]))
        one.save(tmp_path)
    found = tensors_in(tmp_path)
    wanted = module.state_dict()["0.weight"]
    assert torch.equal(found["model.0.weight"], wanted)
    assert torch.equal(found["model.2.weight"], wanted)
    other, again = tied()
    with again:
        again.load(tmp_path)
    assert other[0].weight is other[2].weight
    assert torch.equal(other.state_dict()["2.weight"], wanted)


def test_parameters_alone_begin_the_optimizer_anew(tmp_path: Path) -> None:
    with trainer() as one:
        one.step(batch(0))
        one.save(tmp_path)
        wanted = one.full_parameters()
    with trainer() as other:
        other.load(tmp_path, parameters_only=True)
        assert (other.steps_done, other.scalars["step"]) == (0, 0.0)
        for name, value in other.full_parameters().items():
            assert torch.equal(value, wanted[name])


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (net(width=5), "parameter 0.weight is 4 x 4 there, 5 x 5 here"),
        (net(layers=1), "parameter 1.weight is 4 x 4 there, 4 here"),
        (net(layers=3), "parameter 2.weight is 4 there, 4 x 4 here"),
        (nn.Sequential(*list(net())[:2], Loss()), "it has 2.bias, the module has not"),
        (nn.Sequential(nn.Linear(4, 4, bias=False), Loss()), "it has 0.bias, the module has not"),
        (nn.Sequential(*list(net())[:2], nn.LayerNorm(4), nn.Linear(4, 4), Loss()), "3.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, module: nn.Module, why: str
) -> None:
    with trainer() as one:
        one.save(tmp_path)
    with trainer(module) as other:
        before = other.full_parameters()
        with pytest.raises(CheckpointError, match="it is of another model") as caught:
            other.load(tmp_path)
        assert why in str(caught.value)
        for name, value in other.full_parameters().items():
            assert torch.equal(value, before[name])


def test_a_folder_without_a_checkpoint_is_told_in_one_line(tmp_path: Path) -> None:
    with trainer() as one, pytest.raises(CheckpointError) as caught:
        one.load(tmp_path / "none")
    assert str(caught.value) == f"checkpoint {tmp_path}/none: no complete checkpoint is there"


def test_a_file_with_a_damaged_tensor_is_told_in_one_line_and_ends_the_training(
    tmp_path: Path,
) -> None:
    module = net()
    before = module.state_dict()["0.weight"].clone()
    one = trainer(module)
    one.save(tmp_path)
    damage(tmp_path, "model.1.weight")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        one.load(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RefusedError, match="its training has ended"):
        one.step(batch(0))
    assert torch.equal(module.state_dict()["0.weight"], before)


def test_a_file_without_its_numbers_is_told_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    with trainer() as one:
        one.save(tmp_path)
        (data,) = tmp_path.glob("*.distcp")
        data.write_bytes(data.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            one.load(tmp_path)
        assert "\n" not in str(caught.value)
        one.step(batch(0))


def test_a_buffer_of_another_shape_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with trainer() as one:
        state = one.state_dict()
        state["model"]["2.running_mean"] = torch.zeros(5)
        checkpoint_folder.write(tmp_path, state)
        with pytest.raises(CheckpointError, match=r"buffer 2\.running_mean is 5 there, 4 here"):
            one.load(tmp_path)
        one.step(batch(0))


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """No file can grow beyond `size` bytes: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 3000, 9000])
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path, size: int) -> None:
    with trainer() as one:
        one.step(batch(0))
        one.save(tmp_path)
        kept = sorted(tmp_path.iterdir())
        one.step(batch(1))
        with largest_file(size), pytest.raises(CheckpointError) as caught:
            one.save(tmp_path)
        assert str(caught.value).startswith(f"checkpoint {tmp_path}: not written: ")
        assert "\n" not in str(caught.value)
        assert [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".tmp"] == kept
        one.step(batch(2))
        one.save(tmp_path / "more")
    with trainer() as other:
        other.load(tmp_path)
        assert other.steps_done == 1
        other.load(tmp_path / "more")
        assert other.steps_done == 3


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process that is killed at its call number `number` of the file system."""
    child = os.fork()
    if child == 0:
        left = [number]

        def counted(owner: object, name: str) -> None:
            own = getattr(owner, name)

            def called(*arguments: object, **named: object) -> object:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return own(*arguments, **named)

            setattr(owner, name, called)

        counted(FileSystem, "mkdir")
        counted(FileSystem, "create_stream")
        counted(FileSystem, "rename")
        counted(Path, "unlink")
        for name in ("fsync", "open"):
            counted(os, name)
        counted(torch, "save")
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.one_commit_in(24)
def test_a_save_that_is_killed_anywhere_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    with trainer() as one:
        one.step(batch(0))
        one.save(tmp_path)
        one.step(batch(1))
        found: list[int] = []
        while killed_at(2 * len(found) + 1, lambda: one.save(tmp_path)):
            with trainer() as other:
                other.load(tmp_path)
                found.append(other.steps_done)
                assert other.scalars["step"] == other.steps_done
        one.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2  # what the killed ones left is gone
    assert len(found) > 10
    assert found == sorted(found)
    assert set(found) == {1, 2}
