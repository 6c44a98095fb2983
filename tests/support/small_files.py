"""DeepSpeed's files for tiny models: upstream, nothing under a mebibyte is written to one."""

from collections.abc import Generator
from contextlib import contextmanager

from tiny_training import Case, Result, by_schedule

from zsim_runtimes.deepspeed.options import DeepSpeed


@contextmanager
def small_files(*, least_bytes: int = 64, alignment: int = 4) -> Generator[None]:
    """Let tensors of so many bytes be written, of so many elements or a multiple."""
    kept = DeepSpeed.min_aio_bytes, DeepSpeed.aio_alignment
    DeepSpeed.min_aio_bytes, DeepSpeed.aio_alignment = least_bytes, alignment
    try:
        yield
    finally:
        DeepSpeed.min_aio_bytes, DeepSpeed.aio_alignment = kept


def all_in_small_files(cases: list[Case]) -> list[Result]:
    """Train case after case in one process group."""
    with small_files():
        return [by_schedule(case) for case in cases]
