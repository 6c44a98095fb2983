"""Compare the collectives of recorded ranks: members of a communicator must agree on the order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

PAIRED = frozenset({"send", "recv", "recv_any_source", "send_object_list"})
"""Kinds between two ranks only; other members of the communicator do not take part."""
UNEVEN = frozenset(
    {"alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "shard_dim_alltoall"}
)
"""Kinds in which ranks may send and receive different amounts."""

Rank = Mapping[str, Any]


def divergences(ranks: Sequence[Rank]) -> list[str]:
    """Return for each communicator the first collective on which two recorded ranks disagree."""
    found: dict[str, str] = {}
    for one, other in combinations(ranks, 2):
        for name, ours, theirs in _shared(one, other):
            if name not in found:
                different = _first_difference(one, other, ours, theirs)
                if different:
                    found[name] = f"{name}: {different}"
    return list(found.values())


def _shared(one: Rank, other: Rank) -> Iterator[tuple[str, list[Any], list[Any]]]:
    for name in sorted({*one["collectives"], *other["collectives"]}):
        ours = one["collectives"].get(name, [])
        theirs = other["collectives"].get(name, [])
        members = (ours or theirs)[0]["ranks"]
        if one["rank"] in members and other["rank"] in members:
            yield name, _ordered(ours), _ordered(theirs)


def _ordered(issued: Sequence[Rank]) -> list[Any]:
    return [each for each in issued if each["kind"] not in PAIRED]


def _first_difference(one: Rank, other: Rank, ours: list[Any], theirs: list[Any]) -> str:
    for number, (mine, yours) in enumerate(zip_longest(ours, theirs), 1):
        if mine is None or yours is None or _agreed(mine) != _agreed(yours):
            return (
                f"collective {number} is {_described(mine)} on rank {one['rank']} and "
                f"{_described(yours)} on rank {other['rank']}"
            )
    return ""


def _agreed(issued: Rank) -> tuple[object, ...]:
    uneven = issued["kind"] in UNEVEN
    detail = "" if uneven else issued["detail"]
    return issued["kind"], () if uneven else tuple(issued["sizes"]), issued["dtype"], detail


def _described(issued: Rank | None) -> str:
    if issued is None:
        return "none"
    sizes = " and ".join(str(size) for size in issued["sizes"])
    detail = f", {issued['detail']}" if issued["detail"] else ""
    at = f" at {issued['at'][0]}" if issued["at"] else ""
    return f"{issued['kind']} of {sizes} elements of {issued['dtype']}{detail}{at}"
