"""States in host memory and files, updated by a thread of the host: real ranks, equal bits."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from offloaded_by_hand import READS, THREAD, WRITES, Offloaded, OffloadedStates
from reduced_by_hand import Plan, Reduced, batches
from sharded_net import UNITS, Net
from shared_ranks import SharedPools
from torch import distributed

from zsim.dtype import DType
from zsim.proof import check
from zsim.schedule.host_traffic import file_bytes
from zsim.trace.trace import Event
from zsim_torch.train import Option, train

Found = tuple[dict[str, torch.Tensor], dict[str, float], tuple[Event, ...]]


def trained(plan: Plan) -> Found:
    """Parameters, what was observed, and what ran when, on this rank."""
    kind = OffloadedStates if isinstance(plan, Offloaded) else Reduced
    rank = distributed.get_rank()
    found = train(
        Net(),
        UNITS,
        kind(plan).write(),  # type: ignore[arg-type]
        batches(plan, rank),
        steps=plan.steps,
        option=Option(observe=True, write_back=False, poison=plan.poison),
    )
    return found.full_parameters(), dict(found.trace.observed), found.trace.ranks[0].events


def all_trained(plans: list[Plan]) -> list[Found]:
    return [trained(plan) for plan in plans]


def cases(ranks: int) -> list[tuple[Plan, list[Offloaded]]]:
    """Trainings on the device, and what is offloaded of each."""
    found: list[tuple[Plan, list[Offloaded]]] = []
    for parameter, micro_batches in product((DType.FP32, DType.BF16), (1, 3)):
        plan = Plan(ranks=ranks, parameter=parameter, micro_batches=micro_batches, adam=True)
        one = Offloaded(ranks=ranks, parameter=parameter, micro_batches=micro_batches)
        three = replace(one, groups=3 if ranks < 3 else 2, files=True)
        offloaded = [one, replace(one, groups=three.groups), three, replace(three, slots=1)]
        if parameter is DType.BF16:
            offloaded = [three, replace(three, poison=True), replace(one, poison=True)]
        found.append((plan, offloaded))
    return found


Asked = list[tuple[Plan, list[Offloaded]]]
Ran = tuple[Asked, list[list[Found]]]


@pytest.fixture(
    scope="module",
    params=[*product((1, 2, 4), range(4))],
    ids=lambda asked: "{}-{}".format(*asked),
)
def ran(pool_of: SharedPools, request: pytest.FixtureRequest) -> Ran:
    """Return a training of `cases` with its offloaded ones, and what every rank found for them."""
    ranks, number = request.param
    plan, offloaded = cases(ranks)[number]
    return [(plan, offloaded)], [*pool_of(ranks).run(all_trained, [plan, *offloaded])]


@pytest.mark.matrix(18, together=True)
def test_what_is_offloaded_changes_no_bit(ran: Ran) -> None:
    asked, by_rank = ran
    for found in by_rank:
        left = iter(found)
        for plan, offloaded in asked:
            wanted = next(left)[0]
            assert all(value.isfinite().all() for value in wanted.values())
            for each in offloaded:
                parameters = next(left)[0]
                for name, value in wanted.items():
                    assert torch.equal(parameters[name], value), (plan, each, name)


@pytest.mark.matrix(18, together=True)
def test_pools_hold_what_their_book_says_and_files_move_what_the_schedule_says(ran: Ran) -> None:
    asked, by_rank = ran
    for found in by_rank:
        left = iter(found)
        for _, offloaded in asked:
            next(left)
            for each in offloaded:
                observed = next(left)[1]
                pools = ("host", "slots", "files") if each.files else ("host",)
                for pool in pools:
                    live = observed[f"live_bytes_peak/pool/{pool}"]
                    assert live == observed[f"booked_bytes_peak/pool/{pool}"] > 0
                assert observed["live_bytes_peak/host"] >= observed["live_bytes_peak/pool/host"]
                if each.files:
                    (program,) = OffloadedStates(each).write().programs
                    moved = file_bytes(program)
                    assert moved.read == moved.written == 12 * each.shard
                    assert observed["read_bytes/pool/files"] == moved.read * each.steps
                    assert observed["written_bytes/pool/files"] == moved.written * each.steps


@pytest.mark.matrix(18, together=True)
def test_threads_and_handles_are_in_the_trace_in_their_order(ran: Ran) -> None:
    asked, by_rank = ran
    place = next(
        index
        for index, each in enumerate(
            each for plan, offloaded in asked for each in (plan, *offloaded)
        )
        if isinstance(each, Offloaded) and each.files
    )
    for found in by_rank:
        events = found[place][2]
        assert {THREAD, READS, WRITES} <= {event.stream for event in events}
        at = {(event.step, event.operation): event for event in events}
        for step in range(3):
            for number in range(2):
                read, update, write = (
                    at[step, f"step/{name}{number}{rest}"]
                    for name, rest in (("read", "/master"), ("update", ""), ("write", "/master"))
                )
                assert read.start_ps <= read.end_ps <= update.start_ps
                assert update.end_ps <= write.start_ps


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_schedules_pass_check(ranks: int) -> None:
    for _, offloaded in cases(ranks)[:1]:
        for plan in offloaded:
            assert check(OffloadedStates(plan).write()) == ()
