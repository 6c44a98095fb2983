# ruff: noqa: ANN401  (a wrong function takes whatever the right one takes)
"""Wrong copies, collectives, waits and updates."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import torch
from torch import distributed

from faults.of_executor.buffers import allocated
from faults.of_executor.patches import Function, Plant, altered, plant
from faults.of_executor.witnessed_jobs import (
    CALLS,
    FOUR,
    FSDP,
    ZERO0,
    ZERO1,
    ZERO2,
    ZERO3,
)
from zsim.schedule.operation import AllGather, AllReduce, Copy, Operation
from zsim.schedule.replace import replace
from zsim_torch.execute import collectives, executor
from zsim_torch.execute import sharded_optimizer as optimizer
from zsim_torch.execute.collectives import IssuedCollective, OwnGroup, ProcessGroups
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.copying import Copier
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.flights import Flights
from zsim_torch.execute.operands import Operands
from zsim_torch.execute.streams import CpuStreams
from zsim_torch.module.autograd import BackwardPart

# Copies and fills.


def _copies(name: str, where: str, change: Callable[[Function, Copier, Copy], object]) -> Plant:
    def make(right: Function) -> Function:
        def wrong(self: Copier, copy: Copy) -> None:
            change(right, self, copy)

        return wrong

    make.__name__ = name
    return plant(where, Copier, "run")(make)


def _copied(name: str, where: str, change: Callable[[Copy], Copy]) -> Plant:
    return _copies(name, where, lambda right, self, copy: right(self, change(copy)))


COPIES = (
    _copies("a_copy_is_dropped", CALLS, lambda right, self, copy: None),
    _copies(
        "one_copy_of_many_is_dropped",
        FSDP,
        lambda right, self, copy: None if "bucket1" in copy.id else right(self, copy),
    ),
    _copied(
        "source_and_target_are_swapped",
        CALLS,
        lambda copy: replace(copy, source=copy.target, target=copy.source),
    ),
    _copied("a_sum_is_overwritten", ZERO3, lambda copy: replace(copy, accumulate=False)),
    _copied("a_copy_adds_to_what_is_there", CALLS, lambda copy: replace(copy, accumulate=True)),
    _copies(
        "a_gradient_is_added_twice",
        ZERO3,
        lambda right, self, copy: [right(self, copy) for _ in range(1 + copy.accumulate)],
    ),
    _copied("a_copy_is_not_divided", CALLS, lambda copy: replace(copy, divisor=1)),
)


@plant(CALLS, executor, "_fill", rank=0)
@altered
def a_fill_is_dropped(right: Function, *given: Any) -> Any:
    pass


# What collectives are handed.


def _handed(
    name: str, where: str, change: Callable[[IssuedCollective], IssuedCollective], rank: int | None
) -> Plant:
    def make(right: Function) -> Function:
        def wrong(self: ProcessGroups, handed: Any) -> Any:
            return right(self, [change(one) for one in handed])

        return wrong

    make.__name__ = name
    return plant(where, ProcessGroups, "issue", rank=rank)(make)


def _cloned(one: IssuedCollective) -> IssuedCollective:
    return one._replace(source=None if one.source is None else one.source.clone())


def _elsewhere(one: IssuedCollective) -> IssuedCollective:
    return one._replace(target=None if one.target is None else one.target.clone())


def _as_whole_numbers(one: IssuedCollective) -> IssuedCollective:
    source, target = (
        each if each is None else each.view(torch.int32) for each in (one.source, one.target)
    )
    return one._replace(source=source, target=target)


def _reversed(one: IssuedCollective) -> IssuedCollective:
    if not isinstance(one.operation, AllGather) or one.target is None or one.source is None:
        return one
    return one._replace(source=one.target[: one.source.numel()])


HANDED = (
    _handed("a_copy_of_the_source_is_sent", ZERO3, _cloned, 1),
    _handed("the_result_goes_to_scratch_memory", ZERO3, _elsewhere, None),
    _handed("bits_are_added_as_whole_numbers", ZERO0, _as_whole_numbers, None),
    _handed("a_rank_sends_the_target_of_a_gather", CALLS, _reversed, 1),
)


@plant(CALLS, ProcessGroups, "member")
@altered
def the_communicator_of_another_group_is_used(
    right: Function, self: ProcessGroups, group: str
) -> Any:
    return right(self, "data")


@plant(FOUR, ProcessGroups, "member", why="had ranks (0, 2), the schedule says (0, 1)")
@altered
def a_communicator_has_the_members_of_another(
    right: Function, self: ProcessGroups, group: str
) -> Any:
    return right(self, "replicate" if group == "data" else group)


@plant(FOUR, OwnGroup, "peer", why="had other end 3, the schedule says 1")
@altered
def messages_go_around_the_ring_the_other_way(right: Function, self: OwnGroup, offset: int) -> Any:
    return right(self, -offset)


@plant(FOUR, OwnGroup, "peer", why="had other end 0, the schedule says 2")
@altered
def two_pairs_of_ranks_send_to_each_other(right: Function, self: OwnGroup, offset: int) -> Any:
    return self.ranks[self.place ^ 1]


@plant(CALLS, ProcessGroups, "member")
@altered
def the_default_process_group_is_used(right: Function, self: ProcessGroups, group: str) -> Any:
    found: OwnGroup = right(self, group)
    return found._replace(process_group=None)


@plant(CALLS, collectives, "REDUCE_OPERATION")
def a_mean_is_a_sum(right: Any) -> Any:
    return dict.fromkeys(right, distributed.ReduceOp.SUM)


@plant(ZERO2, collectives, "REDUCE_OPERATION")
def a_maximum_is_a_sum(right: Any) -> Any:
    return dict.fromkeys(right, distributed.ReduceOp.SUM)


@plant(CALLS, distributed, "broadcast")
@altered
def another_root_sends(right: Function, tensor: Any, src: int, **named: Any) -> Any:
    return right(tensor, src=1 - src, **named)


@plant(CALLS, ProcessGroups, "issue")
@altered
def members_of_a_together_are_handed_over_backwards(
    right: Function, self: ProcessGroups, handed: Any
) -> Any:
    return right(self, handed[::-1])


@plant(CALLS, collectives, "_hand_over")
@altered
def a_collective_runs_twice(right: Function, handed: Any, member: Any, **named: Any) -> Any:
    if handed.operation.id == "step/first":
        right(handed, member, asynchronous=True).wait()
    return right(handed, member, **named)


@plant(ZERO3, ProcessGroups, "issue")
@altered
def a_reduction_is_dropped(right: Function, self: ProcessGroups, handed: Any) -> Any:
    gathers = isinstance(handed[0].operation, AllGather)
    return right(self, handed) if gathers else []


@plant(ZERO0, Executor, "_bound")
def collectives_are_handed_over_in_another_order(right: Function) -> Function:
    held: list[Function] = []

    def wrong(self: Executor, operation: Operation) -> Function:
        issue = right(self, operation)

        def in_another_order() -> None:
            if not held:
                held.append(issue)
                return
            issue()
            held.pop()()

        return in_another_order if isinstance(operation, AllReduce) else issue

    return wrong


# Waiting.


@plant(ZERO3, ProcessGroups, "issue", rank=0)
def waits_return_at_once(right: Function) -> Function:
    held: list[Any] = []

    def wrong(self: ProcessGroups, handed: Any) -> Any:
        for work in held:
            work.wait()
        held[:] = right(self, handed)
        return [Mock(wait=lambda: True) for _ in held]

    return wrong


@plant(ZERO3, Flights, "before")
@altered
def operations_wait_for_nothing(right: Function, *given: Any) -> Any:
    return []


@plant(CALLS, CpuStreams, "host_waits")
@altered
def the_host_does_not_wait(right: Function, *given: Any) -> Any:
    pass


# The optimizer.


@plant(ZERO1, optimizer, "update", rank=1)
@altered
def an_update_is_dropped(right: Function, *given: Any) -> Any:
    pass


@plant(ZERO1, optimizer, "update")
@altered
def an_update_is_made_twice(right: Function, *given: Any) -> Any:
    right(*given)
    right(*given)


@plant(ZERO1, optimizer, "sum_of_squares")
@altered
def a_norm_leaves_a_gradient_out(right: Function, gradients: Any, target: Any) -> Any:
    right(gradients[1:], target)


@plant(ZERO2, optimizer, "is_finite")
@altered
def a_test_for_overflow_leaves_a_gradient_out(right: Function, gradients: Any, target: Any) -> Any:
    right(gradients[:-1], target)


@plant(ZERO2, optimizer, "unscale")
@altered
def a_gradient_is_unscaled_twice(right: Function, gradient: Any, scale: float) -> Any:
    right(right(gradient, scale) or gradient, scale)


@plant(ZERO1, optimizer, "clip")
@altered
def a_gradient_is_not_clipped(
    right: Function, rule: Any, squares: Any, gradients: Any, scale: float
) -> Any:
    right(rule, squares, gradients[1:], scale)


# Behind torch's back.


@plant(ZERO3, Computer, "_backward", rank=0)
@altered
def a_parameter_changes_that_nothing_writes(
    right: Function, self: Computer, known: Operands, part: BackwardPart
) -> Any:
    right(self, known, part)
    for name, flat in allocated(self).items():
        if name.endswith("/parameter"):
            flat.numpy()[0] += 1
