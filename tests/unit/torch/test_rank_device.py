"""Where a rank computes: by devices and by what its process group has for them, not by a name."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zsim_torch.supervise.process_group import DeviceError, rank_device

CPU = torch.device("cpu")
ONE, TWO = torch.device("cuda", 1), torch.device("cuda", 2)
META = torch.device("meta")

MIXED = {"cpu": "gloo", "cuda": "nccl"}  # init_process_group(), or "cpu:gloo,cuda:nccl"
GLOO = {"cpu": "gloo", "cuda": "gloo"}  # init_process_group("gloo")
NCCL = {"cuda": "nccl"}  # init_process_group("nccl")


@pytest.mark.parametrize("backends", [MIXED, NCCL])
@pytest.mark.parametrize("module", [[], [CPU], [META]])
def test_a_group_with_nccl_trains_on_the_current_gpu(
    backends: dict[str, str], module: list[torch.device]
) -> None:
    assert rank_device(None, module, backends, current=ONE) == ONE


@pytest.mark.parametrize("backends", [MIXED, NCCL])
def test_a_module_on_a_gpu_is_trained_there(backends: dict[str, str]) -> None:
    assert rank_device(None, [TWO], backends, current=ONE) == TWO


@pytest.mark.parametrize("backends", [MIXED, GLOO])
def test_without_a_gpu_ranks_train_on_the_cpu(backends: dict[str, str]) -> None:
    assert rank_device(None, [CPU], backends, current=None) == CPU


def test_a_module_on_the_cpu_with_gloo_stays_there_beside_a_gpu() -> None:
    assert rank_device(None, [CPU], GLOO, current=ONE) == CPU


def test_without_a_process_group_a_module_is_trained_where_it_is() -> None:
    assert rank_device(None, [TWO], None, current=ONE) == TWO
    assert rank_device(None, [CPU], None, current=ONE) == CPU
    assert rank_device(None, [META], None, current=ONE) == CPU


@pytest.mark.parametrize("backends", [MIXED, None])
def test_a_device_that_is_asked_for_is_taken(backends: dict[str, str] | None) -> None:
    assert rank_device(CPU, [ONE], backends, current=ONE) == CPU
    assert rank_device(ONE, [CPU], backends, current=TWO) == ONE


@pytest.mark.parametrize(
    ("asked", "module", "backends", "current", "line"),
    [
        (None, [ONE], GLOO, ONE, "device: cuda needs NCCL, the process group has gloo for it"),
        (ONE, [CPU], GLOO, ONE, "device: cuda needs NCCL, the process group has gloo for it"),
        (ONE, [CPU], {"cpu": "gloo"}, ONE, "device: the process group has no backend for cuda"),
        (CPU, [CPU], NCCL, ONE, "device: the process group has no backend for cpu"),
        (None, [CPU], NCCL, None, "device: the process group has no backend for cpu"),
        (None, [ONE, TWO], MIXED, ONE, "device: parameters are on cuda:1 and cuda:2"),
        (None, [torch.device("mps")], None, None, "device: mps must be cpu or cuda"),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_line(
    asked: torch.device | None,
    module: list[torch.device],
    backends: dict[str, str] | None,
    current: torch.device | None,
    line: str,
) -> None:
    with pytest.raises(DeviceError) as caught:
        rank_device(asked, module, backends, current=current)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


PROGRAM = """
import sys
import torch
from torch import distributed
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.schedule import Kind
from zsim_torch.supervise.process_group import backends
from zsim_torch.train import Option, train

build = ScheduleBuilder.of("sum", data=2)
data = build.group("data", "data")
build.layout(Layout(name="x", pieces=(Piece(parameter="x", start=0, size=2),), elements=2))
x = build.buffer("x", 2, kind=Kind.PARAMETER, layout="x", persistent=True)
build.setup.allocate(x)
build.setup.fill("x", x.all, 3.0)
build.step.all_reduce("sum", data, x.all, x.all)
for name in (None, "cpu:gloo"):
    store = f"file://{sys.argv[2]}/{name}"
    distributed.init_process_group(name, init_method=store, rank=int(sys.argv[1]), world_size=2)
    assert backends()["cpu"] == "gloo"
    option = Option(write_back=False)
    trained = train(torch.nn.Identity(), ("",), build.schedule(), (), option=option)
    assert trained.full_parameters()["x"].tolist() == [6.0, 6.0]
    distributed.destroy_process_group()
"""


@pytest.mark.one_commit_in(21)
def test_a_group_that_was_made_without_the_name_of_one_backend_trains(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), tmp_path],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=250)
        assert (rank.returncode, error) == (0, "")
