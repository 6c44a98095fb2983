"""Hypothesis strategies for what a host asks of an allocator, and the lists as text."""

from collections.abc import Iterable
from typing import assert_never

from hypothesis import strategies as st
from memory_requests import Empty, Finish, Give, Request, Take, Use

from zsim.memory.settings import AllocatorSettings

MIB = 1024 * 1024
EDGES = (0, 1, 511, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 32 * MIB)
SIZES = st.one_of(
    st.sampled_from(EDGES),
    st.integers(1, 5000),
    st.integers(1, 3 * MIB),
    st.integers(1, 50 * MIB),
)
STREAMS = ("0", "1", "2")

SETTINGS = st.one_of(
    st.builds(AllocatorSettings, roundup_power2_divisions=st.sampled_from([0, 1, 2, 4, 8])),
    st.builds(
        AllocatorSettings,
        expandable_segments=st.just(True),
        roundup_power2_divisions=st.sampled_from([0, 4]),
    ),
    st.builds(
        AllocatorSettings,
        max_split_bytes=st.integers(20, 40).map(lambda size: size * MIB),
        max_non_split_rounding_bytes=st.sampled_from([20 * MIB, 24 * MIB]),
    ),
)
CAPACITIES = st.sampled_from([60 * MIB, 100 * MIB, 400 * MIB, 1 << 36])


@st.composite
def requests(draw: st.DrawFn, *, most: int = 60) -> list[Request]:
    """A list in which every block is taken before it is used, and freed at most once.

    Blocks are used on one stream at most beside their own: the order in which PyTorch looks at
    several streams is that of a hash table.
    """
    used_on = draw(st.sampled_from(STREAMS))
    live: list[str] = []
    found: list[Request] = []
    for number in range(draw(st.integers(1, most))):
        action = draw(st.sampled_from("ttttgggufe" if live else "ttttfe"))
        if action == "t":
            live.append(f"b{number}")
            found.append(Take(live[-1], draw(SIZES), draw(st.sampled_from(STREAMS))))
        elif action == "g":
            found.append(Give(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif action == "u":
            found.append(Use(live[draw(st.integers(0, len(live) - 1))], used_on))
        elif action == "f":
            found.append(Finish(draw(st.sampled_from(STREAMS))))
        else:
            found.append(Empty())
    return found


def written(requests: Iterable[Request]) -> list[str]:
    """One short line for each request."""
    lines: list[str] = []
    for request in requests:
        match request:
            case Take(name, size, stream):
                lines.append(f"take {name} {size} {stream}")
            case Use(name, stream):
                lines.append(f"use {name} {stream}")
            case Give(name):
                lines.append(f"give {name}")
            case Finish(stream):
                lines.append(f"finish {stream}")
            case Empty():
                lines.append("empty")
            case _:
                assert_never(request)
    return lines


def read(lines: Iterable[str]) -> list[Request]:
    """What `written` wrote."""
    found: list[Request] = []
    for line in lines:
        match line.split():
            case ["take", name, size, stream]:
                found.append(Take(name, int(size), stream))
            case ["use", name, stream]:
                found.append(Use(name, stream))
            case ["give", name]:
                found.append(Give(name))
            case ["finish", stream]:
                found.append(Finish(stream))
            case ["empty"]:
                found.append(Empty())
            case _:
                raise ValueError(line)
    return found
