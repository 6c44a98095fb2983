"""Record every operator that torch dispatches, with the memory that it accesses."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zsim_record.clocks.call_stack import CallStack
from zsim_record.clocks.stream_clock import ClockTimeline, Tick
from zsim_record.record.operator_access import ALLOCATES_ONLY, OperatorAccess, access_of, tensors_in
from zsim_record.record.operator_cost import kernel_of
from zsim_record.record.pretended_streams import DEVICE_TYPE, DeviceStreams, in_backward
from zsim_record.record.recorded_collectives import CollectiveRecorder
from zsim_record.record.tape import Item, Tape, site_of

aten = torch.ops.aten
COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"})
REAL_ELEMENTS_MAX = 2**20
"""Larger integer tensors are fake, like all other tensors."""
Arguments = Sequence[Any]
Keywords = Mapping[str, Any]


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators on the current stream, or on the host if no tensor is on the device."""

    def __init__(self, tape: Tape, streams: DeviceStreams, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._tape = tape
        self._streams = streams
        self.collectives = CollectiveRecorder(tape, streams)
        self._special: dict[torch._ops.OpOverload, Callable[..., object]] = {
            aten._local_scalar_dense.default: self._item,
            aten.equal.default: self._equal,
            aten.is_pinned.default: self._is_pinned,
            aten._pin_memory.default: self._pin_memory,
        }

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """Run `func` on fake tensors and record its memory accesses."""
        for each in types:
            if not issubclass(each, FakeTensor) and _dispatches_itself(each):
                return NotImplemented  # DTensor: its inner operators come here
        self._streams.note_nodes()
        self._tape.begin_operation()
        given = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(*args, **given)
        if self.collectives.handles(func):
            return self.collectives.record(func, args, given)
        access = access_of(func)
        if not any(issubclass(each, FakeTensor) for each in types):
            return self._without_fakes(func, access, args, given)
        if access.is_silent:
            return func(*args, **given)
        return self._recorded(func, access, args, given)

    def _recorded(
        self,
        func: torch._ops.OpOverload,
        access: OperatorAccess,
        args: Arguments,
        given: Keywords,
        run_with: Arguments | None = None,
    ) -> object:
        if access.name == "aten::empty" and given.get("pin_memory"):
            return self._pinned_empty(func, args, given)
        result = self._run(func, args if run_with is None else run_with, given)
        self._tape.operation_count += 1
        self._note(access, args, given, result)
        if self._tape.journal is not None:
            self._describe(func, access, args, given, result)
        return result

    def _describe(
        self,
        func: torch._ops.OpOverload,
        access: OperatorAccess,
        args: Arguments,
        given: Keywords,
        result: object,
    ) -> None:
        """Add the cost of the operation that was just recorded to the journal."""
        assert self._tape.journal is not None
        reads, writes = access.read_tensors(args, given), access.written_tensors(args, given)
        moved = [*reads, *writes, *access.made_tensors(result)]
        self._tape.journal.describe(
            kernel_of(func, args, moved, result),
            in_backward=in_backward(),
            is_copy=access.name in COPIES,
        )

    def _without_fakes(
        self, func: torch._ops.OpOverload, access: OperatorAccess, args: Arguments, given: Keywords
    ) -> object:
        """Compute operators without fake tensors: numbers, and small CPU tensors of integers.

        Index arithmetic, device meshes and token ids then have real values.
        """
        device = given.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return self._recorded(func, access, args, given, self._pretended(args))
        if any(True for value in (*args, *given.values()) for _ in tensors_in(value)):
            result = _computed(func, args, given)
            if not access.is_silent:
                self._note(access, args, given, result)
            return result
        result = self._recorded(func, access, args, given)
        if isinstance(result, torch.Tensor) and self._is_small_and_whole(result):
            return _computed(func, args, given)
        return result

    def _pretended(self, args: Arguments) -> Arguments:
        """Replace real tensors by fake ones, from which fake tensors of a device can be created."""
        fake = self._fake_mode.from_tensor
        return tuple(fake(each) if isinstance(each, torch.Tensor) else each for each in args)

    def _is_small_and_whole(self, tensor: torch.Tensor) -> bool:
        return (
            device_type(tensor) == "cpu"
            and not tensor.dtype.is_floating_point
            and not tensor.dtype.is_complex
            and tensor.numel() <= REAL_ELEMENTS_MAX
            and not self._tape.is_pinned(tensor)
        )

    def _run(self, func: torch._ops.OpOverload, args: Arguments, kwargs: Keywords) -> object:
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            name = func._schema.name
            raise self._tape.refuse(f"{name}: the size of its result depends on data") from error
        except (UnsupportedOperatorException, NotImplementedError) as error:
            name = func._schema.name
            raise self._tape.refuse(f"{name}: there is no rule for its result") from error

    def _note(
        self, access: OperatorAccess, args: Arguments, kwargs: Keywords, result: object
    ) -> None:
        if access.name in ALLOCATES_ONLY:
            for tensor in tensors_in(result):
                if device_type(tensor) == DEVICE_TYPE:
                    self._tape.block(tensor, self._streams.current.timeline)
        reads = list(access.read_tensors(args, kwargs))
        writes = list(access.written_tensors(args, kwargs))
        new = access.made_tensors(result)
        touched = [*reads, *writes, *new]
        if any(each.layout is not torch.strided for each in touched):
            raise self._tape.refuse(f"{access.name}: sparse tensors have no storage to watch")
        on_device = [each for each in touched if device_type(each) == DEVICE_TYPE]
        if not on_device:
            self._note_on_host(access.name, reads, [*writes, *new])
        elif len(on_device) == len(touched):
            self._note_on_stream(access.name, reads, [*writes, *new])
        elif access.name in COPIES:
            self._note_copy(access.name, args, kwargs, reads, writes, new)
        else:  # numbers on the CPU are read at the kernel launch
            near = [each for each in reads if device_type(each) != DEVICE_TYPE]
            self._note_on_host(access.name, near, [])
            self._note_on_stream(
                access.name,
                [each for each in reads if device_type(each) == DEVICE_TYPE],
                [each for each in (*writes, *new) if device_type(each) == DEVICE_TYPE],
            )

    def _note_on_stream(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        timeline = self._streams.current.timeline
        tape = self._tape
        tick = tape.clocks.launch(tape.host, timeline)
        stack = tape.stack()
        for tensor in reads:
            tape.note(
                tensor, timeline, tick, writes=False, operation=name, stack=stack, home=timeline
            )
        for tensor in writes:
            tape.note(
                tensor, timeline, tick, writes=True, operation=name, stack=stack, home=timeline
            )

    def _note_on_host(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Record accesses of the host; only pinned memory can race with a stream."""
        tape = self._tape
        pinned_reads = [each for each in reads if tape.is_pinned(each)]
        pinned_writes = [each for each in writes if tape.is_pinned(each)]
        if not pinned_reads and not pinned_writes:
            return
        tick = tape.clocks.advance(tape.host)
        stack = tape.stack()
        for tensors, writing in ((pinned_reads, False), (pinned_writes, True)):
            for tensor in tensors:
                tape.note(
                    tensor,
                    tape.host,
                    tick,
                    writes=writing,
                    operation=name,
                    stack=stack,
                    home=None,
                )

    def _note_copy(
        self,
        name: str,
        args: Arguments,
        kwargs: Keywords,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
    ) -> None:
        """Record copies between a device and the host, which may outlast the call."""
        timeline = self._streams.current.timeline
        tape = self._tape
        asynchronous = bool(
            kwargs.get("non_blocking") or (name != "aten::_to_copy" and len(args) > 2 and args[2])
        )
        if name == "aten::_to_copy" and asynchronous:
            for tensor in new:
                if device_type(tensor) != DEVICE_TYPE:
                    tape.pin(tensor)  # as torch does for a non-blocking copy
        near_writes = [each for each in (*writes, *new) if device_type(each) != DEVICE_TYPE]
        pageable_write = any(not tape.is_pinned(each) for each in near_writes)
        tick = tape.clocks.launch(tape.host, timeline)
        stack = tape.stack()
        for tensor in reads:
            self._note_copied(tensor, timeline, tick, stack, name, writes=False)
        for tensor in (*writes, *new):
            self._note_copied(tensor, timeline, tick, stack, name, writes=True)
        if not asynchronous or pageable_write:
            tape.clocks.follow(tape.host, timeline)

    def _note_copied(
        self,
        tensor: torch.Tensor,
        timeline: ClockTimeline,
        tick: Tick,
        stack: CallStack,
        name: str,
        *,
        writes: bool,
    ) -> None:
        on_device = device_type(tensor) == DEVICE_TYPE
        self._tape.note(
            tensor,
            timeline,
            tick,
            writes=writes,
            operation=name,
            stack=stack,
            home=timeline if on_device else None,
            known_to_allocator=not on_device,
        )

    def _item(self, tensor: torch.Tensor) -> Item:
        """Return the value that the host reads from a tensor.

        For a tensor on the device, the host waits.
        """
        tape = self._tape
        if not isinstance(tensor, FakeTensor):
            self._note_on_host("aten::item", [tensor], [])
            real = _computed(aten._local_scalar_dense.default, (tensor,), {})
            return cast("Item", real)
        known = getattr(tensor, "constant", None)
        if device_type(tensor) == DEVICE_TYPE:
            self._note_on_stream("aten::item", [tensor], [])
            tape.clocks.follow(tape.host, self._streams.current.timeline)
        else:
            self._note_on_host("aten::item", [tensor], [])
            if known is not None:
                value: Item = known.item()
                return value
        return self._value(tensor)

    def _value(self, tensor: torch.Tensor) -> Item:
        tape = self._tape
        where = site_of(tape.stack())
        given = tape.items(where[0]) if tape.items is not None and where else None
        if given is not None:
            return given
        tape.invent(".item() = 1")
        if tensor.dtype is torch.bool:
            return True
        if tensor.dtype.is_complex:
            return 1 + 0j
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        tape = self._tape
        if device_type(one) == DEVICE_TYPE:
            self._note_on_stream("aten::equal", [one, other], [])
            tape.clocks.follow(tape.host, self._streams.current.timeline)
        else:
            self._note_on_host("aten::equal", [one, other], [])
            if not isinstance(one, FakeTensor) and not isinstance(other, FakeTensor):
                return bool(_computed(aten.equal.default, (one, other), {}))
        tape.invent("torch.equal() = True")
        return True

    def _is_pinned(self, tensor: torch.Tensor, device: object = None) -> bool:
        del device
        return self._tape.is_pinned(tensor)

    def _pin_memory(self, tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        del device
        if device_type(tensor) != "cpu":
            raise self._tape.refuse("pin_memory() of a tensor that is not on the CPU")
        self._note_on_host("aten::_pin_memory", [tensor], [])
        real = not isinstance(tensor, FakeTensor)
        copy = _computed(aten.clone.default, (tensor,), {}) if real else torch.empty_like(tensor)
        assert isinstance(copy, torch.Tensor)
        self._tape.pin(copy)
        self._note_on_host("aten::_pin_memory", [], [copy])
        return copy

    def _pinned_empty(
        self, func: torch._ops.OpOverload, args: Arguments, kwargs: Keywords
    ) -> object:
        result = func(*args, **{**kwargs, "pin_memory": False})
        for tensor in tensors_in(result):
            self._tape.pin(tensor)
        return result


def _computed(func: torch._ops.OpOverload, args: Arguments, given: Keywords) -> object:
    with _disable_current_modes():
        return func(*args, **given)


def device_type(tensor: torch.Tensor) -> str:
    """Return the device type of `tensor`, the pretended one if it is fake, without a dispatch."""
    fake = getattr(tensor, "fake_device", None)
    return (tensor.device if fake is None else fake).type


def _dispatches_itself(kind: type) -> bool:
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl
