"""The memory of one rank: buffers allocated by the executor or produced by autograd."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter

import torch

from zsim.schedule.counts import RowIndex
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import View
from zsim.schedule.schedule import Buffer, Program, Schedule
from zsim_torch.execute.cut_parts import CutParts, Kept, cut
from zsim_torch.execute.host_memory import FileRange, HostBlock, HostPools
from zsim_torch.execute.host_workers import Awaitable
from zsim_torch.execute.memory_part import FileWindow, ProducedPart, Remains, invalidate, settle
from zsim_torch.execute.range_file import aligned
from zsim_torch.execute.reserve import Reserve
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.observe.watchers import see_taken


class MemoryFaultError(RuntimeError):
    """The schedule uses memory that does not exist; the message names the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Settings of memory: its device, its observer, and whether unused memory is poisoned.

    Allocations inside `making()` count as the executor's own, unless `is_observed` is False;
    `on_home` makes a stream current for an allocation. `pools` are those in host memory and on
    NVMe.
    """

    device: torch.device
    making: Callable[[], AbstractContextManager[None]]
    on_home: Callable[[str], AbstractContextManager[None]]
    pools: HostPools
    poison: bool = False
    is_observed: bool = True


class LiveMemory:
    """Buffers by name. A buffer without memory cannot be read or written."""

    def __init__(
        self, schedule: Schedule, program: Program, coordinates: Coordinates, setting: MemorySetting
    ) -> None:
        self.schedule = schedule
        self.program = program
        self.coordinates = coordinates
        self.setting = setting
        self._reserve = Reserve()
        is_alone = not setting.is_observed and not setting.poison
        self._is_plain = is_alone and setting.device.type == "cpu"
        self._held: dict[str, HostBlock | FileRange] = {}
        self._flat: dict[str, torch.Tensor] = {}
        self._parts: dict[str, list[ProducedPart]] = {}
        self._batches: dict[str, object] = {}
        self._promised: set[str] = set()
        self._buffers = program.by_name
        self._cuts = CutParts(frozenset(program.persistent))
        self.routed = frozenset(each.name for each in program.buffers if each.rows is not None)
        self._sizes: dict[str, int] = {}

    def promise(self, name: str) -> None:
        """Promise memory to a buffer that is produced, and bound later.

        Raises:
            MemoryFaultError: the buffer is already allocated.
        """
        if name in self._promised:
            raise MemoryFaultError(f"buffer {name}: allocated while it is alive")
        self._promised.add(name)

    def resize(self, name: str, elements: int) -> None:
        """Set the elements of a buffer with counted rows."""
        self._sizes[name] = elements

    def holds_rows(self, view: View, elements: int) -> bool:
        """Return True if `elements` are whole rows for a buffer with counted rows; set its size.

        Rows that a rank sends may be fewer than declared.
        """
        buffer = self._buffers[view.buffer]
        assert buffer.rows is not None
        fits = not elements % buffer.rows.width and elements <= self._sizes[view.buffer]
        if fits and buffer.rows.own is RowIndex.EXPERT:
            fits = elements == self._sizes[view.buffer]
        self._sizes[view.buffer] = elements
        return fits

    def allocate(self, name: str) -> None:
        """Allocate memory for `name`, a buffer that is not produced.

        Raises:
            MemoryFaultError: the buffer is already allocated.
        """
        if name in self._flat or name in self._held:
            raise MemoryFaultError(f"buffer {name}: allocated while it is alive")
        buffer = self._buffers[name]
        if self.setting.pools.has(buffer.pool):
            held = self._held[name] = self.setting.pools.take(buffer.pool, buffer.size_bytes)
            if isinstance(held, HostBlock):
                made = self._flat[name] = held.tensor(buffer.elements, TORCH_DTYPE[buffer.dtype])
                see_taken(made, on_host=True)
        else:
            self._flat[name] = self._take(buffer)

    def _take(self, buffer: Buffer) -> torch.Tensor:
        device, dtype = self.setting.device, TORCH_DTYPE[buffer.dtype]
        elements = self._sizes.get(buffer.name, buffer.elements)
        if self._is_plain:
            made = self._reserve.take(elements, dtype)
            see_taken(made)
            return made
        with self.setting.making(), self.setting.on_home(buffer.home):
            if device.type == "cpu":
                made = self._reserve.take(elements, dtype)
                see_taken(made)
            else:
                made = torch.empty(elements, dtype=dtype, device=device)
            if self.setting.poison:
                invalidate(made)
        return made

    def bind(self, name: str, parts: list[ProducedPart]) -> None:
        """Add `parts` to the promised buffer `name`.

        A buffer with memory of its own, such as one that other ranks read, is written instead.
        """
        if name in self._flat:
            for each in parts:
                made = each.tensor.reshape(-1)
                self._flat[name].narrow(0, each.start, made.numel()).copy_(made)
            return
        if name not in self._promised:
            self._need_promise(name)
        known = self._parts.get(name)
        if known is None:
            self._parts[name] = parts
        else:
            known += parts

    def bind_batch(self, name: str, batch: object) -> None:
        """Bind a micro-batch, which is any object, to the promised buffer `name`."""
        self._need_promise(name)
        self._batches[name] = batch

    def batch(self, name: str) -> object:
        """Return the micro-batch bound to `name`.

        Raises:
            MemoryFaultError: no micro-batch was loaded.
        """
        if name not in self._batches:
            raise MemoryFaultError(f"buffer {name}: read before a micro-batch was loaded")
        return self._batches[name]

    def zeros(self, name: str, size: int) -> torch.Tensor:
        """Return zeros in the data type of `name`, for a gradient that autograd did not compute."""
        dtype = TORCH_DTYPE[self.program.by_name[name].dtype]
        with self.setting.making():
            return torch.zeros(size, dtype=dtype, device=self.setting.device)

    def take_away(self, name: str) -> Remains:
        """Remove the memory of `name` and return it; it lives until `drop`.

        Raises:
            MemoryFaultError: the buffer has no memory.
        """
        if name in self._promised:
            self._promised.remove(name)
            self._batches.pop(name, None)
            parts = self._parts.pop(name, [])
            return Remains(None, parts)
        if name not in self._flat and name not in self._held:
            raise MemoryFaultError(f"buffer {name}: freed without memory")
        self._cuts.forget(name)
        flat = self._flat.pop(name, None)
        return Remains(flat, [], self._held.pop(name, None))

    def drop(
        self, name: str, remains: Remains, held: HostBlock | FileRange | None, *, travelled: bool
    ) -> None:
        """Drop memory; `travelled` is True if a collective has held its storage.

        `held` is the value of `remains.held` at the free: a thread may call this after the memory
        was given back. Memory made by autograd is never poisoned, since two gradients may share a
        storage.
        """
        remains.parts.clear()
        if held is not None:
            remains.flat = None
            if self.setting.poison:
                with self.setting.on_home(self.program.by_name[name].home):
                    if self.setting.device.type != "cpu":
                        torch.cuda.current_stream(self.setting.device).synchronize()
                    held.invalidate()
            return
        if remains.flat is None:
            return
        if self.setting.poison:
            with self.setting.on_home(self.program.by_name[name].home):
                invalidate(remains.flat)
        if not travelled or not remains.flat.is_cpu:
            remains.flat = None
            return
        storage = weakref.ref(remains.flat.untyped_storage())
        remains.flat = None
        settle(storage)

    def give_back(self, name: str, remains: Remains, busy: Iterable[Awaitable] = ()) -> None:
        """Let dropped host memory or a file range be reused once `busy` has finished."""
        if remains.held is not None:
            self.setting.pools.give_back(self.program.by_name[name].pool, remains.held, busy)
            remains.held = None

    @property
    def lends(self) -> bool:
        """Return True if some buffer is in host memory or in a file."""
        return bool(self._held)

    def busy(self, name: str) -> list[Awaitable]:
        """Return the operations that still use the memory of `name` for its previous buffer."""
        held = self._held.get(name)
        if held is None:
            return []
        held.busy = [each for each in held.busy if not each.is_over()]
        return held.busy

    def is_allocated(self, name: str) -> bool:
        """Return True if a buffer has memory of the executor, not of autograd."""
        return name in self._flat

    def window(self, view: View) -> FileWindow:
        """Return the byte range of `view` in a file.

        Raises:
            MemoryFaultError: its buffer is not in a file.
        """
        held = self._held.get(view.buffer)
        if not isinstance(held, FileRange):
            raise MemoryFaultError(f"buffer {view.buffer}: has no range of a file")
        buffer = self.program.by_name[view.buffer]
        start, size = self.extent(view)
        width = buffer.dtype.size_bytes
        room = aligned(held.size) - held.size if start + size == buffer.elements else 0
        return FileWindow(held.file, held.offset + start * width, size * width, room)

    def room(self, view: View) -> int:
        """Return the number of unused bytes behind `view`."""
        held = self._held.get(view.buffer)
        ends = sum(self.extent(view)) == self.program.by_name[view.buffer].elements
        return held.room if ends and isinstance(held, HostBlock) else 0

    def is_in_file(self, name: str) -> bool:
        """Return True if a buffer is a range of a file."""
        return isinstance(self._held.get(name), FileRange)

    def put_back(self, name: str, values: torch.Tensor) -> None:
        """Write the whole of a buffer to its file."""
        window = self.window(View(buffer=name, size=values.numel()))
        window.file.write(window.offset, values)

    def left(self, name: str) -> torch.Tensor:
        """Return the values of a buffer after a run, flat; read them if they are in a file."""
        if not self.is_in_file(name):
            return self.part(name)
        buffer = self.program.by_name[name]
        found = torch.empty(buffer.elements, dtype=TORCH_DTYPE[buffer.dtype])
        window = self.window(View(buffer=name, size=buffer.elements))
        window.file.read(window.offset, found)
        return found

    def part(self, name: str) -> torch.Tensor:
        """Return the only part of a produced buffer in its shape, or an allocated buffer flat.

        Raises:
            MemoryFaultError: it has no memory, was not produced yet, or has several parts.
        """
        if name in self._flat:
            return self._flat[name]
        parts = self._bound(name)
        if len(parts) != 1:
            raise MemoryFaultError(f"buffer {name}: {len(parts)} parts where one is read")
        return parts[0].tensor

    def parts(self, name: str) -> list[ProducedPart]:
        """Return the parts of a produced buffer, in the order in which they were bound."""
        return self._parts.get(name, [])

    def operand(self, view: View) -> torch.Tensor:
        """Return `part` of a produced buffer, or `flat` of an allocated one."""
        parts = self._parts.get(view.buffer)
        if parts is not None and len(parts) == 1:
            return parts[0].tensor
        return self.flat(view) if view.buffer in self._flat else self.part(view.buffer)

    def flat(self, view: View) -> torch.Tensor:
        """Return the elements of `view`, one-dimensional, as a view if the buffer is allocated.

        Raises:
            MemoryFaultError: the buffer has no memory, or was not produced yet.
        """
        start, size = self.extent(view)
        flat = self._flat.get(view.buffer)
        if flat is not None:
            return flat if size == flat.numel() else flat[start : start + size]
        if view.buffer in self._promised and view.buffer not in self._parts:  # no unit writes it
            taken = self._take(self.program.by_name[view.buffer])
            self.bind(view.buffer, [ProducedPart(0, taken)])
        if not size:
            return torch.empty(0, dtype=self._bound(view.buffer)[0].tensor.dtype)
        # a unit's last segment runs its backward first, but its gradients come last in the buffer
        found = [tensor for _, tensor in sorted(self.pieces(view), key=itemgetter(0))]
        return found[0].reshape(-1) if len(found) == 1 else torch.cat([t.flatten() for t in found])

    def shaped(self, view: View, shape: torch.Size, start: int = 0) -> torch.Tensor:
        """Return the elements of `view` from `start` in `shape`; cached for persistent buffers."""
        whole = self._flat.get(view.buffer)
        if whole is None:
            return self.flat(view)[start : start + shape.numel()].view(shape)
        found = self._cuts.find(view, start, shape)
        if found is None:
            first, size = self.extent(view)
            if start + shape.numel() > size:
                raise MemoryFaultError(
                    f"buffer {view.buffer}: {shape} is more than {size} elements"
                )
            found = cut(whole, first + start, shape)
            self._cuts.keep(view, start, found)
        return found

    def keep(self, buffers: Iterable[str], kept: Kept) -> None:
        """Clear `kept`, which holds views of these buffers, before one of them is freed."""
        for name in buffers:
            self._cuts.tie(name, kept)

    def pieces(self, view: View) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensors that make up `view`, each with its start in the view.

        A part that lies entirely in the view keeps its own shape.
        """
        start, size = self.extent(view)
        if view.buffer in self._flat:
            yield 0, self._flat[view.buffer][start : start + size]
            return
        found = 0
        for part in self._bound(view.buffer):
            low, high = max(start, part.start), min(start + size, part.end)
            if low >= high:
                continue
            found += high - low
            if (low, high) == (part.start, part.end):
                yield low - start, part.tensor
            else:
                yield low - start, part.tensor.reshape(-1)[low - part.start : high - part.start]
        if found < size:
            raise MemoryFaultError(
                f"buffer {view.buffer}: {size - found} elements were not produced"
            )

    def own(self, view: View) -> torch.Tensor:
        """Return `flat` for writing; copy it first if other buffers share its storage."""
        parts = self._parts.get(view.buffer)
        if parts is not None and not self._is_alone(parts):
            buffer = self.program.by_name[view.buffer]
            whole = self._take(buffer)
            for part in parts:
                whole[part.start : part.end] = part.tensor.reshape(-1)
            del self._parts[view.buffer]
            self.bind(view.buffer, [ProducedPart(0, whole)])
        return self.flat(view)

    def _is_alone(self, parts: list[ProducedPart]) -> bool:
        """Return True if `parts` is one contiguous part that shares its storage with no other."""
        return (
            len(parts) == 1
            and parts[0].tensor.is_contiguous()
            and Counter(self._storages())[_address(parts[0].tensor)] == 1
        )

    def _storages(self) -> Iterator[int]:
        """Yield the addresses of the storages of all buffers and parts.

        They are computed on demand, since they are seldom needed.
        """
        for flat in self._flat.values():
            yield _address(flat)
        for parts in self._parts.values():
            for part in parts:
                yield _address(part.tensor)

    def extent(self, view: View) -> tuple[int, int]:
        """Return start and size of `view` in its buffer, on this rank.

        A view of a buffer with counted rows has all of them.
        """
        if view.buffer in self._sizes:
            return 0, self._sizes[view.buffer]
        return self.schedule.extent(view, self.coordinates)

    def holds(self, pointer: int) -> bool:
        """Return True if a buffer's storage starts at the address `pointer`."""
        return pointer in self._storages()

    def _bound(self, name: str) -> list[ProducedPart]:
        if name not in self._parts:
            state = "used without memory"
            if name in self._promised:
                state = "read before it was produced"
            elif name in self._held:
                state = "is in a file"
            raise MemoryFaultError(f"buffer {name}: {state}")
        return self._parts[name]

    def _need_promise(self, name: str) -> None:
        if name not in self._promised:
            raise MemoryFaultError(f"buffer {name}: produced without an allocation")


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
