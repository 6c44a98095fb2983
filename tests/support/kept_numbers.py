"""Places in which a forward keeps a number past torch, and a module that reads and writes them."""

import functools
from argparse import Namespace
from array import array
from collections import UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random  # noqa: TID251  (modules have one)
from threading import local
from types import SimpleNamespace
from typing import Any, NamedTuple

import imported_numbers
import numpy as np
import torch
from odd_modules import Block, Net, plain_block
from torch import Tensor, nn

wrote = 0
"""A global that a forward counts."""

BOOK = {"wrote": [0]}


class Box:
    """An object with slots."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = 0


@dataclass
class Told:
    """An object of the caller's."""

    number: int = 0


class Place(NamedTuple):
    """How to read a number of a module, and how to count it up."""

    read: Callable[[Any], float]
    add: Callable[[Any], object]


def _count_global(net: Any) -> None:  # noqa: ANN401  (any module, here and below)
    global wrote  # noqa: PLW0603  (as a forward does it)
    wrote += 1


def _counted_in_a_cell() -> Place:
    number = 0

    def count(net: Any) -> None:  # noqa: ANN401
        nonlocal number
        number += 1

    return Place(lambda net: number, count)


def _add(name: str) -> Callable[[Any], None]:
    return lambda net: setattr(net, name, getattr(net, name) + 1)


class Counted(Net):
    """Blocks and the code between them count and read numbers, as `events` say.

    An event is a place in the forward (even ones are between blocks), whether it counts, and where
    the number is.
    """

    shared = 0

    def __init__(self, events: list[tuple[int, bool, str]]) -> None:
        super().__init__()
        self.events = events
        self.number, self.real = 0, 0.0
        self.listed, self.queued = [0], deque([0])
        self.named: dict[str, Any] = {"inner": {"number": 0}}
        self.told, self.boxed = Told(), Box()
        self.array = np.zeros(2)
        self.plain = torch.zeros(2)
        self.register_buffer("held", torch.zeros(2))
        self.drawn, self.tossed = torch.Generator().manual_seed(0), Random(0)
        self.dice = np.random.default_rng(0)
        self.cell = _counted_in_a_cell()
        self.last.number = 0  # type: ignore[assignment]  # a submodule's
        for place, block in enumerate(self.blocks):
            block.within = functools.partial(self.run, 2 * place + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.at(0, self.first(x))
        for place, block in enumerate(self.blocks):
            x = self.at(2 * place + 2, block(x))
        made: Tensor = self.last(x).square().mean()
        return made

    def run(self, place: int, block: Block, x: Tensor) -> Tensor:
        return self.at(place, plain_block(block, x))

    def at(self, place: int, x: Tensor) -> Tensor:
        for where, counts, kind in self.events:
            if where == place and counts:
                PLACES[kind].add(self)
            elif where == place:
                x = x * (1 + 0.1 * PLACES[kind].read(self))
        return x


PLACES = {
    "an attribute": Place(lambda net: net.number, _add("number")),
    "a float": Place(lambda net: net.real, _add("real")),
    "a list": Place(lambda net: len(net.listed), lambda net: net.listed.append(0)),
    "a deque": Place(lambda net: len(net.queued), lambda net: net.queued.appendleft(0)),
    "a dict in a dict": Place(
        lambda net: net.named["inner"]["number"],
        lambda net: net.named["inner"].update(number=net.named["inner"]["number"] + 1),
    ),
    "an object": Place(lambda net: net.told.number, lambda net: _add("number")(net.told)),
    "slots": Place(lambda net: net.boxed.inner, lambda net: _add("inner")(net.boxed)),
    "a part": Place(lambda net: net.last.number, lambda net: _add("number")(net.last)),
    "its class": Place(lambda net: net.shared, lambda net: _add("shared")(type(net))),
    "a global": Place(lambda net: wrote, _count_global),
    "a global list": Place(
        lambda net: len(BOOK["wrote"]), lambda net: BOOK["wrote"].append(0)
    ),
    "a cell": Place(lambda net: net.cell.read(net), lambda net: net.cell.add(net)),
    "its own table": Place(
        lambda net: vars(net)["number"], lambda net: vars(net).update(number=net.number + 1)
    ),
    "an array": Place(lambda net: float(net.array[0]), lambda net: np.add(net.array, 1, net.array)),
    "a tensor": Place(lambda net: float(net.plain[0]), lambda net: net.plain.add_(1)),
    "a buffer": Place(lambda net: float(net.held[0]), lambda net: net.held.add_(1)),
    "a generator of torch": Place(
        lambda net: net.drawn.get_state().sum().item() % 7,
        lambda net: torch.rand(1, generator=net.drawn),
    ),
    "a generator of Python": Place(
        lambda net: hash(net.tossed.getstate()) % 7, lambda net: net.tossed.random()
    ),
    "a generator of numpy": Place(
        lambda net: hash(str(net.dice.bit_generator.state)) % 7, lambda net: net.dice.random()
    ),
}  # fmt: skip
"""Places by name."""


def counted(events: list[tuple[int, bool, str]]) -> Counted:
    """Return a module with all numbers at their beginnings."""
    global wrote
    wrote, BOOK["wrote"], Counted.shared = 0, [0], 0
    torch.manual_seed(0)
    return Counted(events)


def numbers(module: nn.Module) -> dict[str, float]:
    """Return all numbers that the module keeps."""
    return {name: place.read(module) for name, place in PLACES.items()}


def counts_alone(block: Block, x: Tensor) -> Tensor:
    """Count a global that nothing but blocks names."""
    global of_blocks  # noqa: PLW0603  (as a forward does it)
    of_blocks += 1
    return plain_block(block, x * of_blocks)


of_blocks = 0


def count_in_an_import() -> float:
    """Count a global of a file that is imported here."""
    import imported_numbers as of_file  # noqa: PLC0415  (as a forward does it)

    of_file.count += 1
    return of_file.count


def count_in_a_list() -> float:
    """Count in a list of a file that was imported before."""
    imported_numbers.LISTED.append(0)
    return len(imported_numbers.LISTED)


@torch.no_grad()
def count_without_gradients() -> float:
    """Count in a function that torch has put another around."""
    global of_decorated  # noqa: PLW0603  (as a forward does it)
    of_decorated += 1
    return of_decorated


of_decorated = 0


def _counts(holder: Any, read: Callable[[Any], float], add: Callable[[Any], object]) -> Any:  # noqa: ANN401
    def count() -> float:
        add(holder)
        return read(holder)

    return count


def _in_attribute(holder: Any) -> Any:  # noqa: ANN401
    holder.number = 0
    return _counts(holder, lambda each: each.number, _add("number"))


COUNTERS = {
    "a file": imported_numbers.count_up,
    "an attribute of a file": count_in_an_import,
    "a list of a file": count_in_a_list,
    "a decorated function": count_without_gradients,
    "a namespace": _in_attribute(SimpleNamespace()),
    "parsed arguments": _in_attribute(Namespace()),
    "a thread": _in_attribute(local()),
    "a dict of the user": _counts(
        UserDict(number=0),
        lambda each: each["number"],
        lambda each: each.update(number=each["number"] + 1),
    ),
    "an array of Python": _counts(
        array("d", [0]), lambda each: each[0], lambda each: each.__setitem__(0, each[0] + 1)
    ),
    "a variable of a context": _counts(
        ContextVar("number", default=0),
        lambda each: each.get(),
        lambda each: each.set(each.get() + 1),
    ),
}
"""Functions that count a number up and return it, by the place where it is."""
