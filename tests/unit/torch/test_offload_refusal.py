"""Device budgets, folders of files, and failures of threads: one line each, in one process."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from offloaded_by_hand import Offloaded, OffloadedStates
from reduced_by_hand import Plan, Reduced, batches
from sharded_net import UNITS, Loss, Net

from zsim.backend.backend import RefusedError
from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Free, FreeMode, Operation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Place, Pool, Schedule
from zsim_torch import capability
from zsim_torch.execute import blocking_host
from zsim_torch.execute.host_workers import HostWorkError
from zsim_torch.observe.observer import DeviceBudgetError
from zsim_torch.train import Option, Trained, train

FILES = Offloaded(ranks=1, groups=3, files=True, steps=2)


def schedule_of(plan: Plan) -> Schedule:
    made = OffloadedStates(plan) if isinstance(plan, Offloaded) else Reduced(plan)
    return made.write()


def run(
    plan: Plan, schedule: Schedule | None = None, net: Net | None = None, **option: object
) -> Trained:
    return train(
        net or Net(),
        UNITS,
        schedule or schedule_of(plan),
        batches(plan, 0),
        steps=plan.steps,
        option=Option(write_back=False, **option),  # type: ignore[arg-type]
    )


def test_a_schedule_whose_book_is_above_the_budget_is_refused_with_what_it_needs() -> None:
    needed = capability.ledger_peak_bytes(schedule_of(FILES), Place.DEVICE)
    with pytest.raises(RefusedError) as caught:
        run(FILES, device_budget=needed - 1)
    assert str(caught.value) == (
        f"device_budget: {needed - 1} B must be at least {needed} B, the largest book of the "
        "device's pools"
    )


class Wasteful(Loss):
    """Makes a temporary tensor that no book has."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) + torch.zeros(10_000).sum()


def test_a_budget_is_counted_by_who_watches_live_storages() -> None:
    needed = capability.ledger_peak_bytes(schedule_of(FILES), Place.DEVICE)
    net = Net()
    net.loss = Wasteful()
    why = r"^step/mb0/loss/forward: 40\.\d kB live on the device, the budget is 20 kB$"
    with pytest.raises(DeviceBudgetError, match=why):
        run(FILES, net=net, device_budget=20_000)
    observed = dict(run(FILES, device_budget=needed).trace.observed)
    assert 0 < observed["live_bytes_peak/all"] <= needed


def test_what_does_not_fit_on_the_device_trains_through_files() -> None:
    plain = Plan(ranks=1, adam=True, steps=2)
    budget = capability.ledger_peak_bytes(schedule_of(FILES), Place.DEVICE)
    with pytest.raises(RefusedError, match="device_budget"):
        run(plain, device_budget=budget)
    found = run(FILES, device_budget=budget).full_parameters()
    for name, value in run(plain).full_parameters().items():
        assert torch.equal(found[name], value)


def test_folders_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"^offload_path: .*nowhere: No such file or directory$"):
        run(FILES, offload_path=tmp_path / "nowhere")
    with pytest.MonkeyPatch.context() as patch:
        found = os.statvfs(tmp_path)
        patch.setattr(os, "statvfs", lambda _: _Full(found.f_frsize))
        with pytest.raises(RefusedError, match=r"has 0 B free, the files of the ranks need 12\.3"):
            run(FILES, offload_path=tmp_path)


class _Full:
    f_bavail = 0

    def __init__(self, size: int) -> None:
        self.f_frsize = size


def test_a_run_without_files_asks_for_no_folder() -> None:
    run(replace(FILES, files=False), offload_path=Path("/nowhere"))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_drive_that_fails_ends_the_run_with_its_operation(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, seen = getattr(os, call), list[int]()

    def failing(descriptor: int, memory: Sequence[memoryview], offset: int) -> int:
        seen.append(offset)
        if len(seen) > 60:
            raise OSError(5, "Input/output error")
        return int(right(descriptor, memory, offset))

    monkeypatch.setattr(os, call, failing)
    why = r"^step/(read|write)\d/\w+ in step \d+: \[Errno 5\] Input/output error$"
    with pytest.raises(HostWorkError, match=why):
        run(replace(FILES, steps=50))


def test_a_read_of_device_memory_is_for_the_cpu_alone() -> None:
    build = ScheduleBuilder.of("direct", data=1)
    build.pools.append(Pool(name="files", place=Place.NVME))
    handle = build.stream("read")
    state = build.buffer("state", 4, pool="files", home=handle, persistent=True)
    here = build.buffer("here", 4, persistent=True)
    build.setup.allocate(state, here)
    filled = build.setup.fill("fill", here.all, 2.0)
    build.setup.write_file("write", here.all, state.all, stream=handle, after=[filled])
    build.step.read("read", state.all, here.all, stream=handle)
    schedule = build.schedule()
    assert capability.of_device_reads(schedule) == (
        "setup/write: here is in device memory; the torch backend has no GPUDirect Storage, files "
        "go through host memory"
    )
    assert capability.of_device_reads(schedule_of(FILES)) is None
    assert capability.of_schedule(schedule) is None


def test_nobody_witnesses_what_threads_do() -> None:
    with pytest.raises(RefusedError, match=r"^witness: must be off, operations on adam run on a"):
        run(FILES, witness=True)


def test_threads_do_not_hang_where_the_host_waits() -> None:
    """A thread waits for nothing that is not issued, so waits for it come to an end."""
    assert blocking_host.refusal(schedule_of(replace(FILES, ranks=2))) is None


def with_frees(schedule: Schedule, mode: FreeMode) -> Schedule:
    (program,) = schedule.programs

    def freed(operation: Operation) -> Operation:
        if isinstance(operation, Free) and "slot" in operation.buffer:
            return replace(operation, mode=mode)
        return operation

    step = tuple(freed(operation) for operation in program.step)
    return replace(schedule, programs=(replace(program, step=step),))


@pytest.mark.parametrize("mode", FreeMode)
def test_slots_may_be_given_back_in_every_way(mode: FreeMode) -> None:
    wanted = run(FILES).full_parameters()
    schedule = with_frees(schedule_of(replace(FILES, poison=True)), mode)
    order = [each.invariant for each in check(schedule) if each.invariant != "memory"]
    assert order == []
    found = run(FILES, schedule, poison=True)
    assert found.nan_origin is None
    for name, value in wanted.items():
        assert torch.equal(found.full_parameters()[name], value)


@pytest.mark.one_commit_in(9)
def test_a_reader_that_does_not_wait_for_the_write_before_it_is_seen_with_poison() -> None:
    """A slot is spoiled when it is freed: the write that is still under way writes no numbers."""
    schedule = schedule_of(FILES)
    (program,) = schedule.programs
    step = tuple(
        replace(each, uses=tuple(use for use in each.uses if "write" not in str(use)))
        if isinstance(each, Free)
        else each
        for each in program.step
    )
    wrong = replace(schedule, programs=(replace(program, step=step),))
    assert {each.invariant for each in check(wrong)} >= {"lifetime"}
    seeds = range(8)
    plan = replace(FILES, steps=6)
    seen = [
        train(
            Net(),
            UNITS,
            wrong,
            batches(plan, 0),
            steps=plan.steps,
            seed=seed,
            option=Option(write_back=False, poison=True),
        ).nan_origin
        for seed in seeds
    ]
    assert any(seen)
