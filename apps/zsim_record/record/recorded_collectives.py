"""Model collectives as NCCL's process group runs them: their streams, and the waits for them.

Mirrors `ProcessGroupNCCL` of torch 2.13. With `async_op=False` a collective runs on the current
stream. Otherwise it runs on a stream of the communicator, which waits for the current one. The work
object then holds its tensors until `wait()`, which makes the current stream wait for it.
"""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zsim_record.clocks.call_stack import CallStack
from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline, Tick
from zsim_record.lift.step_events import CollectiveCall
from zsim_record.record.operator_access import tensors_in
from zsim_record.record.pretended_streams import DEVICE_TYPE, DeviceStreams, RecordedEngine
from zsim_record.record.recorded_future import RecordedFuture
from zsim_record.record.tape import RecordedCollective, Tape, UnrecordableError, elements

OUTPUTS = ("output_tensor", "output_tensors", "output_lists", "outputs", "output")
INPUTS = ("input_tensor", "input_tensors", "input_list", "inputs", "input")
IN_PLACE = ("tensors",)
DETAILS = ("root_rank", "src", "dst", "tag", "input_split_sizes", "output_split_sizes")
"""Arguments that must agree among ranks, or that pair a send with a receive."""
ONE_SIDED = {"send": False, "recv_": True, "recv_any_source_": True, "barrier": False}
"""Kinds that only read or only write their tensors: True if they write."""


class RecordedWork(dist.Work):
    """The work object of a collective: `wait` orders the current stream after it.

    Until then, `unwaited` keeps it alive: torch passes it through C++, which would lose its Python
    part, and without a wait its tensors must live until the collective is done.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        mark: ClockMark,
        *,
        held: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        blocks: bool,
        home: ClockTimeline,
        unwaited: "set[RecordedWork]",
    ) -> None:
        super().__init__()
        self._streams = streams
        self._mark = mark
        self._held = list(held)
        self._results = list(results)
        self._blocks = blocks
        self._home = home
        self._unwaited = unwaited
        unwaited.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the collective; for a barrier, also block the host."""
        del timeout
        tape = self._streams.tape
        stack = tape.stack()
        tape.clocks.wait(self._streams.current.timeline, self._mark, stack)
        if self._blocks:
            tape.clocks.wait(tape.host, self._mark, stack)
        self._held.clear()
        self._results.clear()
        self._unwaited.discard(self)
        return True

    def release(self) -> tuple[ClockMark, list[torch.Tensor]]:
        """Return the mark and the held tensors, which the caller holds from now on."""
        held, self._held = self._held, []
        self._results.clear()
        self._unwaited.discard(self)
        return self._mark, held

    def synchronize(self) -> None:
        """Order the current stream after the collective."""
        self.wait()

    def get_future(self) -> Any:
        """Return a completed future, which streams still have to wait for.

        For a bucket without a hook, DDP's reducer requests it in C++ and waits in a callback at the
        end of backward (torch 2.13, `reducer.cpp`, `finalize_backward`), queued after its last
        collective. The callback here runs before it.
        """
        if _called_by_engine():
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.wait)
            future: Any = torch.futures.Future()
            future.set_result(list(self._results))
            return future
        return RecordedFuture(self._streams, [self._mark], list(self._results), self._let_go)

    def _let_go(self, timeline: ClockTimeline) -> None:
        """Release the tensors if the issuing stream has waited for the collective."""
        if timeline is self._home:
            self.release()

    def is_completed(self) -> bool:
        """Return True if the host has seen the collective finish."""
        mark = self._mark
        return self._streams.tape.host.is_after(Tick(mark.timeline, mark.clock[mark.timeline]))

    def is_success(self) -> bool:
        """Return True: nothing fails here."""
        return True

    def block_current_stream(self) -> None:
        """Order the current stream after the collective."""
        self.wait()


class CollectiveRecorder:
    """Records the collective operators of `c10d`, including functional ones."""

    def __init__(self, tape: Tape, streams: DeviceStreams) -> None:
        self._tape = tape
        self._streams = streams
        self._names: dict[str, str] = {}
        self._ordinals: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._pending: dict[int, tuple[ClockMark, list[torch.Tensor]]] = {}
        """Mark and tensors for the wait of a functional collective, by its result's storage."""
        self._unwaited: set[RecordedWork] = set()

    def handles(self, func: torch._ops.OpOverload) -> bool:
        """Return True if `func` is a collective."""
        return func.namespace in {"c10d", "_c10d_functional", "_dtensor", "symm_mem"}

    def record(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        """Record a collective and return its result."""
        schema = func._schema
        named = {
            argument.name: args[number] if number < len(args) else kwargs.get(argument.name)
            for number, argument in enumerate(schema.arguments)
        }
        if func.namespace == "symm_mem":
            raise self._tape.refuse(f"symmetric memory ({schema.name})")
        if func.namespace != "c10d":
            return self._functional(func, named, args, kwargs)
        kind = schema.name.removeprefix("c10d::")
        if kind == "check_for_nan":
            return None
        reads, writes = _touched(kind, named)
        asynchronous = named.get("async_op")
        work = self._issue(
            kind.strip("_"),
            dist.ProcessGroup.unbox(cast("torch.ScriptObject", named["process_group"])),
            reads,
            writes,
            # A send or receive has its own stream unless the host waits for it.
            asynchronous=True if asynchronous is None else bool(asynchronous),
            named=named,
        )
        if not schema.returns:
            work.wait()
            return None
        boxed = dist.Work.boxed(work)
        return boxed if len(schema.returns) == 1 else (args[0], boxed)

    def note_objects(self, kind: str, group: dist.ProcessGroup) -> None:
        """Record a collective of Python objects; its order counts, but its bytes do not."""
        self._log(kind, group, (), "object", "", self._tape.stack())

    def refuse(self, what: str) -> UnrecordableError:
        """Record that `what` is not supported; return the error for callers that must stop."""
        return self._tape.refuse(what)

    def _issue(
        self,
        kind: str,
        group: dist.ProcessGroup,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        asynchronous: bool,
        named: Mapping[str, Any],
    ) -> RecordedWork:
        tape, streams = self._tape, self._streams
        for work in [each for each in self._unwaited if each.is_completed()]:
            self._unwaited.discard(work)
        stack = tape.stack()
        name = self._name(group)
        current = streams.current.timeline
        timeline = streams.of_group(name) if asynchronous else current
        if asynchronous:
            tape.clocks.wait(timeline, tape.clocks.record(tape.host, current), stack)
        tick = tape.clocks.launch(tape.host, timeline)
        self._note(kind, reads, timeline, tick, stack, current, writes=False)
        self._note(kind, writes, timeline, tick, stack, current, writes=True)
        touched = [*reads, *(each for each in writes if not any(each is one for one in reads))]
        dtype = str(touched[0].dtype).removeprefix("torch.") if touched else ""
        self._log(kind, group, elements(touched), dtype, _detail(named), stack)
        if tape.journal is not None:
            roots = (named[each] for each in ("root_rank", "src") if named.get(each) is not None)
            call = CollectiveCall(
                kind,
                name,
                ranks=tuple(dist.get_process_group_ranks(group)),
                dtype=dtype,
                reduction=_reduction_in(named),
                root=next(roots, None),
                reads=len(reads),
                sizes=elements([*reads, *writes]),
            )
            tape.journal.collective(call)
        tape.operation_count += 1
        return RecordedWork(
            streams,
            tape.clocks.mark(timeline),
            held=touched if asynchronous else (),
            results=writes if asynchronous else (),
            blocks=kind == "barrier",
            home=current,
            unwaited=self._unwaited,
        )

    def _note(
        self,
        kind: str,
        tensors: Iterable[torch.Tensor],
        timeline: ClockTimeline,
        tick: Tick,
        stack: CallStack,
        home: ClockTimeline,
        *,
        writes: bool,
    ) -> None:
        for tensor in tensors:
            device = getattr(tensor, "fake_device", tensor.device)
            self._tape.note(
                tensor,
                timeline,
                tick,
                writes=writes,
                operation=kind,
                stack=stack,
                home=home if device.type == DEVICE_TYPE else None,
            )

    def _functional(
        self,
        func: torch._ops.OpOverload,
        named: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> object:
        kind = func._schema.name.partition("::")[2]
        if kind == "wait_tensor":
            self._wait(named["tensor"])
            return named["tensor"]
        result = func(*args, **kwargs)
        named_group = named["group_name"]
        find: Any = vars(distributed_c10d)["_resolve_process_group"]
        group = find(named_group) if isinstance(named_group, str) else named_group
        results = list(tensors_in(result))
        reads = [each for name in (*INPUTS, *IN_PLACE) for each in tensors_in(named.get(name))]
        work = self._issue(
            kind.removesuffix("_out").strip("_"),
            cast("dist.ProcessGroup", group),
            reads,
            results,
            asynchronous=True,
            named=named,
        )
        mark, held = work.release()
        for tensor in results:
            self._pending[tensor.untyped_storage()._cdata] = mark, held
        return result

    def _wait(self, tensor: torch.Tensor) -> None:
        pending = self._pending.pop(tensor.untyped_storage()._cdata, None)
        if pending is not None:
            mark, held = pending
            tape = self._tape
            tape.clocks.wait(self._streams.current.timeline, mark, tape.stack())
            held.clear()

    def _log(
        self,
        kind: str,
        group: dist.ProcessGroup,
        sizes: tuple[int, ...],
        dtype: str,
        detail: str,
        stack: CallStack,
    ) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._tape.collectives.setdefault(self._name(group), []).append(
            RecordedCollective(kind, ranks, sizes, dtype, detail, stack)
        )

    def _name(self, group: dist.ProcessGroup) -> str:
        """Return a name for a communicator that is equal on all of its ranks."""
        known = self._names.get(group.group_name)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._ordinals[ranks] += 1
            known = f"group of {_abbreviated(ranks)}"
            if self._ordinals[ranks] > 1:
                known += f" ({self._ordinals[ranks]})"
            self._names[group.group_name] = known
        return known


def _called_by_engine() -> bool:
    """Return True if the autograd engine called the caller without Python code in between."""
    try:
        frame = sys._getframe(2)
    except ValueError:  # on a separate thread
        return True
    return frame.f_code is RecordedEngine.run_backward.__code__


def _touched(kind: str, named: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that a `c10d` collective reads and writes."""
    in_place = [each for name in (*IN_PLACE, "tensor") for each in tensors_in(named.get(name))]
    if kind in ONE_SIDED:
        return ([], in_place) if ONE_SIDED[kind] else (in_place, [])
    reads = [each for name in INPUTS for each in tensors_in(named.get(name))]
    writes = [each for name in OUTPUTS for each in tensors_in(named.get(name))]
    return [*reads, *in_place], [*writes, *in_place]


def _detail(named: Mapping[str, Any]) -> str:
    reduction = _reduction_in(named)
    found = [reduction] if reduction else []
    found += [f"{name}={named[name]}" for name in DETAILS if named.get(name) not in (None, [])]
    return ", ".join(found)


def _abbreviated(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return ", ".join(str(rank) for rank in ranks)
    step = ranks[1] - ranks[0]
    if all(after - before == step for before, after in pairwise(ranks)):
        by = f" by {step}" if step != 1 else ""
        return f"{ranks[0]} to {ranks[-1]}{by}"
    return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"


def _reduction_in(named: Mapping[str, Any]) -> str:
    """Return the name of a collective's reduction, or an empty string."""
    reduction = named.get("reduce_op")
    if reduction is None or isinstance(reduction, str):
        return (reduction or "").lower()
    members: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__
    names = {int(cast("Any", kind)): name for name, kind in members.items()}
    return names[int(reduction.op())].lower()
