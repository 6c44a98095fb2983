"""The module `torch.zsim`: functions that torch requires of an accelerator, without a device."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

import torch

from zsim_record.record.pretended_streams import (
    DEVICE_TYPE,
    PretendedEvent,
    PretendedStream,
    active_streams,
)

MEMORY_BYTES = 80 * 2**30
"""Memory of the pretended device in bytes, that of an H100 (NVIDIA H100 datasheet)."""


class ChosenDevice:
    """Context manager that selects a device; a no-op, since a rank has only one."""

    def __init__(self, device: object = None) -> None:
        del device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class DeviceModule(ModuleType):
    """Functions of `torch.cuda` for one pretended device per rank."""

    Stream = PretendedStream
    Event = PretendedEvent
    device = ChosenDevice
    device_of = ChosenDevice

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def init(self) -> None:
        """Do nothing."""

    def _lazy_init(self) -> None:
        """Do nothing."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of devices of a node: one for each rank."""
        return max(1, active_streams().tape.world)

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: a rank has one device."""

    def current_stream(self, device: object = None) -> PretendedStream:
        """Return the stream that operations are enqueued on."""
        del device
        return active_streams().current

    def default_stream(self, device: object = None) -> PretendedStream:
        """Return the default stream."""
        del device
        return active_streams().default

    def set_stream(self, stream: PretendedStream) -> None:
        """Make `stream` current."""
        active_streams().current = stream

    @contextmanager
    def stream(self, stream: PretendedStream | None) -> Generator[None]:
        """Make `stream` current inside."""
        with active_streams().on(stream):
            yield

    def synchronize(self, device: object = None) -> None:
        """Block the host until the device is idle."""
        del device
        tape = active_streams().tape
        stack = tape.stack()
        for timeline in active_streams().all():
            tape.clocks.follow(tape.host, timeline, stack)

    def manual_seed(self, seed: int) -> None:
        """Do nothing: no number is drawn."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: no number is drawn."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return a placeholder state."""
        del device
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Do nothing: no number is drawn."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the data types of autocast."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: object = None) -> bool:
        """Return True."""
        del including_emulation
        return True

    def empty_cache(self) -> None:
        """Do nothing: no memory is held."""

    def memory_allocated(self, device: object = None) -> int:
        """Return the bytes of live storages."""
        del device
        return active_streams().tape.live_bytes

    def max_memory_allocated(self, device: object = None) -> int:
        """Return the peak bytes of live storages."""
        del device
        return active_streams().tape.peak_bytes

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Reset the peak to the current live bytes."""
        del device
        tape = active_streams().tape
        tape.peak_bytes = tape.live_bytes

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return free and total memory of the pretended device."""
        return max(0, MEMORY_BYTES - self.memory_allocated(device)), MEMORY_BYTES

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        """Return the compute capability of an H100."""
        del device
        return 9, 0

    def get_device_name(self, device: object = None) -> str:
        """Return a name for the device."""
        del device
        return "pretended device of zsim"


DEVICE_MODULE = DeviceModule(f"torch.{DEVICE_TYPE}")
