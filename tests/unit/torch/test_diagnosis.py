"""Who is to blame when no rank makes progress, from what the ranks said of themselves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from zsim_torch.supervise.diagnosis import Seen, account, blamed, missing, named, story, waiting
from zsim_torch.supervise.progress_record import LastProgress, Wait

ALL = (0, 1, 2)


def rank(
    number: int,
    *,
    handed: tuple[int, ...] = (0,),
    waits: str = "",
    group: int = 0,
    at: int = 1,
    count: int = 10,
    stopped: bool = False,
    gone: bool = False,
) -> Seen:
    """A rank at "work"; if `waits` is said, it waits for collective `at` of a communicator."""
    wait = Wait(operation=waits, group=group, number=at, ranks=ALL) if waits else None
    note = LastProgress(count=count, text="work", wait=wait, handed=handed)
    return Seen(rank=number, note=note, stopped=stopped, gone=gone)


def test_who_has_not_handed_over_what_another_waits_for_is_missing_and_to_blame() -> None:
    seen = [rank(0, handed=(1,), waits="sum"), rank(1, count=99), rank(2, handed=(1,), waits="sum")]
    assert missing(seen[0], seen) == (1,)
    assert blamed(seen).rank == 1
    assert waiting(seen, without=1) == "ranks 0 and 2 wait for sum where rank 1 is missing"
    assert (
        story(seen[2], seen) == "rank 2 was last seen: work, waits for sum where rank 1 is missing"
    )
    assert story(seen[1], seen) == "rank 1 was last seen: work"


def test_a_stopped_rank_is_to_blame_even_if_it_has_handed_over() -> None:
    seen = [rank(each, handed=(1,), waits="sum", stopped=each == 2) for each in ALL]
    assert blamed(seen).rank == 2
    assert account(seen[2], seen) == "stopped by a signal, "
    assert waiting(seen, without=2) == "ranks 0 and 1 wait for sum where rank 2 is missing"


def test_ranks_that_meet_with_different_operations_diverge() -> None:
    seen = [rank(0, handed=(3,), waits="norm", at=3), rank(1, handed=(3,), waits="sum", at=3)]
    why = "the ranks diverge: it waits for norm where rank 1 waits for sum, "
    assert account(blamed(seen), seen) == why


def test_ranks_that_wait_for_each_other_in_two_communicators_are_both_missing() -> None:
    """Rank 0 is in the first one, where 1 is missing; rank 1 in the second, where 0 is missing."""
    seen = [
        rank(0, handed=(1, 0), waits="one", group=0),
        rank(1, handed=(0, 1), waits="other", group=1),
    ]
    assert waiting(seen) == (
        "rank 0 waits for one where rank 1 is missing; "
        "rank 1 waits for other where rank 0 is missing"
    )


def test_a_line_names_a_few_ranks_and_a_few_operations() -> None:
    assert named([3]) == "rank 3"
    assert named(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"
    seen = [rank(each, handed=(9,), waits=f"sum{each}", at=9 - each) for each in range(5)]
    assert waiting(seen).endswith("; 2 other waits")


notes = st.builds(
    LastProgress,
    count=st.integers(0, 2**63),
    text=st.text(max_size=50),
    pid=st.integers(0, 2**31),
    wait=st.none()
    | st.builds(
        Wait,
        operation=st.text(max_size=50),
        group=st.integers(0, 200),
        number=st.integers(0, 2**31),
        ranks=st.lists(st.integers(0, 99)).map(tuple),
    ),
    handed=st.lists(st.integers(0, 2**31)).map(tuple),
)


@settings(max_examples=25)
@given(notes)
def test_a_note_is_told_as_it_is(note: LastProgress) -> None:
    assert LastProgress.from_json(note.to_json()) == note
