"""Record the operators of a rank at torch's dispatcher, and its calls of torch.distributed.

It sees every operator, including those of a backward and those inside torch.distributed. It records
storages, their bytes and process groups as passed to torch. The executor only reports when its host
reaches an operation. See `zsim.trace.witness`.

Checksums are taken before a collective is issued, and after the first wait for it.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from zsim.trace.witness import (
    Call,
    Checksum,
    Mark,
    Region,
    Storage,
    Witness,
    WitnessedCollective,
)
from zsim_torch.observe.dispatched import (
    KIND,
    by_place,
    is_even,
    is_fused_update,
    pairs,
    peer_of,
    reduction_of,
    regions_of,
    scripted,
    sides_of,
)
from zsim_torch.observe.observer import process_group_of, tensors_in
from zsim_torch.observe.watchers import Exchange, unwatched, watching

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHIFT: Final = 0x9E3779B9
SPLITS: Final = ("reduce_scatter", "all_to_all")
"""Collectives whose source has a part for each member."""
JOINS: Final = ("all_gather", "all_to_all")
"""Collectives whose target has a part from each member."""
"""Added to a bit pattern before it is cubed, so that zeros count."""


@dataclass(slots=True)
class _Open:
    """An issued collective, and the tensor for its result."""

    place: int
    target: torch.Tensor | None
    parts: int


@dataclass(slots=True)
class _Sums:
    """Checksums of tensors, on their device until the run is over."""

    taken: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def read(self) -> tuple[Checksum, ...]:
        """Return the checksums as numbers."""
        return tuple(
            (int(bits.item()), float(total), float(size))
            for bits, (total, size) in zip(
                self.taken[::2], (each.tolist() for each in self.taken[1::2]), strict=True
            )
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators that run inside it on this thread, and the backwards that it starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tick = 0
        self._since = 0
        self._marks: list[Mark] = []
        self._storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # A storage may be freed in any thread at any time: its tick, and True if in another thread.
        self._released: dict[int, tuple[int, bool]] = {}
        self._thread = threading.get_ident()
        self._calls: list[Call] = []
        self._collectives: list[WitnessedCollective] = []
        self._brought: list[_Sums] = []
        self._left: list[_Sums] = []
        self._open: dict[int, tuple[distributed.Work, list[_Open]]] = {}
        self._wait = distributed.Work.wait
        self._waits = False
        self._life = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because excluding these frames would import torch's compiler (2.5 s)."""
        return False

    def __enter__(self) -> Self:
        """Start recording operators and waits for collectives."""
        recorder, wait = self, self._wait

        def waited(work: distributed.Work, *arguments: Any, **named: Any) -> bool:  # noqa: ANN401
            recorder._waits = True  # Gloo divides for an average in the waiting thread
            try:
                done = wait(work, *arguments, **named)
            finally:
                recorder._waits = False
            recorder._complete(work)
            return done

        setattr(distributed.Work, "wait", waited)  # noqa: B010  (pybind's class lets us)
        self._life.enter_context(watching(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401  (passed on as it is)
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._life.close()
        setattr(distributed.Work, "wait", self._wait)  # noqa: B010

    def mark(self, step: int, operation: str) -> None:
        """Record that the host reaches `operation`; without a name, the end of the step."""
        self._since = self._next()
        self._marks.append(Mark(step=step, operation=operation, tick=self._since))

    def witness(self) -> Witness:
        """Return the record."""
        return Witness(
            marks=tuple(self._marks),
            storages=tuple(
                replace(storage, released=released, by_thread=by_thread)
                for number, storage in enumerate(self._storages)
                for released, by_thread in [self._released.get(number, (None, False))]
            ),
            calls=tuple(self._calls),
            collectives=tuple(
                replace(each, brought=brought.read(), left=left.read())
                for each, brought, left in zip(
                    self._collectives, self._brought, self._left, strict=True
                )
            ),
        )

    def _next(self) -> int:
        self._tick += 1
        return self._tick

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Record the arguments of `func`, run it, and record its results."""
        named = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, named)
        values = by_place(func, args, named)
        given = {place: self._regions(value) for place, value in values.items()}
        reads, writes = (
            [region for place in places for region in given.get(place, ())]
            for places in sides_of(func)
        )
        result = func(*args, **named)
        if not self._waits and (
            is_fused_update(func) or any(self._is_older(each[0]) for each in (*reads, *writes))
        ):
            self._calls.append(
                Call(
                    operator=func._schema.name,
                    tick=self._next(),
                    reads=tuple(reads),
                    writes=tuple(writes),
                    numbers=tuple(
                        float(each) for each in values.values() if type(each) in (int, float)
                    ),
                )
            )
        for tensor in tensors_in(result):
            self._number(tensor, made=self._tick)
        return result

    def _regions(self, value: object) -> list[Region]:
        """Return the regions of storages that the tensors in `value` cover.

        A storage that was not seen before comes from outside.
        """
        return [
            region
            for tensor in tensors_in(value)
            if (number := self._number(tensor, made=None)) is not None
            for region in regions_of(number, tensor)
        ]

    def _is_older(self, number: int) -> bool:
        """Return True if a storage existed before the current operation."""
        made = self._storages[number].made
        return made is None or made < self._since

    def _number(self, tensor: torch.Tensor, *, made: int | None) -> int | None:
        """Return the number of the tensor's storage; None if it has no bytes."""
        storage = tensor.untyped_storage()
        identity = id(storage)  # a storage keeps its Python object while it lives
        known = self._numbers.get(identity)
        if known is not None or not storage.nbytes():
            return known
        number = len(self._storages)

        def died(_: object) -> None:
            del self._numbers[identity]
            del self._watches[number]
            self._released[number] = self._tick, threading.get_ident() != self._thread

        self._numbers[identity] = number
        self._storages.append(
            Storage(pointer=storage.data_ptr(), bytes=storage.nbytes(), made=made)
        )
        self._watches[number] = weakref.ref(storage, died)
        return number

    def _communicate(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401
        operator: str = func._schema.name.removeprefix("c10d::")
        if operator in ("barrier", "monitored_barrier_"):
            return func(*args, **named)
        group = process_group_of(args)
        ranks = tuple(distributed.get_process_group_ranks(group))
        shared = WitnessedCollective(
            kind=KIND.get(operator, operator),
            communicator=group.group_name,
            ranks=ranks,
            dtype="",
            reduction=reduction_of(args),
            peer=peer_of(operator, args, ranks),
            tick=self._next(),
        )
        opened = [
            self._hand_over(shared, source, target, is_even=is_even(operator, args))
            for source, target in pairs(operator, args)
        ]
        result = func(*args, **named)
        work = next((each for each in scripted(result) if "Work" in str(each._type())), None)
        waiting = None if work is None else distributed.Work.unbox(work)
        if waiting is None:
            self._finish(opened)
        else:
            self._open[id(waiting)] = waiting, opened
        return result

    def see_exchange(self, exchange: Exchange) -> Callable[[], None]:
        """Record a collective that consists of several calls: its input, and later its result."""
        group = exchange.group
        shared = WitnessedCollective(
            kind=exchange.kind,
            communicator=group.group_name,
            ranks=tuple(distributed.get_process_group_ranks(group)),
            dtype="",
            reduction=exchange.reduction,
            peer=None,
            tick=self._next(),
        )
        with unwatched():
            opened = self._hand_over(shared, exchange.source, exchange.target)
        return partial(self._finish, [opened])

    def see_memory(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """Record memory allocated here, although an operator may have received it before."""
        del on_host  # storages are identified by their pointers
        number = self._number(tensor, made=self._tick)
        if number is not None and self._storages[number].made is None:
            self._storages[number] = replace(self._storages[number], made=self._tick)

    def _hand_over(
        self,
        shared: WitnessedCollective,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        is_even: bool = True,
    ) -> _Open:
        kind, count = shared.kind, len(shared.ranks) if is_even else 1
        tensor = target if source is None else source
        assert tensor is not None
        brings = source if kind != "broadcast" or distributed.get_rank() == shared.peer else None
        self._brought.append(_sums(brings, count if kind in SPLITS else 1))
        self._left.append(_Sums())
        self._collectives.append(
            replace(
                shared,
                dtype=str(tensor.dtype).removeprefix("torch."),
                source=self._tensor_region(source),
                target=self._tensor_region(target),
            )
        )
        return _Open(len(self._collectives) - 1, target, count if kind in JOINS else 1)

    def _tensor_region(self, tensor: torch.Tensor | None) -> Region | None:
        """Return the region of a collective's tensor, which is contiguous."""
        number = None if tensor is None else self._number(tensor, made=None)
        if tensor is None or number is None:
            return None
        size = tensor.element_size()
        return number, int(tensor.storage_offset()) * size, tensor.numel() * size

    def _complete(self, work: distributed.Work) -> None:
        """Record the first wait for `work`."""
        _, opened = self._open.pop(id(work), (None, []))
        if opened:
            self._finish(opened)

    def _finish(self, opened: list[_Open]) -> None:
        tick = self._next()
        with unwatched():
            for one in opened:
                self._left[one.place] = _sums(one.target, one.parts)
                self._collectives[one.place] = replace(self._collectives[one.place], waited=tick)


def _sums(tensor: torch.Tensor | None, parts: int) -> _Sums:
    """Return checksums of `parts` equal parts of a tensor; none without a tensor."""
    found = _Sums()
    if tensor is None:
        return found
    for part in tensor.detach().reshape(-1).chunk(parts) if tensor.numel() else ():
        bits = part.view(BITS[part.element_size()]).to(torch.int64) + SHIFT
        wide = part.double()
        found.taken += [(bits * bits * bits).sum(), torch.stack([wide.sum(), wide.abs().sum()])]
    return found
