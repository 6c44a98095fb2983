"""Traces of PyTorch's profiler, made by hand: a host launches, a GPU works."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Recorder:
    """Write the events of one rank, in microseconds, as Kineto does."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.events: list[Event] = []
        self.host = 0.0
        self.free: dict[int, float] = {}
        self._begun: tuple[str, float] | None = None

    def step(self, number: int) -> None:
        """End the current step of the host, and begin step `number`."""
        self.end()
        self._begun = f"ProfilerStep#{number}", self.host

    def end(self) -> None:
        """End the current step of the host."""
        if self._begun is not None:
            name, begun = self._begun
            self._add("user_annotation", name, (begun, self.host - begun), {})
            self._begun = None

    def call(self, name: str, took: float, *, kind: str = "cuda_runtime") -> None:
        """The host is in a call that launches nothing."""
        self._add(kind, name, (self.host, took), {})
        self.host += took

    def wait(self) -> None:
        """The host waits until the GPU has done everything."""
        until = max(self.free.values(), default=self.host)
        self.call("cudaDeviceSynchronize", max(until - self.host, 0.0))

    def launch(self, name: str, took: float, *, stream: int = 7, **arguments: object) -> None:
        """Launch a kernel or copy that takes `took`, after what its stream has."""
        number = len(self.events) + 1
        self._add("cuda_runtime", "cudaLaunchKernel", (self.host, 2.0), {"correlation": number})
        start = max(self.host + 5.0, self.free.get(stream, 0.0))
        self.host += 2.0
        self.free[stream] = start + took
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        told = {"stream": stream, "device": 0, "correlation": number, **arguments}
        self._add(kind, name, (start, took), told)

    def gather(self, took: float, *, group: str = "mesh_dp", elements: int = 1000) -> None:
        """Launch an all-gather on the stream of communication."""
        told = {
            "Collective name": "_allgather_base",
            "Process Group Description": group,
            "Process Group Ranks": "[0, 1]",
            "In msg nelems": elements,
            "dtype": "BFloat16",
        }
        self.launch("ncclDevKernel_AllGather_RING_LL", took, stream=20, **told)

    def _add(
        self, kind: str, name: str, when: tuple[float, float], arguments: dict[str, object]
    ) -> None:
        event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 1, "args": arguments}
        self.events.append({**event, "ts": when[0], "dur": when[1]})

    def profile(self) -> dict[str, Any]:
        """Return the object that the profiler writes."""
        spread = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "A GPU"}],
            "distributedInfo": spread,
            "traceEvents": deepcopy(self.events),
        }


def written(profile: dict[str, Any], path: Path) -> Path:
    """Write a trace, and return its path."""
    path.write_text(json.dumps(profile), "utf-8")
    return path


def busy(profile: dict[str, Any], kinds: Sequence[str]) -> list[Event]:
    """Return the events of these categories."""
    return [each for each in profile["traceEvents"] if each["cat"] in kinds]
