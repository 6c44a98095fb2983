"""The module `torch.zsim`: what torch and runtimes ask an accelerator, answered without one."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

import torch

from zsim_torch.record.pretended_streams import (
    DEVICE_TYPE,
    PretendedEvent,
    PretendedStream,
    active_streams,
)

MEMORY_BYTES = 80 * 2**30
"""Of the pretended device, as an H100 has (NVIDIA H100 datasheet)."""


class ChosenDevice:
    """Context in which a device is current: a rank has one, so it changes nothing."""

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
        """Return that there is a device."""
        return True

    def is_initialized(self) -> bool:
        """Return that it is ready."""
        return True

    def init(self) -> None:
        """Do nothing."""

    def _lazy_init(self) -> None:
        """Do nothing."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of devices on a node: enough for each rank."""
        return max(1, active_streams().tape.world)

    def current_device(self) -> int:
        """Return the number of the device, which has no meaning here."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: a rank has one device."""

    def current_stream(self, device: object = None) -> PretendedStream:
        """Return the stream that operations are enqueued on."""
        del device
        return active_streams().current

    def default_stream(self, device: object = None) -> PretendedStream:
        """Return the stream that is current at first."""
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
        """Return a state that means nothing."""
        del device
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Do nothing: no number is drawn."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types of autocast."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: object = None) -> bool:
        """Return that bfloat16 is there."""
        del including_emulation
        return True

    def empty_cache(self) -> None:
        """Do nothing: no memory is held."""

    def memory_allocated(self, device: object = None) -> int:
        """Return the bytes of storages that live."""
        del device
        return active_streams().tape.live_bytes

    def max_memory_allocated(self, device: object = None) -> int:
        """Return the most bytes that lived at once."""
        del device
        return active_streams().tape.peak_bytes

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Count the peak from here."""
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
        """Return a name."""
        del device
        return "pretended device of zsim"


DEVICE_MODULE = DeviceModule(f"torch.{DEVICE_TYPE}")
