"""Serves requests on standard input with torch.cuda's allocator and prints its statistics.

    PYTORCH_ALLOC_CONF=... python tests/support/allocator_on_device.py CAPACITY_BYTES

The same lines in and out as `stand_in_cuda/serve.cpp`. A stream that has not been finished sleeps,
so that what waits for it does so until then; sleeping takes longer than serving a list.
"""

import sys
from collections.abc import Callable
from typing import cast

import torch
from drawn_requests import MIB, read
from memory_requests import Empty, Finish, Give, Take, Use

SLEEP_CYCLES = 4_000_000_000
"""About two seconds of a GPU's clock."""


class Device:
    """The first CUDA device, with streams that sleep."""

    def __init__(self, capacity_bytes: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        if capacity_bytes < total:  # half a page more, for the fraction is rounded
            torch.cuda.set_per_process_memory_fraction((capacity_bytes + MIB) / total)
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.live: dict[str, torch.Tensor | None] = {}
        self.synchronizations = 0

    def stream(self, name: str) -> torch.cuda.Stream:
        """The stream of that name; it sleeps."""
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
            self.sleep(name)
        return self.streams[name]

    def sleep(self, name: str) -> None:
        with torch.cuda.stream(self.streams[name]):
            sleep = cast("Callable[[int], None]", vars(torch.cuda)["_sleep"])  # no public name
            sleep(SLEEP_CYCLES)

    def serve(self, request: object) -> None:
        match request:
            case Take(name, size_bytes, stream):
                with torch.cuda.stream(self.stream(stream)):
                    try:
                        made = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
                    except torch.cuda.OutOfMemoryError:
                        return
                self.live[name] = made
            case Use(name, stream):
                tensor = self.live.get(name)
                if tensor is not None:
                    tensor.record_stream(self.stream(stream))
            case Give(name):
                self.live.pop(name, None)
            case Finish(stream):
                self.stream(stream).synchronize()
                self.sleep(stream)
            case Empty():
                torch.cuda.empty_cache()
            case _:
                raise TypeError(request)
        done = torch.cuda.memory_stats()["num_sync_all_streams"]
        if done != self.synchronizations:  # the allocator has waited until all were awake
            self.synchronizations = done
            for name in self.streams:
                self.sleep(name)


def main(capacity_bytes: int) -> None:
    """Serve, then print."""
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    device = Device(capacity_bytes)
    for request in read(line.strip() for line in sys.stdin):
        device.serve(request)
    stats = torch.cuda.memory_stats()
    for name, value in stats.items():
        if name.endswith((".current", ".peak")) or name.startswith("num_"):
            sys.stdout.write(f"{name} {value}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
