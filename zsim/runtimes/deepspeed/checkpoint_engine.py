"""DeepSpeed's checkpoints in pinned memory of the host, copied both ways on a stream of their own.

`_ActivationOffloadEngine` of `runtime/activation_checkpointing/offload_activations.py`, at 858e91ee
of August 2026, after DeepSpeed 0.19.5: what a block was given goes out once the next block that is
checkpointed has run, so the last one stays on the device. The device's memory of the one before it
stays as well, and what is older goes back when its copy is done. In backward these two are there;
others come back as the host reaches their blocks. Their copies wait for no kernel: they run as far
ahead as the host does. The engine's pool of pinned buffers is as large as what is out at once.
"""

from zsim.model.model import Model
from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.runtimes.host_checkpoints import CopiedCheckpoints, HostStore
from zsim.schedule.operation import Edge, FreeMode, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import Checkpoints, brought_back
from zsim.zero.step_skeleton import Step
from zsim.zero.visit_order import UnitVisit

CHECKPOINTS = "checkpoints"
"""The stream of copies both ways: `s1`."""
KEPT_LAST = 1
"""Checkpoints that are not copied out before there is a later one: `keep_last_count`."""
STASHED = 2
"""Of so many newest ones the device's memory stays, copied or not: `max_fwd_stash_count`."""


class CheckpointEngine(Checkpoints):
    """Checkpoints of a micro-batch: kept, out but still there, or out."""

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        store = HostStore(writer, model, strategy, home=CHECKPOINTS)
        super().__init__(writer, model, strategy, store)
        self._count = 0
        self._kept: dict[str, int] = {}
        self._stashed: dict[str, int] = {}
        self._out: dict[str, str] = {}
        self._back: dict[str, str] = {}

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Keep what a block was given, and begin with the copy of what was kept before."""
        # get_offloaded_activations_for_backward, offload_input
        for value in visit.parts:
            self._count += 1
            self._kept[value] = self._count
            while len(self._kept) > KEPT_LAST:
                self._copy_out(next(iter(self._kept)), last)

    def _copy_out(self, value: str, last: str) -> None:
        # _start_offload, after _reap_forward_stash
        for stashed, number in tuple(self._stashed.items()):
            if number <= self._count - STASHED:
                del self._stashed[stashed]
                self.writer.free(stashed, uses=(self._out[stashed],), mode=FreeMode.DEFERRED)
        self._stashed[value] = self._kept.pop(value)
        source, target = self.writer.all(value), self.store.make_room(value)
        path = f"offload/{value}"
        self._out[value] = self.writer.copy(path, source, target, stream=CHECKPOINTS, after=(last,))

    def enter(self, visit: UnitVisit, after: tuple[Edge, ...] = ()) -> None:
        """Begin with the copy back of what a block was given, unless that is still there."""
        del after  # the stream of copies waits for nothing
        for value in visit.parts if visit.backward else ():
            if value not in self._kept and value not in self._stashed:
                self._copy_back(value)

    def _copy_back(self, value: str) -> None:
        # _restore_tensor: memory of the stream of copies, which is recorded for compute
        writer, whole = self.writer, self.model.values[value]
        target = writer.buffer(
            brought_back(value), whole.elements, whole.dtype, Kind.SAVED, home=CHECKPOINTS
        )
        writer.allocate(target)
        path, source = f"fetch/{value}", self.store.view(value)
        self._back[value] = writer.copy(path, source, target, stream=CHECKPOINTS)
        self.store.clear(value)

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Return the copies that compute waits for: back, or out of what is still there."""
        waits: list[Edge] = []
        for value in visit.parts:
            if value in self._stashed:
                waits.append(self._out[value])
                self.store.clear(value)
            elif value in self._back:
                waits.append(self._back[value])
        return tuple(waits)

    def view(self, value: str) -> View:
        """Return what backward reads: what forward made, or what came back."""
        there = value in self._kept or value in self._stashed
        return self.writer.all(value if there else brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Forget it: `last` was the last to read it."""
        if value in self._kept:
            del self._kept[value]
            self.writer.free(value)
        elif value in self._stashed:
            del self._stashed[value]
            copied = self._out[value]
            self.writer.free(value, uses=(copied,), mode=FreeMode.DEFERRED)
        else:
            del self._back[value]
            self.writer.free(brought_back(value), uses=(last,), mode=FreeMode.DEFERRED)


def has_engine(strategy: Strategy) -> bool:
    """Tell whether copies of checkpoints are on a stream of their own."""
    # _get_cpu_offload_engine: none with PARTITION_ACTIVATIONS, whose copies stop the host
    options = strategy.options(DeepSpeed)
    return options.checkpoint_stream and not strategy.activations.partition


def move_checkpoints(step: Step) -> None:
    """Let a step keep checkpoints in the host's memory, if its strategy says so."""
    writer, model, strategy = step.writer, step.model, step.strategy
    if has_engine(strategy):
        step.passes.checkpoints = CheckpointEngine(writer, model, strategy)
    elif strategy.options(DeepSpeed).cpu_checkpointing:
        step.passes.checkpoints = CopiedCheckpoints(
            writer, model, strategy, visits=step.visits, waits=True
        )


def checkpoint_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the streams that copies of checkpoints have of their own."""
    return (CHECKPOINTS,) if has_engine(strategy) else ()
