"""A fault: what it makes of a right subject, and who has to find it.

A subject is a schedule, a run of the executor, or a trace with its schedule. Operators know the
structure of their subject, and nothing of those who have to find the fault.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")
S = TypeVar("S")
TRIES = 40
"""Draws until one can be made; most cannot where nothing can be changed at all."""


class BackEnd(StrEnum):
    """The kind of subject that a fault is planted in."""

    SCHEDULE = "schedule"
    EXECUTOR = "executor"
    TRACE = "trace"


@dataclass(frozen=True)
class Mutant(Generic[T]):
    """A subject that is changed in one way.

    Attributes:
        text: the change, in words.
        make: makes the changed subject; raises a ValueError if its constructor refuses it.
        where: names of which a finding has to mention one; without any, none has to.
    """

    text: str
    make: Callable[[], T]
    where: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, made: T, where: tuple[str, ...] = ()) -> "Mutant[T]":
        """Return the mutant that has been made already."""
        return cls(text, lambda: made, where)

    @cached_property
    def made(self) -> T:
        """The changed subject."""
        return self.make()


Operator = Callable[[S], Iterator[Mutant[T]]]
"""Yields all mutants of one kind."""
Draw = Callable[[S, np.random.Generator], Mutant[T]]
"""Draws a mutant; raises a ValueError if there is none to draw."""


@dataclass(frozen=True)
class Fault(Generic[S, T]):
    """A kind of change that makes right subjects wrong.

    Attributes:
        name: unique within its group.
        group: what is changed: "updates", "waits".
        found_by: checkers of which one has to find each mutant that is wrong.
        yields: the mutants of a subject, with a generator for those that are drawn.
        applies: a condition for `yields`.
        harmless: the reason why no mutant has to be wrong, if none has to.
        is_endless: whether mutants are drawn, as many as are asked for.
    """

    name: str
    group: str
    back_end: BackEnd
    found_by: frozenset[str]
    yields: Callable[[S, np.random.Generator], Iterable[Mutant[T]]]
    applies: Callable[[S], bool] = lambda _: True
    harmless: str = ""
    is_endless: bool = False

    @property
    def id(self) -> str:
        """The name in the table."""
        return f"{self.group}: {self.name}"

    def __str__(self) -> str:
        return self.id

    def mutants(self, subject: S, seed: int | list[int] = 0) -> Iterator[Mutant[T]]:
        """Yield the mutants of a subject; none where the fault does not apply."""
        if self.applies(subject):
            yield from self.yields(subject, np.random.default_rng(seed))


def enumerated(
    group: str,
    back_end: BackEnd,
    operators: Mapping[str, Operator[S, T]],
    found_by: Mapping[str, str | frozenset[str]],
    *,
    otherwise: frozenset[str],
    harmless: Mapping[str, str] | None = None,
) -> tuple[Fault[S, T], ...]:
    """Return the faults of operators that yield all of their mutants."""
    unknown = {*found_by, *(harmless or {})} - set(operators)
    assert not unknown, f"{group}: {unknown}: no such operator"

    def made(name: str, operator: Operator[S, T]) -> Fault[S, T]:
        who = found_by.get(name, otherwise)
        return Fault(
            name,
            group,
            back_end,
            frozenset({who}) if isinstance(who, str) else who,
            lambda subject, _: operator(subject),
            harmless=(harmless or {}).get(name, ""),
        )

    return tuple(made(name, operator) for name, operator in operators.items())


def drawn(draw: Draw[S, T], subject: S, rng: np.random.Generator) -> Mutant[T] | None:
    """Return a mutant that can be made and differs; None if a few draws find none."""
    for _ in range(TRIES):
        try:
            found = draw(subject, rng)
            if found.made != subject:
                return found
        except ValueError:
            continue
    return None


def drawing(draw: Draw[S, T]) -> Callable[[S, np.random.Generator], Iterator[Mutant[T]]]:
    """Return the operator that yields mutants of different texts while a few draws find one."""

    def yields(subject: S, rng: np.random.Generator) -> Iterator[Mutant[T]]:
        seen: set[str] = set()
        repeated = 0
        while repeated < TRIES and (found := drawn(draw, subject, rng)) is not None:
            repeated += found.text in seen
            if found.text not in seen:
                seen.add(found.text)
                yield found

    return yields


def first(mutants: Iterable[Mutant[T]], count: int) -> list[Mutant[T]]:
    """Return the first mutants that can be made."""

    def possible(mutant: Mutant[T]) -> bool:
        try:
            mutant.made  # noqa: B018  # made once
        except ValueError:
            return False
        return True

    return list(islice(filter(possible, mutants), count))


def one_of(rng: np.random.Generator, choices: Iterable[T]) -> T:
    """Return one of `choices`, drawn.

    Raises:
        ValueError: there are none.
    """
    found = list(choices)
    if not found:
        raise ValueError("nothing to choose from")
    return found[int(rng.integers(len(found)))]
