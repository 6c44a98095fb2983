"""Faults of the executor, planted on real ranks: each makes it do other than its schedule says.

A fault patches the executor, never the recorder, and does not show in what the executor says of
itself: it runs to the end, with its events, book and transfers as they should be.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

ZERO0, ZERO1, ZERO2, ZERO3 = "stage 0", "stage 1, clipped", "stage 2, fp16, clipped", "stage 3"
FSDP = "fsdp2, bf16, clipped"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in a job, the rank that alone has it, and what some finding has to say."""

    job: str
    rank: int | None
    plant: Callable[[ExitStack], None]
    why: str = ""


FAULTS: dict[str, Fault] = {}

Function = Callable[..., Any]


def fault(
    job: str, owner: object, name: str, *, rank: int | None = None, why: str = ""
) -> Function:
    """Register a function that takes the function `name` of `owner` and gives a wrong one."""

    def register(make: Callable[[Function], Function]) -> None:
        def plant(patches: ExitStack) -> None:
            right = getattr(owner, name)
            patches.enter_context(patch.object(owner, name, make(right)))

        FAULTS[make.__name__] = Fault(job, rank, plant, why)

    return register


def altered(change: Callable[..., Any]) -> Callable[[Function], Function]:
    """`change` gets the right function before its arguments."""

    def make(right: Function) -> Function:
        return lambda *given, **named: change(right, *given, **named)

    make.__name__ = change.__name__
    return make
