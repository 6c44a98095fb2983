"""Data that goes from block to block without end is not proved by induction."""

from collections.abc import Sequence

import pytest

from zsim.dtype import DType
from zsim.proof.execution.data_flow import DataFlow, Iteration, longest_path
from zsim.proof.execution.repetition import IrregularError, NumberedNames
from zsim.schedule.operation import Allocate, Copy, Operation, View
from zsim.schedule.schedule import Buffer, Kind

NAMES = [f"{kind}{number}" for kind in ("a", "b") for number in range(9)] + ["one", "other"]
BUFFERS = {
    name: Buffer(
        name=name, pool="device", elements=2, dtype=DType.FP32, kind=Kind.WORKSPACE, home="compute"
    )
    for name in NAMES
}


def copy(source: str, target: str, *, size: int = 2, adds: bool = False) -> Copy:
    views = (View(buffer=each, size=size) for each in (source, target))
    one, other = views
    return Copy(
        id=f"{source}-{target}", stream="compute", source=one, target=other, accumulate=adds
    )


def reach(*operations: Operation) -> int:
    flows = list(Iteration("run", 4, operations, NumberedNames(NAMES, 9)).flows(BUFFERS))
    return longest_path(flows)


def test_copies_lead_as_far_as_their_numbers_are_apart() -> None:
    assert reach(copy("a4", "b6")) == 2
    assert reach(copy("a4", "one"), copy("one", "b3")) == 1


def test_a_way_back_to_the_same_number_is_no_way_on() -> None:
    assert reach(copy("a4", "b5"), copy("b5", "a4")) == 1


@pytest.mark.parametrize(
    "operations",
    [
        [copy("a4", "a5")],
        [copy("a4", "b5"), copy("b4", "a4")],
        [copy("one", "other"), copy("other", "one")],
        [copy("one", "b4"), copy("a4", "one")],
        [copy("a4", "one", size=1)],
        [copy("one", "one", adds=True)],
    ],
    ids=["block to block", "by two kinds", "swapped", "read first", "in part", "doubled"],
)
def test_data_that_goes_on_for_ever_is_refused(operations: Sequence[Operation]) -> None:
    with pytest.raises(IrregularError):
        reach(*operations)


def test_sums_over_all_blocks_and_what_is_made_anew_are_not_handed_on() -> None:
    assert reach(copy("a4", "one", adds=True), copy("b4", "one", adds=True)) == 0
    assert reach(Allocate(id="made", buffer="one"), copy("a4", "one", size=1)) == 0


def test_ways_in_a_circle_have_to_lead_back() -> None:
    right: list[DataFlow] = [("a", "b", 1), ("b", "c", 2), ("c", "a", -3), ("c", "d", 1)]
    assert longest_path(right) == 4
    with pytest.raises(IrregularError):
        longest_path([("a", "b", 1), ("b", "c", 2), ("c", "a", -2)])
