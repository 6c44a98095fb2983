"""An all-to-all of equal blocks: right steps are proved, wrong ones are found."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from exchanged_blocks import exchanged
from faults.schedules import changed, moved, split, without

from zsim.network.volume import ring_equivalent_bytes
from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import AllToAll, Copy, View
from zsim.schedule.schedule import Schedule, ScheduleError, WireBytes

EXCHANGE, SHARD = "step/layer1/exchange", 2


Edit = Callable[[Schedule], Schedule]


def families(schedule: Schedule) -> set[str]:
    return {finding.invariant for finding in check(schedule)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_blocks_that_are_exchanged_and_summed_train_as_plain_training_does(ranks: int) -> None:
    assert check(exchanged(ranks)) == ()


def unwaited(schedule: Schedule) -> Schedule:
    """Issue the exchange without waiting for the gradient."""
    return changed(schedule, EXCHANGE, after=())


def freed_early(schedule: Schedule) -> Schedule:
    """Free the source without waiting for the exchange."""
    return changed(schedule, "step/layer1/staging/free", uses=())


def left_out(schedule: Schedule) -> Schedule:
    """Sum received memory that nothing has written."""
    return without(schedule, EXCHANGE)


def one_block_twice(schedule: Schedule) -> Schedule:
    """Add the block of member 0 twice, and the one of member 1 never."""
    return changed(schedule, "step/layer1/add1", source=View(buffer="layer1/came", size=SHARD))


def one_block_fewer(schedule: Schedule) -> Schedule:
    return without(schedule, "step/layer1/add2")


def sent_twice(schedule: Schedule) -> Schedule:
    """Exchange the received blocks back, so that a rank has its own blocks again."""
    program = schedule.programs[0]
    again = AllToAll(
        id="step/layer1/back",
        stream="communication",
        group="data",
        source=View(buffer="layer1/came", size=4 * SHARD),
        target=View(buffer="layer1/staging", size=4 * SHARD),
        wire=program.by_name["layer1/came"].dtype,
    )
    back = Copy(
        id="step/layer1/copy", stream="communication", source=again.target, target=again.source
    )
    step = list(program.step)
    place = next(index for index, each in enumerate(step) if each.id == EXCHANGE)
    step[place + 1 : place + 1] = [again, back]
    made = replace(schedule, programs=(replace(program, step=tuple(step)),))
    return changed(made, "step/layer1/staging/free", uses=(back.id,))


def summed_before(schedule: Schedule) -> Schedule:
    """Exchange after the first block was summed."""
    return moved(schedule, EXCHANGE, before="step/layer1/add1")


WRONG: dict[Edit, str] = {
    unwaited: "races",
    freed_early: "lifetime",
    left_out: "values",
    one_block_twice: "values",
    one_block_fewer: "values",
    sent_twice: "values",
    summed_before: "lifetime",
}


@pytest.mark.parametrize(
    ("edit", "family"), WRONG.items(), ids=lambda each: str(getattr(each, "__name__", each))
)
def test_a_wrong_exchange_is_found(edit: Edit, family: str) -> None:
    assert family in families(edit(exchanged()))


def test_a_rank_that_leaves_out_an_exchange_does_not_match_the_others() -> None:
    whole = exchanged()
    assert "matching" in families(split(whole, without(whole, EXCHANGE)))


def test_a_rank_that_exchanges_smaller_blocks_does_not_match_the_others() -> None:
    whole = exchanged()
    program = whole.programs[0]
    half = AllToAll(
        id="step/half",
        stream="communication",
        group="data",
        source=View(buffer="layer1/staging", size=4),
        target=View(buffer="layer1/came", size=4),
        wire=program.by_name["layer1/came"].dtype,
    )
    other = changed(whole, EXCHANGE, source=half.source, target=half.target)
    assert "matching" in families(split(whole, other))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_volume_is_what_a_rank_sends_to_the_others(ranks: int) -> None:
    schedule = exchanged(ranks)
    shard = -(-6 // ranks)
    sent = 3 * (ranks - 1) * shard * 4
    kept = WireBytes(group="data", collective="all_to_all", bytes=sent)
    gathered = WireBytes(group="data", collective="all_gather", bytes=2 * sent)
    for size, found in ((sent, False), (sent + 1, True)):
        lines = (replace(kept, bytes=size), gathered)
        contract = replace(schedule.contract, wire_bytes=lines)
        assert ("volume" in families(replace(schedule, contract=contract))) is found


def made(source: int, target: int) -> Schedule:
    build = ScheduleBuilder.of("one", data=4)
    data = build.group("data", "data")
    x, y = build.buffer("x", source, persistent=True), build.buffer("y", target, persistent=True)
    build.setup.allocate(x, y)
    build.step.all_to_all("it", data, x.all, y.all)
    return build.schedule()


def test_sizes_that_are_no_equal_blocks_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^step/it: 6 elements are not 4 blocks$"):
        made(6, 6)
    with pytest.raises(ScheduleError, match=r"^step/it: y has 4 elements, not 8$"):
        made(8, 4)


def test_a_rank_sends_all_blocks_but_its_own() -> None:
    (operation,) = (each for each in made(8, 8).programs[0].step if isinstance(each, AllToAll))
    assert [ring_equivalent_bytes(operation, ranks) for ranks in (1, 2, 4)] == [0, 16, 24]
    assert operation.words == "all_to_all of 8 fp32"
    assert operation.addressed(3) == (0, 1, 2)


def test_an_exchange_into_its_own_source_is_found() -> None:
    build = ScheduleBuilder.of("in place", data=4)
    data = build.group("data", "data")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    build.step.all_to_all("it", data, x.all, x.all)
    assert check(build.schedule())


def test_cuts_of_one_block_are_cuts_of_all() -> None:
    """Parts of a received block end where parts of another rank's block do."""
    build = ScheduleBuilder.of("parts", data=2)
    data = build.group("data", "data")
    x, y = build.buffer("x", 6, persistent=True), build.buffer("y", 6, persistent=True)
    build.setup.allocate(x, y)
    for place, (low, high) in enumerate(pairwise((0, 1, 3, 5, 6))):
        build.setup.fill(f"x{place}", x[low:high], place)
    build.step.all_to_all("it", data, x.all, y.all)
    assert check(build.schedule()) == ()
