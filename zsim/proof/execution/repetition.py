"""Repetition in programs: sequences of operations that repeat with a number increased by one.

Names are split at their first number: "block7/output" is number 7 of the family "block#/output".
Only large families are numbered; other names are not split. Operations match if they differ only
in these numbers, all by the same difference.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
from msgspec import Struct

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Compute,
    Free,
    HostWait,
    Operand,
    Operation,
    Together,
    View,
)

MEMORY = (Allocate, Free)
"""Operations whose only field with an effect on values is a buffer."""

ITERATIONS_MIN = 6
"""Minimum number of iterations of a repetition."""

PERIODS_MAX = 64
"""Maximum number of distances tried: a program with more has no few long repetitions."""

UNUSED = frozenset({"id", "stream", "after", "kernels", "launches", "draw", "mode", "uses"})
"""Fields without effect on values, since the proof runs operations in the order of issue."""

_NUMBERED = re.compile(r"([^\d#]*)(0|[1-9][0-9]*)(?!\d)([^#]*)")
"""A name whose first number has no leading zeros."""


class IrregularError(Exception):
    """Raised if repetition is not as regular as needed; then the whole schedule has to be run."""


Named = tuple[str, int | None]
"""A family with a number, or a name without a number."""


class NumberedNames(dict[str, Named]):
    """Names of one kind of thing, each with its family and number.

    Families of at least `least` names are numbered; other names are their own family, without
    number. A family with several names for each of `blocks` blocks is split: with three buckets
    for each block, "bucket7" is number 2 of the family "bucket#", of every third name from 1.
    """

    def __init__(self, names: Iterable[str], least: int, blocks: int = 0) -> None:
        apart = {name: _split_number(name) for name in names}
        sizes = Counter([family for family, number in apart.values() if number is not None])
        self._splits: dict[str, tuple[str, int, int]] = {}
        found = []
        for name, (family, number) in apart.items():
            size = sizes.get(family, 0)
            if number is not None and size >= least:
                every = round(size / blocks) if blocks else 1
                found.append((name, self._split(family, number, every)))
        super().__init__(found)

    def _split(self, family: str, number: int, every: int) -> Named:
        """Return the family of every `every`-th name of `family`, and the number in that family."""
        if every <= 1:
            return family, number
        number, first = divmod(number, every)
        split = f"{family}#{first}/{every}"  # no name has a family with two "#"
        self._splits[split] = family, every, first
        return split, number

    def __missing__(self, name: str) -> Named:
        """Return a name without a number."""
        return name, None

    @cached_property
    def families(self) -> dict[str, dict[int, str]]:
        """The names of each family by number."""
        found: dict[str, dict[int, str]] = {}
        for name, (family, number) in self.items():
            if number is not None:
                found.setdefault(family, {})[number] = name
        return found

    def moved(self, name: str, by: int) -> str:
        """Return the name whose number is larger by `by`; a name without a number is unchanged."""
        family, number = self[name]
        if number is None:
            return name
        family, every, first = self._splits.get(family, (family, 1, 0))
        return family.replace("#", str((number + by) * every + first), 1)


def _split_number(name: str) -> Named:
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name, None
    before, number, behind = found.groups()
    return f"{before}#{behind}", int(number)


@cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    names = cast("type[Struct]", kind).__struct_fields__
    return tuple(name for name in names if name not in UNUSED)


@cache
def _signature_fields(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in _fields(kind) if name not in ("unit", "operands"))


class Signatures:
    """Signatures of operations, with numbers relative to the first one in each."""

    def __init__(
        self, *, buffers: NumberedNames, layouts: NumberedNames, units: NumberedNames
    ) -> None:
        self.buffers = buffers
        self.layouts = layouts
        self.units = units
        self._base: int | None = None

    def of(self, operation: Operation) -> tuple[Hashable, int | None]:
        """Return the signature of an operation and its first number; None if it has none."""
        if isinstance(operation, MEMORY):
            family, number = self.buffers[operation.buffer]
            return (type(operation), family), number
        self._base = None
        return self._signature(operation), self._base

    def _signature(self, operation: Operation) -> tuple[Hashable, ...]:
        kind: Any = type(operation)
        if isinstance(operation, Compute):
            operands = operation.operands
            return (
                kind,
                self._counted(self.units[operation.unit]),
                tuple([(each.role, self._view(each.view), each.partial) for each in operands]),
                *[getattr(operation, name) for name in _signature_fields(kind)],
            )
        if isinstance(operation, Branch):
            return kind, operation.id  # repetitions in its lists are found separately
        if isinstance(operation, Together):
            return kind, *map(self._signature, operation.members)
        return kind, *[
            self._view(value) if isinstance(value, View) else value
            for value in [getattr(operation, name) for name in _fields(kind)]
        ]

    def _view(self, view: View) -> Hashable:
        layout = view.layout and self._counted(self.layouts[view.layout])
        family, number = self.buffers[view.buffer]
        if number is not None:  # `_counted` inlined, since this runs for each view
            if self._base is None:
                self._base = number
            number -= self._base
        return family, number, view.start, view.size, view.axis, layout, view.origin

    def _counted(self, named: Named) -> Hashable:
        family, number = named
        if number is None:
            return named
        if self._base is None:
            self._base = number
        return family, number - self._base

    def numbers(self, operation: Operation) -> Iterator[int]:
        """Yield the numbers of all names in an operation."""
        names = [self.buffers[each] for each in named_buffers(operation)]
        names += [self.layouts[each.layout] for each in views(operation) if each.layout]
        if isinstance(operation, Compute):
            names.append(self.units[operation.unit])
        yield from (number for _, number in names if number is not None)


def views(value: object) -> Iterator[View]:
    """Yield the views that an operation names: its own and those of its operands and members."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, Operand):
        yield value.view
    elif isinstance(value, tuple):
        for each in value:
            yield from views(each)
    elif isinstance(value, Operation):
        kind: Any = type(value)
        for name in _fields(kind):
            yield from views(getattr(value, name))


def named_buffers(operation: Operation) -> Iterator[str]:
    """Yield the buffers that an operation names."""
    if isinstance(operation, MEMORY):
        yield operation.buffer
    else:
        yield from (each.buffer for each in views(operation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Operations `start` to `end` of a list: iterations of `period` operations each.

    Iteration i has number `first` + i * `step`; `step` is 1 or -1.
    """

    start: int
    period: int
    iterations: int
    first: int
    step: int

    @property
    def end(self) -> int:
        """The first operation past the run."""
        return self.start + self.period * self.iterations

    @property
    def span(self) -> tuple[int, int]:
        """The smallest and the largest number of an iteration."""
        last = self.first + self.step * (self.iterations - 1)
        return min(self.first, last), max(self.first, last)

    def iteration(self, number: int) -> range:
        """Return the places of the operations of iteration `number`."""
        start = self.start + self.period * (number - self.first) * self.step
        return range(start, start + self.period)


@dataclass(frozen=True, slots=True)
class RunList:
    """A list of operations with its runs; a branch represents its lists."""

    operations: list[Operation]
    runs: list[Run]

    def rest(self) -> Iterator[Operation]:
        """Yield the operations outside runs."""
        place = 0
        for run in self.runs:
            yield from self.operations[place : run.start]
            place = run.end
        yield from self.operations[place:]

    def iteration(self, run: Run, number: int) -> list[Operation]:
        """Return the operations of iteration `number` of a run."""
        return [self.operations[place] for place in run.iteration(number)]


def counted(number: int, named: Named) -> Named:
    """Return a family with its number relative to `number`."""
    family, other = named
    return family, None if other is None else other - number


def single(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations, with each Together replaced by its members."""
    for operation in operations:
        if isinstance(operation, Together):
            yield from operation.members
        else:
            yield operation


def issued(operations: Iterable[Operation]) -> list[Operation]:
    """Return operations without waits of the host, which have no effect on values."""
    return [each for each in operations if type(each) is not HostWait]


def runs(operations: Sequence[Operation], signatures: Signatures) -> list[Run]:
    """Return the repetitions in a list, in order; none if there are too many distances."""
    known: dict[Hashable, int] = {}
    kinds, bases = np.empty(len(operations), np.int64), np.empty(len(operations), np.int64)
    fixed = -(2**40)
    for place, operation in enumerate(operations):
        signature, base = signatures.of(operation)
        kinds[place] = known.setdefault(signature, len(known))
        bases[place] = fixed if base is None else base
    later = _next_equal(kinds)
    breaks: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    found: list[Run] = []
    place = 0
    numbers, has_number = bases.tolist(), (bases != fixed).tolist()
    while place < len(operations):
        run = None
        for other in _occurrences(later, place) if has_number[place] else ():
            period, step = other - place, numbers[other] - numbers[place]
            if abs(step) != 1:
                continue
            if (period, step) not in breaks:
                if len(breaks) == PERIODS_MAX:
                    return []
                alike = (kinds[period:] == kinds[:-period]) & (
                    (bases[:-period] == fixed) | (bases[period:] - bases[:-period] == step)
                )
                breaks[period, step] = np.append(np.flatnonzero(~alike), len(alike))
            ends = breaks[period, step]
            end = int(ends[np.searchsorted(ends, place)]) + period
            iterations = (end - place) // period
            if iterations >= ITERATIONS_MIN:
                run = Run(
                    start=place,
                    period=period,
                    iterations=iterations,
                    first=numbers[place],
                    step=step,
                )
            break
        if run is None:
            place += 1
        else:
            found.append(run)
            place = run.end
    return found


def _next_equal(kinds: np.ndarray[Any, Any]) -> list[int]:
    """Return for each operation the next one with its signature; -1 after the last."""
    last: dict[int, int] = {}
    found = [-1] * len(kinds)
    for place, kind in reversed(list(enumerate(kinds.tolist()))):
        found[place] = last.get(kind, -1)
        last[kind] = place
    return found


def _occurrences(later: Sequence[int], place: int) -> Iterator[int]:
    """Yield the next few operations with the same signature."""
    for _ in range(8):
        place = later[place]
        if place < 0:
            return
        yield place
