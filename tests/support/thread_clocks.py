"""Threads of the host beside the pretended device: each has a timeline, and its uses are judged.

A thread learns what the host knew when it was handed an operation, and what it has waited for
itself, be that another thread or an event of the device; whoever waits for it, or asks whether it
is over, learns what it knew then. Threads do run, but one at a time: what could be at one time is
told by the clocks. Pages of a pool are one block, whichever buffers have them one after another.
"""

# pyright: reportPrivateUsage=false
# The recorder has no public names for what it knows of memory.

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from zsim.schedule.access import accesses
from zsim.schedule.operation import Compute, Copy, Edge, Fill
from zsim_record.clocks.block_contract import TrackedBlock
from zsim_record.clocks.finding import BlockKind
from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline, Tick
from zsim_record.record.tape import Tape, _LiveStorage
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.host_memory import HostBlock
from zsim_torch.execute.host_workers import Awaitable, HostJob, HostWorkers
from zsim_torch.execute.live_memory import LiveMemory

_Operation = Compute | Fill | Copy


@dataclass
class ThreadClocks:
    """Timelines of threads, ends of what they did, and pages that they use."""

    tape: Tape
    uses: int = 0
    """Uses of memory by threads that were judged."""
    _lines: dict[str, ClockTimeline] = field(default_factory=dict[str, ClockTimeline])
    _ends: dict[HostJob, ClockMark] = field(default_factory=dict[HostJob, ClockMark])
    _pages: dict[int, tuple[object, TrackedBlock]] = field(
        default_factory=dict[int, tuple[object, TrackedBlock]]
    )

    @contextmanager
    def kept(self) -> Generator[None]:
        """Follow threads and their memory inside."""
        with ExitStack() as stack:
            for owner, name, change in (
                (HostWorkers, "hand_over", self._handing_over),
                (HostJob, "wait", self._waiting),
                (HostJob, "is_over", self._asking),
                (LiveMemory, "allocate", self._allocating),
                (Executor, "_for_thread", self._binding),
            ):
                right = vars(owner)[name]
                stack.enter_context(patch.object(owner, name, change(right)))
            yield

    def _handing_over(self, right: Callable[..., HostJob]) -> Callable[..., HostJob]:
        def hand_over(
            workers: HostWorkers,
            operation: str,
            step: int,
            stream: str,
            action: Callable[[], None] | None,
            *,
            after: Iterable[Edge] = (),
            awaited: Iterable[Awaitable] = (),
        ) -> HostJob:
            tape, host = self.tape, self.tape.host
            if stream not in self._lines:
                self._lines[stream] = tape.clocks.host(stream)
            line = self._lines[stream]
            tape.clocks.follow(line, host)
            tape.host = line  # the host stands still meanwhile
            try:
                job = right(workers, operation, step, stream, action, after=after, awaited=awaited)
                job._finished.wait()
            finally:
                tape.host = host
            tape.clocks.advance(line)
            self._ends[job] = tape.clocks.mark(line)
            return job

        return hand_over

    def _waiting(self, right: Callable[[HostJob], None]) -> Callable[[HostJob], None]:
        def wait(job: HostJob) -> None:
            right(job)
            self.tape.clocks.wait(self.tape.host, self._ends[job], self.tape.stack())

        return wait

    def _asking(self, right: Callable[[HostJob], bool]) -> Callable[[HostJob], bool]:
        def is_over(job: HostJob) -> bool:
            """Return if who asks has learnt of it: it may be over by luck alone."""
            end = self._ends.get(job)
            if end is None or not right(job):
                return False
            return self.tape.host.is_after(Tick(end.timeline, end.clock[end.timeline]))

        return is_over

    def _allocating(
        self, right: Callable[[LiveMemory, str], None]
    ) -> Callable[[LiveMemory, str], None]:
        def allocate(memory: LiveMemory, name: str) -> None:
            right(memory, name)
            held = memory._held.get(name)
            if isinstance(held, HostBlock) and memory.is_allocated(name):
                self._track(memory.part(name), held)

        return allocate

    def _track(self, tensor: torch.Tensor, held: HostBlock) -> None:
        """Take what is done to a buffer in pages of a pool as done to these pages."""
        tape, storage = self.tape, tensor.untyped_storage()
        place = id(held.pages)
        if place not in self._pages:
            block = tape.contract.allocate("pages", BlockKind.FILE, len(held.pages))
            self._pages[place] = held.pages, block
        key = storage._cdata
        reference = weakref.ref(storage, lambda _: tape._die(key))
        tape._blocks[key] = _LiveStorage(reference, self._pages[place][1])
        tape._pinned.add(storage)

    def _binding(
        self, right: Callable[[Executor, _Operation], Callable[[], None]]
    ) -> Callable[[Executor, _Operation], Callable[[], None]]:
        def for_thread(executor: Executor, operation: _Operation) -> Callable[[], None]:
            action, memory = right(executor, operation), executor.machine.memory
            used = [
                (memory.flat(access.view), access.writes)
                for access in accesses(operation)
                if not memory.is_in_file(access.view.buffer)
            ]

            def act() -> None:
                self._use(operation.id, used)
                action()

            return act

        return for_thread

    def _use(self, operation: str, used: Sequence[tuple[torch.Tensor, bool]]) -> None:
        tape, stack = self.tape, self.tape.stack()
        tick = tape.clocks.advance(tape.host)
        for tensor, writes in used:
            self.uses += 1
            tape.note(
                tensor, tape.host, tick, writes=writes, operation=operation, stack=stack, home=None
            )
