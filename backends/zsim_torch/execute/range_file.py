"""A file without a name, read and written by byte ranges past the page cache.

It is opened with O_TMPFILE, or unlinked as soon as it is made: whatever ends the process, SIGKILL
included, the kernel then gives its space back, so no run leaves a file behind, and none finds one.

O_DIRECT wants address, length and offset in multiples of the block size of the device (open(2)):
4096 serves every one. Where ends do not fit, bytes go through an aligned buffer, and a write reads
the blocks at its ends first. Where the file system refuses O_DIRECT, the file goes through the page
cache, and `direct` says so.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from zsim.units import format_bytes
from zsim_torch.supervise.progress_record import progressed

ALIGNMENT: Final = 4096
CHUNK_BYTES: Final = 1 << 22
"""Bytes of one system call: enough to keep a drive busy, and several in flight at a time."""

FILE_THREADS: Final = 4
"""System calls of one file that are in flight at a time."""

POISON: Final = 0xFF
"""Of a floating-point number in any format these bytes make no number."""


class FileRangeError(OSError):
    """Bytes that could not be read or written, or a file that could not be made; one line."""


def aligned(count: int) -> int:
    """Return `count` rounded up to whole blocks."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class RangeFile:
    """`size` bytes on the file system of `folder`, written whole once."""

    def __init__(self, folder: Path, size: int, *, poison: bool = False) -> None:
        self.size = 0
        self.read_bytes = self.written_bytes = 0
        self._descriptor, self.direct = _opened(folder)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._folder, self._poison = folder, poison
        self._ends, self._counts = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="file")
        try:
            self.grow(size)
        except BaseException:
            self.close()
            raise

    def grow(self, size: int) -> None:
        """Have at least `size` bytes; what is new is reserved, and written once.

        The first write to a range that was only reserved is several times slower than later ones.

        Raises:
            FileRangeError: there is no space.
        """
        more = aligned(size) - self.size
        if more > 0:
            _reserve(self._descriptor, self.size, more, self._folder)
            self.fill(self.size, more, POISON if self._poison else 0)
            self.size += more

    def fill(self, offset: int, size: int, byte: int) -> None:
        """Write `byte` to whole blocks."""
        if not size:
            return
        block = mmap.mmap(-1, min(size, CHUNK_BYTES))
        block.write(bytes([byte]) * len(block))
        with memoryview(block) as view:
            for start, length in _chunks(size):
                self._write(offset + start, view[:length])

    def read(self, offset: int, target: torch.Tensor, room: int = 0) -> None:
        """Read bytes from `offset` on to all of `target`.

        What follows `target` in memory may be overwritten for `room` bytes.
        """
        size = target.nbytes
        with self._counts:
            self.read_bytes += size
        whole = aligned(size) if self.direct else size
        if not self.direct or self._fits(offset, target.data_ptr(), whole - size, room):
            self._in_chunks(self._read, offset, _bytes_at(target.data_ptr(), whole))
            return
        memory = _bytes_at(target.data_ptr(), size)
        for start, length in _chunks(size):  # in one after the other: pages of one are enough
            first = (offset + start) // ALIGNMENT * ALIGNMENT
            bounce = mmap.mmap(-1, aligned(offset + start + length - first))
            self._read(first, memoryview(bounce))
            there = offset + start - first
            memory[start : start + length] = bounce[there : there + length]

    def write(self, offset: int, source: torch.Tensor, room: int = 0) -> None:
        """Write all of `source` to `offset` on.

        What follows in the file may be overwritten for `room` bytes, with what follows in memory.
        """
        size = source.nbytes
        with self._counts:
            self.written_bytes += size
        whole = aligned(size) if self.direct else size
        if not self.direct or self._fits(offset, source.data_ptr(), whole - size, room):
            self._in_chunks(self._write, offset, _bytes_at(source.data_ptr(), whole))
            return
        memory = _bytes_at(source.data_ptr(), size)
        for start, length in _chunks(size):
            self._merge(offset + start, memory[start : start + length])

    @staticmethod
    def _fits(offset: int, address: int, excess: int, room: int) -> bool:
        return offset % ALIGNMENT == 0 and address % ALIGNMENT == 0 and excess <= room

    def _merge(self, offset: int, memory: memoryview) -> None:
        """Write to part of some blocks, of which the rest stays: nobody else writes ends then."""
        first = offset // ALIGNMENT * ALIGNMENT
        bounce = mmap.mmap(-1, aligned(offset + len(memory) - first))
        with self._ends, memoryview(bounce) as blocks:
            self._read(first, blocks[:ALIGNMENT])
            if len(blocks) > ALIGNMENT:
                last = len(blocks) - ALIGNMENT
                self._read(first + last, blocks[last:])
            blocks[offset - first : offset - first + len(memory)] = memory
            self._write(first, blocks)

    def _in_chunks(
        self, move: Callable[[int, memoryview], None], offset: int, memory: memoryview
    ) -> None:
        chunks = list(_chunks(len(memory)))
        if len(chunks) == 1:
            move(offset, memory)
            return
        moves = [
            self._threads.submit(move, offset + start, memory[start : start + length])
            for start, length in chunks
        ]
        for each in moves:
            each.result()

    def _read(self, offset: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            got = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not got:
                raise FileRangeError(
                    f"read {done} of {len(memory)} bytes at {offset}, the file has no more"
                )
            done += got
        progressed()

    def _write(self, offset: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            put = os.pwritev(self._descriptor, [memory[done:]], offset + done)
            if not put:
                raise FileRangeError(f"wrote {done} of {len(memory)} bytes at {offset}")
            done += put
        progressed()

    def close(self) -> None:
        """Give the space back."""
        self._threads.shutdown()
        self._closing()


def space_refusal(folder: Path, needed: int) -> str | None:
    """Return why `folder` cannot have `needed` bytes of files without a name, or None."""
    try:
        os.close(_opened(folder)[0])
        found = os.statvfs(folder)
    except OSError as error:
        return f"offload_path: {folder}: {error.strerror or error}"
    free = found.f_bavail * found.f_frsize
    if needed > free:
        return (
            f"offload_path: {folder} has {format_bytes(free)} free, the files of the ranks need "
            f"{format_bytes(needed)}"
        )
    return None


def _opened(folder: Path) -> tuple[int, bool]:
    """Return the descriptor of a new file without a name, and whether it is past the page cache."""
    for direct in (os.O_DIRECT, 0):
        with suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | direct, 0o600), bool(direct)
    made, name = tempfile.mkstemp(prefix="zsim-offload-", dir=folder)
    try:
        with suppress(OSError):
            return os.open(name, os.O_RDWR | os.O_DIRECT), True
        return os.dup(made), False
    finally:
        Path(name).unlink()
        os.close(made)


def _reserve(descriptor: int, start: int, size: int, folder: Path) -> None:
    """Take the space now, so that no write fails later for want of it.

    Raises:
        FileRangeError: there is not enough.
    """
    try:
        os.posix_fallocate(descriptor, start, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FileRangeError(
                f"offload_path: {folder} has no {format_bytes(size)} for a file: {error.strerror}"
            ) from error
        os.ftruncate(descriptor, start + size)  # a file system that cannot reserve


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, size - start)


def _bytes_at(address: int, size: int) -> memoryview:
    """Return memory as it is, by its address: whoever asks keeps it alive."""
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
