"""Mutants of the executor of real ranks: each one small change of the text of one function.

A change that does not apply any more, or applies twice, fails. `hint` names the run that is judged
first. Where no judge can tell a mutant from the executor, `same` says why.
"""

import inspect
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

from zsim_torch.execute import collectives, copying, executor, sharded_optimizer
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.host_memory import FileSpace, HostPool
from zsim_torch.execute.host_workers import HostJob, HostWorkers
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.needed_waits import NeededWaits
from zsim_torch.execute.streams import CpuStreams

STAGE_0, STAGE_1, STAGE_2, STAGE_3 = "stage 0", "stage 1 replicas", "stage 2 fp16", "stage 3"
OFFLOAD, DEFERRED = "stage 3 offload", "fsdp1"
CROSSED, PINNED = "by hand", "threads by hand"
VALUES, NVME = "values", "values from files"
PLAIN = "values without poison"
CALLER = "with a caller"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function of `owner` in which `old` is `new`."""

    name: str
    hint: str
    owner: Any
    function: str
    old: str
    new: str
    same: str = ""

    @contextmanager
    def planted(self) -> Generator[None]:
        """Let the executor be wrong inside."""
        right = inspect.getattr_static(self.owner, self.function)
        assert isinstance(right, FunctionType)
        text = textwrap.dedent(inspect.getsource(right))
        assert text.count(self.old) == 1, f"{self.name}: the change applies {text.count(self.old)}"
        made: dict[str, Any] = {}
        changed = compile(text.replace(self.old, self.new), inspect.getfile(right), "exec")
        exec(changed, right.__globals__, made)
        with patch.object(self.owner, self.function, made[self.function]):
            yield


RECORDED = "\n            end = _new_event()\n            end.record()\n"
AFTER = f"        action()\n        if entry.is_awaited:{RECORDED}"
MUTANTS = (
    # Waits of streams.
    Mutant(
        "an operation does not wait",
        STAGE_0,
        CudaStreams,
        "compute",
        "for event in events:",
        "for event in ():",
    ),
    Mutant(
        "an operation waits for its first edge alone",
        CROSSED,
        CudaStreams,
        "compute",
        "for event in events:",
        "for event in events[:1]:",
    ),
    Mutant(
        "an operation waits for its last edge alone",
        CROSSED,
        CudaStreams,
        "compute",
        "for event in events:",
        "for event in events[-1:]:",
    ),
    Mutant(
        "the current stream waits, not that of the operation",
        STAGE_2,
        CudaStreams,
        "compute",
        "stream.wait_event(event)",
        "event.wait()",
    ),
    Mutant(
        "a wait of another step is for this one",
        CROSSED,
        CudaStreams,
        "_events_of",
        "self._previous.get(edge.operation)",
        "self._current.get(edge.operation)",
    ),
    Mutant(
        "steps before are not waited for",
        CROSSED,
        CudaStreams,
        "end_step",
        "self._previous.update(self._current)",
        "pass",
    ),
    Mutant(
        "edges of the step itself are ignored",
        STAGE_0,
        CudaStreams,
        "_events_of",
        "event = self._current.get(edge)",
        "event = None",
    ),
    Mutant(
        "the host does not wait",
        STAGE_2,
        CudaStreams,
        "host_waits",
        "event.synchronize()",
        "pass",
    ),
    Mutant(
        "the host asks instead of waiting",
        STAGE_2,
        CudaStreams,
        "host_waits",
        "event.synchronize()",
        "event.query()",
    ),
    Mutant(
        "the streams do not wait for the caller",
        f"{STAGE_3}, {CALLER}",
        CudaStreams,
        "follow_caller",
        "stream.wait_stream(current)",
        "pass",
    ),
    Mutant(
        "the caller does not wait for the streams",
        f"{STAGE_3}, {CALLER}",
        CudaStreams,
        "hand_out",
        "current.wait_stream(stream)",
        "pass",
    ),
    Mutant(
        "memory that the caller reads is not held for it",
        f"{STAGE_3}, {CALLER}",
        CudaStreams,
        "hand_out",
        "tensor.record_stream(current)",
        "pass",
        same="the streams follow the caller before the memory is taken again",
    ),
    # Events.
    Mutant(
        "an event is recorded before its operation",
        STAGE_3,
        CudaStreams,
        "compute",
        AFTER,
        f"        end = _new_event()\n        end.record()\n{AFTER}".replace(RECORDED, "\n"),
    ),
    Mutant(
        "an event is recorded on the stream that was current before",
        STAGE_0,
        CudaStreams,
        "compute",
        RECORDED,
        RECORDED.replace("record()", "record(torch.cuda.default_stream(self._device))"),
    ),
    Mutant(
        "an event is never recorded",
        STAGE_1,
        CudaStreams,
        "compute",
        RECORDED,
        RECORDED.replace("end.record()", "pass"),
    ),
    Mutant(
        "a timed event is recorded before its operation",
        f"{STAGE_3}, traced",
        CudaStreams,
        "compute",
        "action()\n            end.record()",
        "end.record()\n            action()",
    ),
    Mutant(
        "operations that are awaited have no event",
        STAGE_0,
        Executor,
        "_entry",
        "is_awaited=operation.id in self._awaited or operation.id not in self._waits.edges",
        "is_awaited=operation.id not in self._waits.edges",
    ),
    # Streams.
    Mutant(
        "operations run on the default stream",
        STAGE_3,
        CudaStreams,
        "compute",
        "with torch.cuda.stream(stream):",
        "with nullcontext():",
    ),
    Mutant(
        "memory is taken on the default stream",
        STAGE_3,
        CudaStreams,
        "on",
        "return torch.cuda.stream(self._streams[stream])",
        "return nullcontext()",
    ),
    Mutant(
        "memory is taken on another stream",
        STAGE_3,
        CudaStreams,
        "on",
        "self._streams[stream]",
        'self._streams["compute"]',
    ),
    Mutant(
        "all runs on one stream",
        STAGE_3,
        CudaStreams,
        "compute",
        "stream = self._streams[entry.stream]",
        'stream = self._streams["compute"]',
    ),
    Mutant(
        "a collective runs on the stream of its communicator and nobody waits",
        STAGE_1,
        collectives.ProcessGroups,
        "issue",
        "works = [_hand_over(one, member, asynchronous=self.asynchronous) for one in handed]",
        "[_hand_over(one, member, asynchronous=True) for one in handed]\n    works = []",
    ),
    # Memory.
    Mutant(
        "a free waits for no use",
        STAGE_3,
        CudaStreams,
        "home_waits",
        "self._streams[home].wait_event(event)",
        "pass",
    ),
    Mutant(
        "the stream of a use waits, not the home",
        STAGE_3,
        CudaStreams,
        "home_waits",
        "self._streams[home].wait_event(event)",
        'self._streams["compute"].wait_event(event)',
    ),
    Mutant(
        "a free forgets its uses",
        STAGE_3,
        Executor,
        "_free",
        "machine.streams.home_waits(home, buffer, uses, drop, lent=lent)",
        "machine.streams.home_waits(home, buffer, (), drop, lent=lent)",
    ),
    Mutant(
        "deferred memory is back at once",
        DEFERRED,
        CudaStreams,
        "finish",
        "all(_is_over(event) for event in events)",
        "True",
    ),
    Mutant(
        "deferred memory is back after its first use",
        CROSSED,
        CudaStreams,
        "finish",
        "all(_is_over(event) for event in events)",
        "all(_is_over(event) for event in events[:1])",
    ),
    Mutant(
        "deferred memory is not asked for",
        DEFERRED,
        Executor,
        "_return_deferred",
        "if deferred.finish():",
        "if True:",
    ),
    Mutant(
        "deferred memory never comes back",
        DEFERRED,
        Executor,
        "_return_deferred",
        "if deferred.finish():",
        "if False:",
    ),
    Mutant(
        "freed memory that autograd made is kept",
        VALUES,
        LiveMemory,
        "take_away",
        "parts = self._parts.pop(name, [])",
        "parts = list(self._parts.get(name, []))",
    ),
    Mutant(
        "freed memory is kept",
        STAGE_3,
        LiveMemory,
        "take_away",
        "flat = self._flat.pop(name, None)",
        "flat = self._flat.pop(name, None)\n    self.__dict__.setdefault('kept', []).append(flat)",
    ),
    Mutant(
        "the record of a forward outlives its backward",
        STAGE_3,
        Computer,
        "_backward",
        "record = self._records.pop(visit_of(compute), None)",
        "record = self._records.get(visit_of(compute), None)",
        same="it goes when what it has saved is freed",
    ),
    Mutant(
        "a gradient is kept",
        STAGE_3,
        Computer,
        "_bind_gradient",
        "memory.bind(view.buffer, [ProducedPart(view.start, gradient)])",
        "memory.bind(view.buffer, [ProducedPart(view.start, gradient)])\n"
        "    memory.__dict__.setdefault('kept', []).append(gradient)",
    ),
    Mutant(
        "an output is kept",
        STAGE_3,
        Computer,
        "_bind_outputs",
        "self._shapes[view.buffer] = output.shape",
        "self._shapes[view.buffer] = output.shape\n"
        "        self.work.memory.__dict__.setdefault('kept', []).append(output)",
    ),
    Mutant(
        "a gathered bucket is kept until the next one comes",
        STAGE_3,
        executor,
        "_hand_over",
        "if not machine.poison.is_on:",
        "machine.memory.__dict__['kept'] = handed\n    if not machine.poison.is_on:",
    ),
    Mutant(
        "a gradient that shares its memory is written in place",
        VALUES,
        LiveMemory,
        "_is_alone",
        "] == 1",
        "] >= 1",
    ),
    Mutant(
        "memory of every home is freed on one stream",
        STAGE_3,
        Executor,
        "_bound_free",
        "self.machine.program.by_name[buffer].home",
        '"compute"',
    ),
    # Pinned memory, files and threads.
    Mutant(
        "host memory is lent while it is used",
        PINNED,
        Executor,
        "_busy",
        "return [each for access",
        "return []\n    return [each for access",
    ),
    Mutant(
        "pages are given back as idle",
        PINNED,
        HostPool,
        "give_back",
        "block.busy = [*block.busy, *busy]",
        "block.busy = []",
    ),
    Mutant(
        "a range of a file is given back as idle",
        PINNED,
        FileSpace,
        "give_back",
        "tuple(busy)",
        "()",
    ),
    Mutant(
        "a free of lent memory marks nothing",
        OFFLOAD,
        CudaStreams,
        "home_waits",
        "if not lent:",
        "if True:",
    ),
    Mutant(
        "a thread does not wait for threads",
        NVME,
        HostWorkers,
        "hand_over",
        "[*self.named(after), *awaited]",
        "[*awaited]",
    ),
    Mutant(
        "a thread does not wait for the device",
        OFFLOAD,
        CudaStreams,
        "compute",
        "[*on_device, *awaited]",
        "[*awaited]",
    ),
    Mutant(
        "a thread runs what it should wait for",
        NVME,
        HostJob,
        "run",
        "each.wait()",
        "each.is_over()",
    ),
    Mutant(
        "the host does not wait for threads",
        PINNED,
        CpuStreams,
        "host_waits",
        "self.workers.wait(self.workers.named(edges))",
        "pass",
    ),
    Mutant(
        "the device does not wait for threads",
        NVME,
        CpuStreams,
        "compute",
        "self.workers.wait([*self.workers.named(entry.after), *awaited])",
        "pass",
        same="the host waits for threads before it issues what needs them",
    ),
    # Waits that are left out.
    Mutant(
        "an edge is left out one operation early",
        STAGE_3,
        NeededWaits,
        "_needed",
        ">= position:",
        ">= position - 1:",
    ),
    Mutant(
        "a wait is thought to tell of one operation more",
        STAGE_3,
        NeededWaits,
        "_needed",
        "_learn(known, {place.stream: position})",
        "_learn(known, {place.stream: position + 1})",
    ),
    Mutant(
        "edges to the step before are thought to be of this one",
        STAGE_3,
        NeededWaits,
        "_needed",
        "position -= self._lengths[place.stream]",
        "pass",
    ),
    Mutant(
        "what the host is asked later is thought to be known now",
        DEFERRED,
        NeededWaits,
        "_go_through",
        "if not (isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED):",
        "if True:",
    ),
    Mutant(
        "a free is thought to make the host wait",
        CROSSED,
        NeededWaits,
        "_go_through",
        "waiting = self.homes[buffer] if mode is FreeMode.WAITED else HOST",
        "waiting = HOST",
    ),
    Mutant(
        "every stream is thought to know what another has waited for",
        CROSSED,
        NeededWaits,
        "_go_through",
        "known = {**self._known.get(waiting, {})}",
        "known = {}\n        [_learn(known, each) for each in self._known.values()]",
    ),
    # Groups and operands of collectives.
    Mutant(
        "a gather goes through the default group",
        "stage 3 replicas",
        collectives,
        "_hand_over",
        "work = ALL_GATHER(target, source, group=group,",
        "work = ALL_GATHER(target, source, group=None,",
    ),
    Mutant(
        "a reduction goes through the default group",
        STAGE_1,
        collectives,
        "_hand_over",
        "work = distributed.all_reduce(target, op=how, group=group,",
        "work = distributed.all_reduce(target, op=how, group=None,",
    ),
    Mutant(
        "the communicator of another group is taken",
        STAGE_1,
        collectives.ProcessGroups,
        "member",
        "return self._members[group]",
        "return next(iter(self._members.values()))",
    ),
    Mutant(
        "a mean is a sum",
        "fsdp2",
        collectives,
        "_hand_over",
        "work = REDUCE_SCATTER(target, source, op=how,",
        "work = REDUCE_SCATTER(target, source, op=distributed.ReduceOp.SUM,",
    ),
    Mutant(
        "a collective is issued twice",
        STAGE_3,
        collectives.ProcessGroups,
        "issue",
        "return [work for work in works if work is not None]",
        "_hand_over(handed[0], member, asynchronous=self.asynchronous)\n"
        "    return [work for work in works if work is not None]",
    ),
    Mutant(
        "a branch goes the other way",
        STAGE_2,
        Executor,
        "_branch",
        "branch.then if number != 0 else branch.otherwise",
        "branch.then if number == 0 else branch.otherwise",
    ),
    Mutant(
        "a branch reads its number without waiting",
        STAGE_2,
        Executor,
        "_branch",
        "self.machine.streams.host_waits(edges)",
        "pass",
    ),
    # Values.
    Mutant(
        "a sum is overwritten",
        VALUES,
        copying,
        "_move_all",
        "elif copy.accumulate:",
        "elif False:",
    ),
    Mutant(
        "a view begins one element late",
        VALUES,
        LiveMemory,
        "flat",
        "flat[start : start + size]",
        "flat[start + 1 : start + 1 + size]",
    ),
    Mutant(
        "the operands of an operation are those of another",
        VALUES,
        Computer,
        "_of",
        "if found is None or found.compute is not compute:",
        "if found is None:",
        same="ids are unique in a program",
    ),
    Mutant(
        "numbers of the first step are kept",
        PLAIN,
        Executor,
        "_bound_compute",
        "partial(self.machine.computer.run, operation, self.scalars)",
        "partial(self.machine.computer.run, operation, dict(self.scalars))",
    ),
    Mutant(
        "the count of steps stands still",
        PLAIN,
        Executor,
        "_set_scalar",
        "+ operation.add",
        "+ 0 * operation.add",
    ),
    Mutant(
        "gradients are not clipped",
        VALUES,
        sharded_optimizer,
        "clip",
        "gradient.mul_(factor.to(gradient.dtype))",
        "pass",
    ),
)
