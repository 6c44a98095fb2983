# ruff: noqa: ANN401  (a wrong function takes whatever the right one takes)
"""Wrong views, wrong buffers, and memory that lives too long or not long enough."""

from typing import Any

import torch

from faults.of_executor.patches import Function, altered, plant
from faults.of_executor.witnessed_jobs import CALLS, ZERO0, ZERO1, ZERO2, ZERO3
from zsim.schedule.operation import View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind
from zsim_torch.execute import sharded_optimizer as optimizer
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.memory_part import Remains
from zsim_torch.execute.operands import Operands
from zsim_torch.execute.streams import CpuStreams


def allocated(self: Computer) -> dict[str, torch.Tensor]:
    return self.work.memory._flat  # pyright: ignore[reportPrivateUsage]


# Views.


@plant(ZERO2, LiveMemory, "extent", rank=1)
@altered
def an_own_part_begins_an_element_early(right: Function, memory: LiveMemory, view: View) -> Any:
    start, size = right(memory, view)
    return (start - 1, size) if view.axis is not None and start else (start, size)


@plant(ZERO1, LiveMemory, "extent", rank=1)
@altered
def an_own_part_is_the_neighbours(right: Function, memory: LiveMemory, view: View) -> Any:
    start, size = right(memory, view)
    return (start - size if view.axis is not None else start), size


@plant(ZERO0, LiveMemory, "shaped")
@altered
def a_gradient_is_added_beside_its_place(
    right: Function, memory: LiveMemory, view: View, *where: Any
) -> Any:
    is_gradient = memory.program.by_name[view.buffer].kind is Kind.GRADIENT
    return right(memory, replace(view, start=max(0, view.start - is_gradient)), *where)


@plant(CALLS, LiveMemory, "pieces")
@altered
def a_copy_reads_the_first_half_twice(right: Function, memory: LiveMemory, view: View) -> Any:
    return right(memory, replace(view, start=0))


@plant(ZERO2, Executor, "_number")
@altered
def a_branch_reads_something_else(right: Function, self: Executor, view: View) -> Any:
    persistent = self.machine.program.persistent[0]
    return float(self.machine.memory.flat(View(buffer=persistent, size=1)).item()) * 0


# Buffers.


@plant(ZERO3, optimizer, "update")
@altered
def the_moments_are_swapped(right: Function, rule: Any, operands: Any, scalars: Any) -> Any:
    return right(rule, replace(operands, moments=operands.moments[::-1]), scalars)


@plant(ZERO3, LiveMemory, "flat", rank=1)
@altered
def one_moment_serves_as_both(right: Function, memory: LiveMemory, view: View) -> Any:
    return right(memory, replace(view, buffer=view.buffer.replace("moment2", "moment1")))


@plant(ZERO2, Computer, "_parameters")
def a_block_computes_with_the_parameters_of_another(right: Function) -> Function:
    first: list[Operands] = []

    def wrong(self: Computer, known: Operands) -> Any:
        unit = known.compute.unit
        if unit == "block0":
            first.append(known)
        return right(self, first[0] if unit == "block1" and first else known)

    return wrong


@plant(ZERO3, LiveMemory, "shaped")
def what_was_gathered_first_is_read_ever_after(right: Function) -> Function:
    first: dict[View, torch.Tensor] = {}

    def wrong(memory: LiveMemory, view: View, shape: torch.Size, start: int = 0) -> Any:
        found = right(memory, view, shape, start)
        if (
            view.buffer.endswith("/gathered")
            and view.size < memory.program.by_name[view.buffer].elements
        ):
            return first.setdefault(view, found)
        return found

    return wrong


@plant(ZERO0, Computer, "_bind_outputs")
def an_output_of_the_micro_batch_before_is_passed_on(right: Function) -> Function:
    before: dict[str, Any] = {}

    def wrong(self: Computer, known: Operands, outputs: Any) -> Any:
        right(self, known, before.get(known.compute.unit, outputs))
        before[known.compute.unit] = outputs

    return wrong


@plant(ZERO1, Computer, "_bind_gradient")
def a_gradient_of_the_micro_batch_before_is_taken(right: Function) -> Function:
    before: dict[View, Any] = {}

    def wrong(self: Computer, view: View, gradient: Any) -> Any:
        right(self, view, before.get(view, gradient))
        before[view] = gradient

    return wrong


@plant(ZERO3, LiveMemory, "_take")
@altered
def memory_is_taken_in_another_format(right: Function, memory: LiveMemory, buffer: Buffer) -> Any:
    made = right(memory, buffer)
    return made.double() if "/moment" in buffer.name else made


@plant(ZERO3, LiveMemory, "_take")
def memory_is_taken_from_a_pool_of_its_own(right: Function) -> Function:
    """A pool of one size: of what stays alive, each free is waited for."""
    kept: dict[int, torch.Tensor] = {}

    def wrong(memory: LiveMemory, buffer: Buffer) -> Any:
        made = right(memory, buffer)
        own = "gathered" in buffer.name and made.numel() in (kept or {made.numel()})
        return kept.setdefault(made.numel(), made) if own else made

    return wrong


# Life of memory.


@plant(ZERO3, LiveMemory, "drop", rank=1)
def memory_is_freed_late(right: Function) -> Function:
    held: list[torch.Tensor | None] = []

    def wrong(
        memory: LiveMemory, name: str, remains: Remains, lent: object, *, travelled: bool
    ) -> Any:
        held.append(remains.flat)
        del held[:-2]
        right(memory, name, remains, lent, travelled=False)

    return wrong


@plant(ZERO3, Computer, "_forward", rank=1)
@altered
def memory_is_freed_early(right: Function, self: Computer, known: Operands) -> Any:
    right(self, known)
    flat = allocated(self)
    for name in [each for each in flat if each.endswith("/gathered")]:
        flat[name] = flat[name].clone()


@plant(ZERO0, Computer, "_bind_outputs", rank=1)
def what_forward_made_is_kept_for_ever(right: Function) -> Function:
    held: list[torch.Tensor] = []

    def wrong(self: Computer, known: Operands, outputs: list[torch.Tensor]) -> Any:
        held.extend(outputs)
        right(self, known, outputs)

    return wrong


@plant(CALLS, CpuStreams, "home_waits")
@altered
def a_free_waits_for_nothing(right: Function, *given: Any, **named: Any) -> Any:
    pass
