"""Collectives of two recorded ranks: equal orders agree, and the first difference is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zsim_record import recording
from zsim_record.record.finding_report import ScriptRecording, document_of

WORLD = 4


def ranks(script: Callable[[int], None]) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for rank in (0, 2):
        with recording(world=WORLD, rank=rank) as tape:
            dist.init_process_group("nccl")
            script(rank)
        documents.append(document_of(tape))
    return documents


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, device="zsim")


def test_ranks_that_do_the_same_agree() -> None:
    def script(rank: int) -> None:
        del rank
        even = dist.new_group([0, 2])
        dist.all_reduce(ones(3), group=even)
        dist.all_gather_single(ones(8), ones(2))

    recorded = ScriptRecording(ranks(script))
    assert recorded.divergences == []
    assert recorded.is_clean


def other_size(rank: int) -> None:
    dist.all_reduce(ones(3))
    dist.all_reduce(ones(5 + rank))


def other_order(rank: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(ones(3)),
        lambda: dist.broadcast(ones(3), src=1),
    ]
    dist.all_reduce(ones(3))
    for call in calls if rank == 0 else reversed(calls):
        call()


def one_more(rank: int) -> None:
    dist.all_reduce(ones(3))
    if rank == 0:
        dist.all_reduce(ones(3))


def other_reduction(rank: int) -> None:
    dist.all_reduce(ones(3))
    dist.all_reduce(ones(3), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def other_root(rank: int) -> None:
    dist.all_reduce(ones(3))
    dist.broadcast(ones(3), src=rank)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (other_size, "allreduce of 5 elements of float32, sum"),
        (other_order, "broadcast of 3 elements"),
        (one_more, "none on rank 2"),
        (other_reduction, "max"),
        (other_root, "root_rank=2"),
    ],
)
def test_the_first_collective_on_which_ranks_differ_is_named(
    script: Callable[[int], None], words: str
) -> None:
    recorded = ScriptRecording(ranks(script))
    (divergence,) = recorded.divergences
    assert divergence.startswith("group of 0, 1, 2, 3: collective 2 is ")
    assert words in divergence
    assert f"test_rank_comparison.py:{script.__code__.co_firstlineno + 2}" in divergence or (
        script is other_order or script is one_more
    )
    assert not recorded.is_clean


def test_groups_of_which_a_rank_is_no_member_are_not_compared() -> None:
    def script(rank: int) -> None:
        first = dist.new_group([0, 1])
        dist.new_group([2, 3])
        if rank == 0:
            dist.all_reduce(ones(3), group=first)

    assert ScriptRecording(ranks(script)).divergences == []
