"""An unnamed file that is read and written by byte ranges past the page cache.

It is opened with O_TMPFILE, or unlinked right after creation. However the process ends, even by
SIGKILL, the kernel frees its space, so no run leaves a file behind.

O_DIRECT requires address, length and offset to be multiples of the device's block size (open(2));
4096 works for all. Unaligned ranges go through an aligned buffer, and a write first reads the
blocks at its ends. If the file system refuses O_DIRECT, the file uses the page cache, and `direct`
is False.
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
"""Bytes per system call: enough to keep a drive busy, with several calls in flight."""

FILE_THREADS: Final = 4
"""Maximum number of system calls in flight for one file."""

POISON: Final = 0xFF
"""A byte that makes NaN in every floating-point format when repeated."""


class FileRangeError(OSError):
    """A range that could not be read or written, or a file that could not be created."""


def aligned(count: int) -> int:
    """Return `count` rounded up to whole blocks."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class RangeFile:
    """A file of `size` bytes on the file system of `folder`, written fully on creation."""

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
        """Extend the file to at least `size` bytes; the new range is reserved and written once.

        The first write to a range that was only reserved is several times slower than later writes.

        Raises:
            FileRangeError: there is not enough space.
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
        """Read bytes from `offset` into all of `target`.

        Up to `room` bytes after `target` in memory may be overwritten.
        """
        size = target.nbytes
        with self._counts:
            self.read_bytes += size
        whole = aligned(size) if self.direct else size
        if not self.direct or self._fits(offset, target.data_ptr(), whole - size, room):
            self._in_chunks(self._read, offset, _bytes_at(target.data_ptr(), whole))
            return
        memory = _bytes_at(target.data_ptr(), size)
        for start, length in _chunks(size):  # chunk by chunk, through one bounce buffer
            first = (offset + start) // ALIGNMENT * ALIGNMENT
            bounce = mmap.mmap(-1, aligned(offset + start + length - first))
            self._read(first, memoryview(bounce))
            there = offset + start - first
            memory[start : start + length] = bounce[there : there + length]

    def write(self, offset: int, source: torch.Tensor, room: int = 0) -> None:
        """Write all of `source` at `offset`.

        Up to `room` bytes after it in the file may be overwritten, with the bytes after `source`.
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
        """Write part of some blocks and keep the rest; a lock serializes such writes."""
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
        """Close the file, which frees its space."""
        self._threads.shutdown()
        self._closing()


def space_refusal(folder: Path, needed: int) -> str | None:
    """Return why unnamed files of `needed` bytes do not fit in `folder`, or None."""
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
    """Return the descriptor of a new unnamed file, and True if it bypasses the page cache."""
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
    """Reserve the space now, so that no write fails later because the disk is full.

    Raises:
        FileRangeError: there is not enough space.
    """
    try:
        os.posix_fallocate(descriptor, start, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FileRangeError(
                f"offload_path: {folder} has no {format_bytes(size)} for a file: {error.strerror}"
            ) from error
        os.ftruncate(descriptor, start + size)  # the file system cannot reserve


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, size - start)


def _bytes_at(address: int, size: int) -> memoryview:
    """Return memory by its address as a view; the caller keeps the memory alive."""
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
