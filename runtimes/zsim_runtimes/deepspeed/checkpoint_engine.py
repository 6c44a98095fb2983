"""DeepSpeed's checkpoints in pinned host memory, copied in both directions on a separate stream.

`_ActivationOffloadEngine` of `runtime/activation_checkpointing/offload_activations.py`, at 858e91ee
of August 2026, after DeepSpeed 0.19.5. The input of a block is copied out once the next
checkpointed block has run, so the last one stays on the device. The device memory of the one before
it is kept as well; older ones are freed when their copy is done. In backward, these two are on the
device; others are copied back as the host reaches their blocks. Their copies wait for no kernel:
they run as far ahead as the host does. The engine's pool of pinned buffers is as large as all
checkpoints that are on the host at once.
"""

from zsim.model.model import Model
from zsim.schedule.operation import Edge, FreeMode, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import Checkpoints, brought_back
from zsim.zero.step_skeleton import Step
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.host_checkpoints import CopiedCheckpoints, HostStore

CHECKPOINTS = "checkpoints"
"""The stream of copies in both directions: `s1`."""
KEPT_LAST = 1
"""Number of newest checkpoints that are not copied out: `keep_last_count`."""
STASHED = 2
"""Number of newest checkpoints that keep their device memory: `max_fwd_stash_count`."""


class CheckpointEngine(Checkpoints):
    """Checkpoints of a micro-batch: kept, copied but still on the device, or on the host."""

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        store = HostStore(writer, model, strategy, home=CHECKPOINTS)
        super().__init__(writer, model, strategy, store)
        self._count = 0
        self._kept: dict[str, int] = {}
        self._stashed: dict[str, int] = {}
        self._out: dict[str, str] = {}
        self._back: dict[str, str] = {}

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Keep the block's input on the device, and copy out the one kept before."""
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
        """Start copying the block's input back, unless it is still on the device."""
        del after  # the stream of copies waits for nothing
        for value in visit.parts if visit.backward else ():
            if value not in self._kept and value not in self._stashed:
                self._copy_back(value)

    def _copy_back(self, value: str) -> None:
        # _restore_tensor: memory of the copy stream, recorded for the compute stream
        writer, whole = self.writer, self.model.values[value]
        target = writer.buffer(
            brought_back(value), whole.elements, whole.dtype, Kind.SAVED, home=CHECKPOINTS
        )
        writer.allocate(target)
        path, source = f"fetch/{value}", self.store.view(value)
        self._back[value] = writer.copy(path, source, target, stream=CHECKPOINTS)
        self.store.clear(value)

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Return the copies that compute waits for: back, or out if still on the device."""
        waits: list[Edge] = []
        for value in visit.parts:
            if value in self._stashed:
                waits.append(self._out[value])
                self.store.clear(value)
            elif value in self._back:
                waits.append(self._back[value])
        return tuple(waits)

    def view(self, value: str) -> View:
        """Return the view that backward reads: the forward output, or its copy from the host."""
        there = value in self._kept or value in self._stashed
        return self.writer.all(value if there else brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Free the checkpoint `value`, last read by the operation `last`."""
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
    """Return True if copies of checkpoints run on a separate stream."""
    # _get_cpu_offload_engine: None with PARTITION_ACTIVATIONS, whose copies block the host
    options = strategy.options(DeepSpeed)
    return options.checkpoint_stream and not strategy.activations.partition


def move_checkpoints(step: Step) -> None:
    """Keep the checkpoints of a step in host memory, if its strategy sets that."""
    writer, model, strategy = step.writer, step.model, step.strategy
    if has_engine(strategy):
        step.passes.checkpoints = CheckpointEngine(writer, model, strategy)
    elif strategy.options(DeepSpeed).cpu_checkpointing:
        step.passes.checkpoints = CopiedCheckpoints(
            writer, model, strategy, visits=step.visits, waits=True
        )


def checkpoint_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the separate streams of checkpoint copies."""
    return (CHECKPOINTS,) if has_engine(strategy) else ()
