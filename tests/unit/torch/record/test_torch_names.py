"""Names of torch with a device: what makes a tensor, and what only names a class."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from zsim_record import recording
from zsim_record.record.device_module import DEVICE_MODULE
from zsim_record.record.pretended_streams import PretendedStream
from zsim_record.record.script_process import record_script
from zsim_record.record.tape import Tape, UnrecordableError

MAKE: dict[str, Callable[[Any], Any]] = {
    "number": lambda device: torch.tensor(0.0, device=device),
    "truth": lambda device: torch.tensor([True], device=device),
    "empty list": lambda device: torch.tensor([], device=device),
    "array": lambda device: torch.tensor(np.ones(3), device=device),
    "parameter": lambda device: nn.Parameter(torch.tensor([1.0], device=device)),
    "tensors of the device": lambda device: torch.tensor(
        [torch.ones((), device=device), (torch.ones((), device=device))], device=device
    ),
    "lists of tensors": lambda device: torch.tensor(
        [[1.0, torch.ones(())], torch.ones(2)], device=device
    ),
    "as_tensor": lambda device: torch.as_tensor([1, 2], device=device),
    "asarray": lambda device: torch.asarray([1.0], device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(1, device=device),
    "new_tensor here": lambda device: torch.ones(2, device=device).new_tensor([1.0]),
    "new_tensor from the CPU": lambda device: torch.ones(2).new_tensor([1.0], device=device),
    "generator": lambda device: torch.rand(2, device=device, generator=torch.Generator(device)),
    "window": lambda device: torch.hann_window(4, device=device),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_a_tensor_is_made_on_the_device(make: Callable[[Any], Any]) -> None:
    with recording(world=2, cuda=True) as tape:
        for device in ("cuda", torch.device("cuda", 0)):
            made = make(device)
            assert made.device.type == "zsim"
            made.add(1)
    assert tape.findings == []
    assert tape.refused == {}


def test_a_copy_of_data_is_ordered_on_the_stream_that_makes_the_tensor() -> None:
    with recording(world=2, cuda=True) as tape:
        side = DEVICE_MODULE.Stream()
        with DEVICE_MODULE.stream(side):
            value = torch.tensor([1.0, 2.0], device="cuda")
            value.mul_(2)
        value.add_(1)
    assert [hazard.kind.value for hazard in tape.findings] == ["race"]


def test_classes_of_torch_cuda_are_classes_for_annotations_and_isinstance() -> None:
    found: dict[str, Any] = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    names = [
        name
        for name, each in found.items()
        if isinstance(each, type) and each.__module__.startswith("torch")
    ]
    assert {"CUDAGraph", "FloatTensor", "MemPool", "Stream", "device", "graph"} <= {*names}
    with recording(world=2, cuda=True):
        for owner, name in [(torch.cuda, name) for name in names] + [
            (torch, name) for name in ("device", "Generator", "Stream", "Event")
        ]:
            masked = getattr(owner, name)
            assert masked | None, name
            assert not isinstance(1, masked), name
        value = torch.cuda.FloatTensor([1.0])  # type: ignore[attr-defined]
        assert isinstance(value, torch.cuda.FloatTensor)  # type: ignore[attr-defined]
        assert not isinstance(value, torch.cuda.HalfTensor)  # type: ignore[attr-defined]
        assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)  # type: ignore[attr-defined]
        assert torch.cuda.LongTensor(2, 3).shape == (2, 3)  # type: ignore[attr-defined]
        assert isinstance(torch.Generator("cuda"), torch.Generator)
        with torch.cuda.device(0):
            assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        for refused in (torch.cuda.CUDAGraph, torch.cuda.MemPool):
            with pytest.raises(UnrecordableError, match=rf"torch\.cuda\.{refused.__name__}"):
                refused()


def test_sparse_tensors_are_refused_by_name() -> None:
    with recording(world=2) as tape:
        values, places = torch.ones(1, device="zsim"), torch.zeros(2, 1, dtype=torch.long)
        with pytest.raises(UnrecordableError, match="sparse tensors"):
            torch.sparse_coo_tensor(places.to("zsim"), values, (2, 2), check_invariants=False)
        with pytest.raises(UnrecordableError, match="there is no rule"):
            torch.ones(2, 2, device="zsim").to_sparse()
    assert len(tape.refused) == 2


def test_a_library_with_kernels_of_its_own_is_not_there_for_who_asks() -> None:
    with recording(world=2) as tape:
        import importlib.util  # noqa: PLC0415  (the name is looked up while it is replaced)

        assert importlib.util.find_spec("flash_attn") is None
        assert importlib.util.find_spec("json") is not None
    assert any("flash_attn" in what for what in tape.invented)
    assert importlib.util.find_spec is find_spec


def fully_sharded_1() -> Tape:
    """Record FSDP1 with clipping, which makes a number on the device."""
    with recording(world=4, cuda=True) as tape:
        dist.init_process_group("nccl")
        layers = [FullyShardedDataParallel(nn.Linear(8, 8).to("cuda")) for _ in range(2)]
        module = FullyShardedDataParallel(nn.Sequential(*layers), device_id=0)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            loss = module(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            module.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return tape


def test_fsdp1_with_clipping_has_no_finding() -> None:
    tape = fully_sharded_1()
    assert tape.findings == []
    assert tape.refused == {}


def test_fsdp1_without_waits_of_streams_has_findings() -> None:
    with patch.object(PretendedStream, "wait_stream", lambda *_: None):
        assert fully_sharded_1().findings


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_pipeline_of_torch_has_no_finding(rank: int) -> None:
    with recording(world=3, rank=rank, cuda=True) as tape:
        dist.init_process_group("nccl")
        device = torch.device("cuda")
        given, made = (torch.randn(2, 8, device=device) for _ in range(2))
        stage = PipelineStage(
            nn.Linear(8, 8).to(device),
            rank,
            3,
            device,
            input_args=given.requires_grad_(rank > 0),
            output_args=made.requires_grad_(),
            output_grads=made.detach() if rank < 2 else None,
            input_grads=made.detach() if rank else None,
        )
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda one, other: (one - other).mean())
        batch = torch.randn(4, 8, device=device)
        cast("Any", schedule).step(*[batch] * (rank == 0), target=batch if rank == 2 else None)
    assert tape.findings == []
    assert tape.refused == {}
    kinds = {each.kind for calls in tape.collectives.values() for each in calls}
    assert kinds & {"send", "recv"}


def test_objects_of_another_rank_are_refused() -> None:
    with recording(world=2, rank=1) as tape:
        dist.init_process_group("nccl")
        dist.send_object_list([1], dst=0)
        with pytest.raises(UnrecordableError, match="objects of another rank are not known"):
            dist.recv_object_list([None], src=0)
    assert tape.refused


TRANSFORMER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ids = torch.randint(0, 64, (2, 8), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
def test_a_model_of_transformers_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRANSFORMER, "utf-8")
    recorded = record_script(["python", str(script)], world=2, ranks=[0], cuda=True)
    assert recorded.failures == []
    assert recorded.findings == []
    assert recorded.ranks[0]["operations"] > 500
