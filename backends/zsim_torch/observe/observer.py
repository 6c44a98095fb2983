"""An observer of a rank below the executor: live storages, and tensors of collectives.

It does not use the schedule. As a torch dispatch mode it sees every operator, including those of
torch.distributed. A storage is registered when an operator first returns a tensor on it, and
removed when it is freed. A collective is counted by its tensors. The executor passes only one piece
of information: whether an allocation is its own.

Bytes of collectives are ring-equivalent: the bytes that a rank sends with the ring algorithm,
whatever the backend does. Collectives of one element are counted separately.
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
    """Origin of a storage."""

    EXECUTOR = "executor"
    GRADIENT = "gradient"
    OTHER = "other"
    HOST = "host"


STATE: Final = "state"
"""Storages of the executor and results of `autograd.grad` together."""
ALL: Final = "all"
"""All storages except those in host memory pools: the memory needed on the device."""


class DeviceBudgetError(RuntimeError):
    """More bytes are live than the budget allows; the message names the operation."""


class Meter:
    """Live bytes of storages by maker, and their peaks."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._makers: dict[int, tuple[Maker, int]] = {}
        self._numbers: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # A storage may be freed in any thread at any time; its number is queued here until
        # `_settle`.
        self._dead: deque[int] = deque()
        self._next = 0

    def see(self, tensor: torch.Tensor, maker: Maker) -> None:
        """Register the storage of `tensor` under `maker`, if it is new."""
        storage = tensor.untyped_storage()
        identity = id(storage)  # a storage keeps its Python object while it lives
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
        """Return the live bytes of a maker, or of STATE or ALL."""
        self._settle()
        return self.live[name]

    def claim(self, tensor: torch.Tensor, maker: Maker) -> None:
        """Assign the storage of `tensor` to `maker`, unless it already has a maker."""
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
    """Counts and bytes of collectives by group, kind, and True for those of one element."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str, bool]] = Counter()
        self.count: Counter[tuple[str, str, bool]] = Counter()

    def see(self, operator: str, arguments: tuple[Any, ...]) -> None:
        """Count a call of an operator of torch.distributed."""
        group = process_group_of(arguments)
        for kind, whole, sends in _handed(operator, arguments, group.size()):
            self._count(group.group_desc, kind, whole, sends)

    def see_exchange(self, exchange: Exchange) -> None:
        """Count a collective that consists of several calls."""
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
        """Reset all counts."""
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
    """Yield kind, full tensor and elements that a ring sends; nothing for a barrier."""
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
        case "alltoall_base_":
            for whole in tensors_in(second):
                kept = whole.numel() // ranks
                if sent := arguments[4]:  # unequal blocks
                    kept = sent[process_group_of(arguments).rank()]
                yield "all_to_all", whole, whole.numel() - kept
        case "recv_":
            for tensor in tensors_in(first):
                yield "receive", tensor, 0
        case _:
            for tensor in tensors_in(first):
                yield operator.rstrip("_"), tensor, tensor.numel()


def tensors_in(value: object) -> Sequence[torch.Tensor]:
    """Return every tensor with memory in `value`, including nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return () if value.is_meta else (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return ()


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes operators that run inside it on this thread, and the backwards that it starts."""

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
        """Return False, because excluding these frames would import torch's compiler (2.5 s)."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run `func`, then register the storages that it returned, or count the collective."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.traffic.see(func._schema.name.removeprefix("c10d::"), args)
        for tensor in tensors_in(result):
            self.meter.see(tensor, self._maker)
        if self.budget is not None and self.meter.live[ALL] > self.budget:
            self._need_room(self.budget)
        return result

    def _need_room(self, budget: int) -> None:
        live = self.meter.total(ALL)  # without freed storages
        if live > budget:
            raise DeviceBudgetError(
                f"{self.where()}: {format_bytes(live)} live on the device, the budget is "
                f"{format_bytes(budget)}"
            )

    def see_exchange(self, exchange: Exchange) -> Callable[[], None]:
        """Count a collective that consists of several calls, which are not counted themselves."""
        self.traffic.see_exchange(exchange)
        return lambda: None

    def see_memory(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """Register allocated memory; host memory does not count for the device."""
        self.meter.see(tensor, Maker.HOST if on_host else self._maker)

    @contextmanager
    def executor(self) -> Generator[None]:
        """Return a context in which new storages belong to the executor."""
        self._maker = Maker.EXECUTOR
        try:
            yield
        finally:
            self._maker = Maker.OTHER

    def __enter__(self) -> Self:
        """Start observing operators and results of `torch.autograd.grad`."""
        torch.autograd.grad = self._watched_grad
        self._life.enter_context(watching(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401  (passed on as it is)
        """Stop observing."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._life.close()
        torch.autograd.grad = self._grad

    def _watched_grad(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = self._grad(*args, **kwargs)
        for tensor in tensors_in(found):
            self.meter.claim(tensor, Maker.GRADIENT)
        return found

    def figures(self) -> tuple[tuple[str, float], ...]:
        """Return the results by name: peaks in bytes, bytes and counts of collectives."""
        found: list[tuple[str, float]] = [
            (f"live_bytes_peak/{name}", self.meter.peak[name]) for name in (*Maker, STATE, ALL)
        ]
        for key in sorted(self.traffic.count):
            group, kind, scalar = key
            what = "scalar_wire" if scalar else "wire"
            found.append((f"{what}_bytes/{group}/{kind}", self.traffic.bytes[key]))
            found.append((f"{what}_count/{group}/{kind}", self.traffic.count[key]))
        return tuple(found)
