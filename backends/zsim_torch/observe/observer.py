"""An observer of a rank from below: live storages, and tensors handed to collectives.

It does not know the schedule. It stands under torch's dispatcher, where every operator passes, also
those of torch.distributed: a storage is noticed when an operator first returns a tensor on it, and
missed when it is gone; a collective is counted by the tensors that it was given. It sees what the
executor says as to one thing alone: that an allocation is its own.

Bytes of collectives are ring-equivalent: what a rank sends if the ring algorithm is used, whatever
the backend does inside. Collectives of one element are counted apart.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any, Final, Self

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from zsim.units import format_bytes
from zsim_torch.observe.watchers import Exchange, watching


class Maker(StrEnum):
    """The maker of a storage."""

    EXECUTOR = "executor"
    GRADIENT = "gradient"
    OTHER = "other"
    HOST = "host"


STATE: Final = "state"
"""Storages of the executor and results of `autograd.grad` together."""
ALL: Final = "all"
"""Everything but what is in pools of host memory: what a device has to hold."""


class DeviceBudgetError(RuntimeError):
    """More lives at a time than the device is said to have; the message names the operation."""


class Meter:
    """Bytes of live storages by maker, and the largest they have been."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._makers: dict[int, tuple[Maker, int]] = {}
        self._numbers: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # A storage may die in any thread, at any moment: its number is left here and booked later.
        self._dead: deque[int] = deque()
        self._next = 0

    def see(self, tensor: torch.Tensor, maker: Maker) -> None:
        """`tensor` lives. A storage that is seen for the first time was made by `maker`."""
        storage = tensor.untyped_storage()
        identity = id(storage)  # a storage keeps its Python object for as long as it lives
        if not storage.nbytes() or identity in self._numbers:
            return
        self._settle()
        number = self._next
        self._next += 1

        def died(_: object) -> None:
            del self._numbers[identity]
            self._dead.append(number)

        self._numbers[identity] = number
        self._makers[number] = (maker, storage.nbytes())
        self._watches[number] = weakref.ref(storage, died)
        self._add(maker, storage.nbytes())

    def total(self, name: str) -> int:
        """Bytes that live now, under the name of a maker, STATE or ALL."""
        self._settle()
        return self.live[name]

    def claim(self, tensor: torch.Tensor, maker: Maker) -> None:
        """Attribute the storage of `tensor` to `maker`, unless it is attributed already."""
        self.see(tensor, maker)
        number = self._numbers.get(id(tensor.untyped_storage()))
        if number is None or self._makers[number][0] is not Maker.OTHER:
            return
        self._settle()
        size = self._makers[number][1]
        self._makers[number] = (maker, size)
        for name in (Maker.OTHER, ALL):
            self.live[name] -= size
        self._add(maker, size)

    def _add(self, maker: Maker, size: int) -> None:
        for name in self._names(maker):
            self.live[name] += size
            self.peak[name] = max(self.peak[name], self.live[name])

    def _settle(self) -> None:
        while self._dead:
            number = self._dead.popleft()
            del self._watches[number]
            maker, size = self._makers.pop(number)
            for name in self._names(maker):
                self.live[name] -= size

    @staticmethod
    def _names(maker: Maker) -> tuple[str, ...]:
        if maker is Maker.HOST:
            return (maker,)
        return (maker, ALL) if maker is Maker.OTHER else (maker, STATE, ALL)


class Traffic:
    """Collectives by group, kind and whether they carry one element: how many, how many bytes."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str, bool]] = Counter()
        self.count: Counter[tuple[str, str, bool]] = Counter()

    def see(self, operator: str, arguments: tuple[Any, ...]) -> None:
        """Count a call of the operator `operator` of torch.distributed's own operators."""
        group = process_group_of(arguments)
        for kind, whole, sends in _handed(operator, arguments, group.size()):
            self._count(group.group_desc, kind, whole, sends)

    def see_exchange(self, exchange: Exchange) -> None:
        """Count a collective that is made of several calls."""
        whole, part = exchange.source, exchange.target
        if exchange.kind == "all_gather":
            whole, part = part, whole
        sends = (exchange.group.size() - 1) * part.numel()
        self._count(exchange.group.group_desc, exchange.kind, whole, sends)

    def _count(self, group: str, kind: str, whole: torch.Tensor, sends: int) -> None:
        key = (group, kind, whole.numel() == 1)
        self.count[key] += 1
        self.bytes[key] += sends * whole.element_size()

    def clear(self) -> None:
        """Nothing was seen."""
        self.bytes.clear()
        self.count.clear()


def process_group_of(arguments: tuple[Any, ...]) -> distributed.ProcessGroup:
    """Return the process group among the arguments of an operator of torch.distributed."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            found: distributed.ProcessGroup = distributed.ProcessGroup.unbox(argument)
            return found
    raise LookupError("a collective without a process group")


def _handed(
    operator: str, arguments: tuple[Any, ...], ranks: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Kind, the whole tensor, and elements that a ring sends for it; nothing for a barrier."""
    if operator in ("barrier", "monitored_barrier_"):
        return
    first, second = arguments[0], arguments[1]
    others = ranks - 1
    match operator:
        case "_allgather_base_" | "allgather_into_tensor_coalesced_":
            for whole, part in zip(tensors_in(first), tensors_in(second), strict=True):
                yield "all_gather", whole, others * part.numel()
        case "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            for part, whole in zip(tensors_in(first), tensors_in(second), strict=True):
                yield "reduce_scatter", whole, others * part.numel()
        case "allreduce_" | "allreduce_coalesced_":
            for tensor in tensors_in(first):
                yield "all_reduce", tensor, 2 * others * -(-tensor.numel() // ranks)
        case "broadcast_":
            for tensor in tensors_in(first):
                yield "broadcast", tensor, others * -(-tensor.numel() // ranks)
        case "recv_":
            for tensor in tensors_in(first):
                yield "receive", tensor, 0
        case _:
            for tensor in tensors_in(first):
                yield operator.rstrip("_"), tensor, tensor.numel()


def tensors_in(value: object) -> Sequence[torch.Tensor]:
    """Return every tensor with memory in `value`, lists and tuples gone through."""
    if isinstance(value, torch.Tensor):
        return () if value.is_meta else (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return ()


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches everything that runs inside it on this thread, and the backward passes it starts."""

    def __init__(self, budget: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget = budget
        self.where: Callable[[], str] = str
        self.meter = Meter()
        self.traffic = Traffic()
        self._maker = Maker.OTHER
        self._grad = torch.autograd.grad
        self._life = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep torch's compiler away from these frames it would be imported (2.5 s)."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run `func`, then note what it returned, or what it was given to send."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.traffic.see(func._schema.name.removeprefix("c10d::"), args)
        for tensor in tensors_in(result):
            self.meter.see(tensor, self._maker)
        if self.budget is not None and self.meter.live[ALL] > self.budget:
            self._need_room(self.budget)
        return result

    def _need_room(self, budget: int) -> None:
        live = self.meter.total(ALL)  # of what has died meanwhile some was counted
        if live > budget:
            raise DeviceBudgetError(
                f"{self.where()}: {format_bytes(live)} live on the device, the budget is "
                f"{format_bytes(budget)}"
            )

    def see_exchange(self, exchange: Exchange) -> Callable[[], None]:
        """Count a collective that is made of several calls, which are not seen themselves."""
        self.traffic.see_exchange(exchange)
        return lambda: None

    def see_memory(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """Note memory that was taken: of the host it is not of the device, whoever looks at it."""
        self.meter.see(tensor, Maker.HOST if on_host else self._maker)

    @contextmanager
    def executor(self) -> Generator[None]:
        """Storages made inside are the executor's own."""
        self._maker = Maker.EXECUTOR
        try:
            yield
        finally:
            self._maker = Maker.OTHER

    def __enter__(self) -> Self:
        """From now on results of `torch.autograd.grad` are claimed, and operators watched."""
        torch.autograd.grad = self._watched_grad
        self._life.enter_context(watching(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401  (passed on as it is)
        """Watch no longer."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._life.close()
        torch.autograd.grad = self._grad

    def _watched_grad(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = self._grad(*args, **kwargs)
        for tensor in tensors_in(found):
            self.meter.claim(tensor, Maker.GRADIENT)
        return found

    def figures(self) -> tuple[tuple[str, float], ...]:
        """Return what was seen, by name: peaks in bytes, bytes and counts of collectives."""
        found: list[tuple[str, float]] = [
            (f"live_bytes_peak/{name}", self.meter.peak[name]) for name in (*Maker, STATE, ALL)
        ]
        for key in sorted(self.traffic.count):
            group, kind, scalar = key
            what = "scalar_wire" if scalar else "wire"
            found.append((f"{what}_bytes/{group}/{kind}", self.traffic.bytes[key]))
            found.append((f"{what}_count/{group}/{kind}", self.traffic.count[key]))
        return tuple(found)
