"""What the recorder sees of torch, without anything of a schedule."""

import threading

import torch
from shared_ranks import SharedPools
from torch import distributed

from zsim.trace.witness import Region, Witness
from zsim_torch.observe.recorder import Recorder


def touched(witness: Witness) -> list[tuple[tuple[Region, ...], tuple[Region, ...]]]:
    return [(call.reads, call.writes) for call in witness.calls]


def test_calls_have_the_bytes_that_they_read_and_write_of_older_storages() -> None:
    recorder = Recorder()
    with recorder:
        recorder.mark(0, "make")
        whole, other = torch.zeros(4, 3), torch.ones(4, dtype=torch.float64)
        recorder.mark(0, "use")
        whole[1:3].copy_(other[1:3].unsqueeze(1))
        whole[:, 1].add_(other)
        torch.zeros(3).add_(1)
    witness = recorder.witness()
    assert [storage.bytes for storage in witness.storages[:2]] == [48, 32]
    column = tuple((0, 4 + 12 * row, 4) for row in range(4))
    assert touched(witness) == [
        (((1, 8, 16),), ((0, 12, 24),)),
        ((*column, (1, 0, 32)), column),
    ]


def test_a_storage_is_made_and_released_under_the_marks_at_which_it_was() -> None:
    recorder = Recorder()
    before = torch.zeros(2)
    with recorder:
        recorder.mark(0, "a")
        held = before + 1
        recorder.mark(0, "b")
        del held
        recorder.mark(0, "c")
    witness = recorder.witness()
    foreign, made = witness.storages
    first, second, third = (mark.tick for mark in witness.marks)
    assert (foreign.made, foreign.released) == (None, None)
    assert made.made is not None
    assert made.released is not None
    assert first <= made.made < second <= made.released < third


def test_a_storage_that_another_thread_held_last_is_told_apart() -> None:
    recorder = Recorder()
    with recorder:
        recorder.mark(0, "a")
        held = [torch.zeros(2) + 1, torch.zeros(2) + 2]
        first, second = ([held.pop()] for _ in range(2))
        thread = threading.Thread(target=first.clear)
        thread.start()
        thread.join()
        second.clear()
    made = [storage.by_thread for storage in recorder.witness().storages if storage.released]
    assert sorted(made) == [False, False, False, True]


def reduced() -> Witness:
    """An all-reduce of halves and a gather, one waited for and one not."""
    rank = distributed.get_rank()
    recorder = Recorder()
    with recorder:
        recorder.mark(0, "reduce")
        whole = torch.tensor([1.5, 2.0 * rank, 3.0])
        works = [
            distributed.all_reduce(whole[1:], op=distributed.ReduceOp.MAX, async_op=True),
            distributed.broadcast(whole[:1], src=1, async_op=True),
        ]
        _waited(works[0])
    _waited(works[1])
    return recorder.witness()


def _waited(work: distributed.Work | None) -> None:
    assert work is not None
    work.wait()


def test_collectives_have_members_bytes_and_sums_and_whether_somebody_waited(
    pool_of: SharedPools,
) -> None:
    first, second = pool_of(2).run(reduced)
    for rank, witness in enumerate((first, second)):
        reduce, broadcast = witness.collectives
        assert (reduce.kind, reduce.reduction, reduce.dtype) == ("all_reduce", "max", "float32")
        assert (reduce.ranks, reduce.source, reduce.target) == ((0, 1), (0, 4, 8), (0, 4, 8))
        assert [each[1:] for each in reduce.brought] == [(3.0 + 2 * rank,) * 2]
        assert [each[1:] for each in reduce.left] == [(5.0, 5.0)]
        assert (broadcast.peer, len(broadcast.brought), broadcast.left) == (1, rank, ())
        assert reduce.waited is not None
        assert broadcast.waited is None
    assert first.collectives[0].left == second.collectives[0].left
    assert first.collectives[0].communicator == second.collectives[0].communicator
