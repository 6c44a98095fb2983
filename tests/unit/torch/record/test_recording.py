"""What a recorded script sees, what is said of what cannot be known, and what torch must have."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zsim.mistake import MistakeError
from zsim_record import recording
from zsim_record.record.finding_report import LIMITS, ScriptRecording, document_of
from zsim_record.record.script_process import ScriptError, record_script
from zsim_record.record.tape import UnrecordableError
from zsim_record.script_recording import cluster_of


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (4, 4), (4, -1)])
def test_a_rank_out_of_the_world_is_refused(world: int, rank: int) -> None:
    with pytest.raises(ValueError, match="must be"), recording(world=world, rank=rank):
        pass


def test_a_value_that_is_asked_for_is_made_up_and_said_to_be() -> None:
    with recording(world=2) as tape:
        loss = torch.zeros((), device="zsim")
        assert loss.item() == 1.0
    ((what, count),) = tape.invented.items()
    assert what.startswith(".item() = 1 at ")
    assert "test_recording.py" in what
    assert count == 1


def test_a_value_can_be_given() -> None:
    with recording(world=2, items=lambda line: 0.25 if line.function else None) as tape:
        assert torch.ones((), device="zsim").item() == 0.25
    assert tape.invented == {}


def test_whole_numbers_of_the_cpu_are_what_they_are() -> None:
    with recording(world=2):
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert torch.tensor([3, 4]).sum().item() == 7


def test_sizes_that_depend_on_data_are_refused_by_name() -> None:
    with recording(world=2) as tape, pytest.raises(UnrecordableError, match="aten::nonzero"):
        torch.ones(4, device="zsim").nonzero()
    assert any("aten::nonzero" in what for what in tape.refused)


def test_libraries_with_kernels_of_their_own_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with recording(world=2) as tape, pytest.raises(ModuleNotFoundError, match="flash_attn"):
        import_module("flash_attn")
    assert any("flash_attn" in what for what in tape.refused)


def test_cuda_graphs_are_refused_by_name() -> None:
    with recording(world=2, cuda=True), pytest.raises(UnrecordableError, match="CUDAGraph"):
        torch.cuda.CUDAGraph()


def test_what_torch_compile_would_do_is_left_out_and_said_to_be() -> None:
    with recording(world=2) as tape:
        module = nn.Linear(2, 2)
        assert torch.compile(module) is module
    assert any("torch.compile" in what for what in tape.invented)


def test_a_module_moves_to_the_device_with_its_optimizer() -> None:
    with recording(world=2):
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.to("zsim")
        module(torch.ones(2, 2, device="zsim")).sum().backward()
        optimizer.step()
        assert {each.device.type for each in module.parameters()} == {"zsim"}
        assert optimizer.param_groups[0]["params"][0] is module.weight


def test_nothing_of_a_recording_stays_behind() -> None:
    before = torch.Tensor.record_stream, torch.cuda.current_stream, torch.device
    with recording(world=2, cuda=True):
        dist.init_process_group("nccl")
    assert (torch.Tensor.record_stream, torch.cuda.current_stream, torch.device) == before
    assert not dist.is_initialized()
    assert torch.ones(2).sum().item() == 2


def test_memory_is_counted() -> None:
    with recording(world=2) as tape:
        kept = torch.ones(1024, device="zsim")
        torch.ones(1024, device="zsim")
        torch.ones(1, device="zsim")
        assert kept.numel() == 1024
    assert 8192 <= tape.peak_bytes <= 8196


def test_a_stream_has_the_name_that_it_is_assigned_to() -> None:
    with recording(world=2) as tape:
        uploads = torch.get_device_module("zsim").Stream()
        assert repr(uploads) == "<uploads>"
    assert "uploads" in {line.name for line in tape.clocks.timelines}


def test_backward_runs_on_the_stream_of_its_forward_and_the_caller_waits_for_it() -> None:
    with recording(world=2) as tape:
        device = torch.get_device_module("zsim")
        side = device.Stream()
        weight = nn.Parameter(torch.ones(4, device="zsim"))
        side.wait_stream(device.current_stream())
        with device.stream(side):
            loss: Any = (weight * weight).sum()
        forward = side.timeline.clock[side.timeline.number]
        loss.backward()
        assert side.timeline.clock[side.timeline.number] >= forward + 2
        assert weight.grad is not None
        weight.grad.add_(1)
    assert tape.findings == []


def test_the_answer_names_findings_and_ends_with_the_limits() -> None:
    with recording(world=2) as tape:
        side = torch.get_device_module("zsim").Stream()
        value = torch.ones(4, device="zsim")
        with torch.get_device_module("zsim").stream(side):
            value.sum()
    recorded = ScriptRecording([document_of(tape)])
    text = recorded.text()
    assert text.startswith("1 finding; rank 0 of 2")
    assert "race: side must wait for aten::ones on default stream before aten::sum" in text
    assert text.endswith(LIMITS[-1])
    page = recorded.page("a <script>")
    assert "a &lt;script&gt;" in page
    assert "side must wait" in page
    assert recorded.to_dict()["findings"] == recorded.findings


def test_a_command_that_is_no_script_is_refused() -> None:
    with pytest.raises(ScriptError, match="must be a Python script"):
        record_script(["python", "absent.py"], world=2, ranks=[0], cuda=False)


@pytest.mark.one_commit_in(24)
def test_a_script_is_recorded_in_a_process_and_its_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, sys\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(4, device='cuda'))\n"
        "raise KeyError(sys.argv[1])\n",
        "utf-8",
    )
    recorded = record_script(["python", str(script), "--lr"], world=2, ranks=[1], cuda=True)
    assert recorded.failures == ["rank 1: KeyError: '--lr'"]
    assert recorded.is_clean
    assert [len(each["collectives"]) for each in recorded.ranks] == [1]


def test_a_cluster_needs_a_schedule_to_simulate() -> None:
    with pytest.raises(MistakeError, match="--cluster: needs --schedule"):
        cluster_of("tiny", 4, is_used=False)


def test_a_cluster_has_as_many_nodes_as_the_world_needs() -> None:
    found = cluster_of("tiny", 20)
    assert found is not None
    assert found.nodes == -(-20 // found.gpus_per_node)
    assert cluster_of(None, 20) is None


PRIVATE = (
    "torch._C._only_lift_cpu_tensors",
    "torch._C._set_only_lift_cpu_tensors",
    "torch.distributed._register_comm_hook",
    "torch.distributed.BuiltinCommHookType",
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    "torch._C._acc.DeviceGuard",
    "torch._C._autograd.DeviceType.PrivateUse1",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._disabled_torch_dispatch_impl",
    "torch._C._swap_tensor_impl",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch.UntypedStorage._cdata",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.autograd.Variable._execution_engine",
    "torch.utils.flop_counter.flop_registry",
    "torch.distributed.Work.boxed",
    "torch.distributed.ProcessGroup.unbox",
    "torch.nn.Module._apply",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_of_torch_that_a_recording_uses_are_there(name: str) -> None:
    found: object = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"{name}: torch {torch.__version__} has it no more"
        found = getattr(found, part)


@pytest.mark.one_commit_in(24)
def test_a_process_in_which_a_backward_ran_before_cannot_be_recorded() -> None:
    program = """
import torch
torch.ones((), requires_grad=True).backward()
from zsim_record import recording
from zsim_record.record.tape import UnrecordableError
try:
    with recording(world=2):
        torch.nn.Linear(2, 2).to("zsim")(torch.ones(2, device="zsim")).sum().backward()
except UnrecordableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "a backward ran in this process before a recording began: record in a new process\n"
    )
