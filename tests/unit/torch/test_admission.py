from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import (
    GPT,
    Activation,
    Attention,
    LoRA,
    NormPlacement,
    Positions,
)
from zsim.model.equal_units import equal_units
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.strategy.execution import Execution
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_torch.admission import refusal
from zsim_torch.local_devices import (
    SLOW_FLOPS_PER_S,
    available_bytes,
    memory_bytes,
    slowest_operation_s,
)
from zsim_torch.supervise.process_group import (
    TORCHRUN_VARIABLES,
    DeviceChoice,
    DeviceError,
    Placement,
    under_torchrun,
)

CLUSTER = Cluster(
    name="none",
    nodes=1,
    gpus_per_node=1,
    gpu=Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)
SMALL = GPT(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=256)


def job(model: Model, *, data: int = 1) -> Job:
    schedule = make_schedule(
        model, Strategy(parallel=Parallel(tensor=model.tensor, data=data), zero=Zero(stage=2))
    )
    return Job(schedule=schedule, model=model, cluster=CLUSTER)


def why(subject: Job, torchrun: Placement | None = None) -> str | None:
    return refusal(subject, device=DeviceChoice.CPU, torchrun=torchrun)


def test_a_small_gpt_is_not_refused() -> None:
    assert why(job(gpt(SMALL, micro_batch_size=1), data=2)) is None


def test_logits_of_a_whole_vocabulary_that_ranks_have_parts_of_are_refused_by_name() -> None:
    shape = replace(SMALL, execution=Execution(gathers_logits=True))
    assert why(job(gpt(shape, micro_batch_size=1, tensor=2))) == (
        "zero.fsdp2.disable_loss_parallel: true is simulated only"
    )


def test_a_tensor_degree_is_refused_for_positions_that_no_part_of_the_heads_knows() -> None:
    assert why(job(gpt(SMALL, micro_batch_size=1, tensor=2))) is None
    shape = replace(SMALL, positions=Positions.ALIBI, attention=Attention.PLAIN)
    assert why(job(gpt(shape, micro_batch_size=1, tensor=2))) == (
        "model.positions: alibi has no torch module for 2 ranks of parallel.tensor"
    )


def test_a_model_without_modules_is_refused_with_what_to_give() -> None:
    line = why(job(equal_units(parameters=1000)))
    assert line is not None
    assert line.startswith("model: there are no torch modules for 1000 parameters; give layers,")


def test_flash_attention_with_alibi_is_refused() -> None:
    shape = replace(SMALL, positions=Positions.ALIBI)
    assert why(job(gpt(shape, micro_batch_size=1))) == (
        "model.attention: flash has no torch module with positions alibi, say plain"
    )
    plain = replace(shape, attention=Attention.PLAIN)
    assert why(job(gpt(plain, micro_batch_size=1))) is None


SIMULATED_ALONE: dict[str, dict[str, Any]] = {
    "model.norm_bias: false is simulated only": {"norm_bias": False},
    "model.norm_weight: false is simulated only": {"norm_weight": False},
    "model.head_bias: true is simulated only": {"head_bias": True},
    "model.norm_placement: after is simulated only": {
        "norm_placement": NormPlacement.AFTER,
        "bias": False,
    },
    "model.shared_norm: true is simulated only": {
        "shared_norm": True,
        "parallel_residual": True,
    },
    "model.activation: relu is simulated only": {"activation": Activation.RELU},
    "model.activation: geglu is simulated only": {"activation": Activation.GEGLU},
    "model.window: 1 is simulated only": {"window": 1},
    "model.lora.targets: q, v of a joined layer are simulated only; say qkv": {
        "lora": LoRA(rank=1, targets=("q", "v"))
    },
}


@pytest.mark.parametrize("line", SIMULATED_ALONE)
def test_a_shape_without_modules_is_refused_by_the_field(line: str) -> None:
    shape = replace(SMALL, **SIMULATED_ALONE[line])
    assert why(job(gpt(shape, micro_batch_size=1))) == line


def test_tiles_of_tensor_ranks_are_refused() -> None:
    shape = replace(SMALL, execution=Execution(tiles=2))
    strategy = Strategy(parallel=Parallel(tensor=2), zero=Zero(stage=3, tiles=2))
    model = gpt(shape, micro_batch_size=1, tensor=2)
    schedule = make_schedule(model, strategy)
    assert why(Job(schedule=schedule, model=model, cluster=CLUSTER)) == (
        "zero.tiles: 2 with tensor ranks is simulated only; say 1"
    )


def test_a_window_as_wide_as_the_sequence_is_none() -> None:
    shape = replace(SMALL, window=SMALL.sequence_length)
    assert why(job(gpt(shape, micro_batch_size=1))) is None


def test_a_schedule_that_runs_no_unit_needs_no_modules() -> None:
    build = ScheduleBuilder.of("sum", data=2)
    data, x = build.group("data", "data"), build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    build.step.all_reduce("sum", data, x.all)
    model = equal_units(parameters=100)
    assert why(Job(schedule=build.schedule(), model=model, cluster=CLUSTER)) is None


def test_a_text_that_does_not_serve_the_model_is_refused(tmp_path: Path) -> None:
    short, subject = tmp_path / "short", job(gpt(SMALL, micro_batch_size=1))
    short.write_bytes(b"four")
    line = refusal(subject, device=DeviceChoice.CPU, torchrun=None, data=short)
    assert line is not None
    assert line.startswith(f"data: {short} has 4 bytes, at least 5 are needed")


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    ("shape", "micro_batch_size", "field"),
    [
        # 12 h^2 = 12 * 16384^2 = 3.2e9 parameters a layer: 1000 layers are 3.2e12
        (replace(SMALL, layers=1000, hidden_size=16384), 1, "model.layers: 1000 needs "),
        (replace(SMALL, layers=1, hidden_size=2**20), 1, "model.hidden_size: 1048576 needs "),
        (replace(SMALL, vocab_size=2**40), 1, "model.vocab_size: 1099511627776 needs "),
        (SMALL, 2**40, "train.micro_batch_size: 1099511627776 needs "),
    ],
)
def test_a_model_larger_than_this_machine_is_refused_with_the_field_to_change(
    shape: GPT, micro_batch_size: int, field: str
) -> None:
    line = why(job(gpt(shape, micro_batch_size=micro_batch_size), data=4))
    assert line is not None
    assert line.startswith(field)
    assert " on 4 local ranks, this machine has " in line
    assert "\n" not in line


def test_more_ranks_than_a_machine_should_run_are_refused() -> None:
    line = why(job(gpt(SMALL, micro_batch_size=1), data=65))
    assert line == (
        "ranks: 65 must be at most 64 on one machine; say --ranks N, or start with torchrun"
    )


def test_torchrun_has_to_start_as_many_ranks_as_the_schedule_has() -> None:
    subject = job(gpt(SMALL, micro_batch_size=1), data=2)
    placement = Placement(rank=0, ranks=3, local_rank=0, local_ranks=3)
    assert why(subject, placement) == "ranks: the schedule is for 2, torchrun started 3"
    assert why(subject, replace(placement, ranks=2)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_cuda_that_is_not_there_is_refused() -> None:
    subject = job(gpt(SMALL, micro_batch_size=1), data=2)
    line = refusal(subject, device=DeviceChoice.CUDA, torchrun=None)
    assert line is not None
    assert line.startswith("device: cuda needs a device for each of 2 local ranks")


def test_memory_of_the_machine_is_read_where_linux_says_it(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert available_bytes(meminfo) == 64 * 1024
    assert available_bytes(tmp_path / "missing") > 10**8
    assert 0 < memory_bytes(torch.device("cpu"), 1) < available_bytes()


ENVIRONMENT = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_torchrun_is_known_by_its_variables() -> None:
    assert under_torchrun(ENVIRONMENT) == Placement(rank=5, ranks=8, local_rank=1, local_ranks=4)
    for name in TORCHRUN_VARIABLES:
        assert under_torchrun({k: v for k, v in ENVIRONMENT.items() if k != name}) is None


def test_torchrun_variables_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(DeviceError, match="must be whole numbers, got RANK='x'"):
        under_torchrun({**ENVIRONMENT, "RANK": "x"})


def test_the_slowest_operation_is_given_the_time_that_it_may_take() -> None:
    """2 FLOPs for each of 8e9 parameters and 1024 tokens in 32 units, backward twice that."""
    subject = job(equal_units(parameters=8 * 10**9))
    flops = 2 * 2 * 8 * 10**9 // 32 * 1024
    seconds = slowest_operation_s(subject.schedule, 1)
    assert seconds >= flops / SLOW_FLOPS_PER_S
    assert slowest_operation_s(subject.schedule, 1000) > 2 * seconds
    assert slowest_operation_s(job(gpt(SMALL, micro_batch_size=1)).schedule, 1) < 0.1
