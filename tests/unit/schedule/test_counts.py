"""Named counts in a schedule: one line for each that does not fit, and JSON without loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from experts_by_hand import Plan
from experts_schedule import schedule_of
from routed_by_hand import Routed

from zsim.dtype import DType
from zsim.model.experts import DropRule, Drops
from zsim.model.model import Model
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.counts import NamedCount, RowIndex
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import Allocate, AllToAll, Operation, ReadCounts, View
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Buffer, Schedule, ScheduleError

HAND = Routed().schedule()
COUNT = HAND.counts[0]


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ScheduleError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_count(**fields: Any) -> Schedule:  # noqa: ANN401  # any field
    return replace(HAND, counts=(replace(COUNT, **fields),))


def with_buffer(name: str, change: Callable[[Buffer], Buffer]) -> Schedule:
    (program,) = HAND.programs
    buffers = tuple(change(each) if each.name == name else each for each in program.buffers)
    return replace(HAND, programs=(replace(program, buffers=buffers),))


def with_operation(kind: type[Operation], change: Callable[[Operation], Operation]) -> Schedule:
    """Change the first operation of a kind that moves counted rows, or reads counts."""
    (program,) = HAND.programs
    step = list(program.step)
    place = next(
        index
        for index, each in enumerate(step)
        if isinstance(each, kind) and not each.id.endswith("counts")
    )
    step[place] = change(step[place])
    return replace(HAND, programs=(replace(program, step=tuple(step)),))


def test_a_schedule_with_counts_is_read_as_it_was_written() -> None:
    assert decode_value(encode_value(HAND, Schedule), Schedule) == HAND


def test_drops_and_biases_of_experts_are_read_as_they_were_written() -> None:
    plan = Plan(drops=Drops(capacity=2, by=DropRule.POSITION), bias=True, layers=1)
    schedule = schedule_of(plan)
    written = encode_value(schedule, Schedule)
    assert isinstance(written, dict)
    assert written["counts"][0]["drops"] == {"capacity": 2, "by": "position"}
    assert decode_value(written, Schedule) == schedule
    model = plan.model()
    assert decode_value(encode_value(model, Model), Model) == model


def test_a_capacity_below_one_or_other_than_its_padding_is_refused() -> None:
    none = Drops(capacity=0)
    assert refusal(lambda: with_count(drops=none)) == (
        "count routed: drops: capacity 0 must be at least 1"
    )
    assert refusal(
        lambda: with_count(drops=Drops(capacity=2), padded=True, maximum=COUNT.sent)
    ) == ("count routed: padded: sent 12 must be the capacity, 2 for each of 4 experts")


def test_a_schedule_without_counts_is_written_as_before() -> None:
    build = ScheduleBuilder.of("one", data=2)
    data = build.group("data", "data")
    x, y = build.buffer("x", 4), build.buffer("y", 4)
    build.step.allocate(x, y)
    build.step.all_to_all("it", data, x.all, y.all)
    build.step.free(x, y)
    written = encode_value(build.schedule(), Schedule)
    assert isinstance(written, dict)
    assert "counts" not in written
    (program,) = written["programs"]
    assert program["step"][0] == {"type": "Allocate", "id": "step/x/allocate", "buffer": "x"}
    assert list(program["step"][2]) == [
        *("type", "id", "stream", "group", "source", "target", "wire")
    ]
    assert "rows" not in program["buffers"][0]


def test_experts_that_members_cannot_share_are_refused() -> None:
    assert refusal(lambda: with_count(experts=3)) == (
        "count routed: experts 3 must be a multiple of the 2 members of group ep"
    )


def test_a_maximum_below_the_mean_is_refused() -> None:
    assert refusal(lambda: with_count(maximum=11)) == (
        "count routed: maximum 11 must be at least the mean, 12 rows that each member sends"
    )


def test_a_count_of_an_unknown_group_or_with_fewer_rows_than_none_is_refused() -> None:
    assert refusal(lambda: with_count(group="tp")) == "count routed: no group 'tp'"
    assert refusal(lambda: with_count(sent=-1)) == "count routed: sent -1 must be at least 0"


def test_padded_rows_are_as_many_for_each_expert() -> None:
    assert refusal(lambda: with_count(padded=True)) == (
        "count routed: padded: sent 12 must be a multiple of experts 4, and maximum the same"
    )


def test_a_buffer_of_an_unknown_count_is_refused() -> None:
    assert refusal(lambda: with_count(name="other")) == (
        "all/buffer layer0/send: no count 'routed'; counts are other"
    )


def test_a_buffer_with_other_elements_than_the_maximum_is_refused() -> None:
    assert (
        refusal(lambda: with_buffer("layer0/recv", lambda each: changed(each, elements=95)))
        == "all/buffer layer0/recv: 95 elements, its rows have 96 at most"
    )


def test_rows_by_one_index_twice_are_refused() -> None:
    def twice(buffer: Buffer) -> Buffer:
        assert buffer.rows is not None
        return changed(buffer, rows=changed(buffer.rows, order=(RowIndex.EXPERT,) * 2))

    assert refusal(lambda: with_buffer("layer0/recv", twice)) == (
        "all/buffer layer0/recv: rows: order must name source and expert, once each"
    )


def test_a_persistent_buffer_has_no_counted_rows() -> None:
    (program,) = HAND.programs
    kept = replace(program, persistent=("layer0/send",))
    assert refusal(lambda: replace(HAND, programs=(kept,))) == (
        "all/persistent: rows of layer0/send are counted, for each micro-batch"
    )


def exchange(**fields: object) -> Callable[[], Schedule]:
    return lambda: with_operation(AllToAll, lambda each: changed(each, **fields))


def test_an_exchange_of_blocks_with_two_names_is_refused() -> None:
    other = View(buffer="layer1/recv", size=96)
    assert refusal(exchange(target=other)) == (
        "step/mb0/layer0/dispatch: blocks are routed of layer 0, 4 wide and routed of layer 1, "
        "4 wide"
    )


def test_an_exchange_of_rows_that_are_sent_on_both_sides_is_refused() -> None:
    back = View(buffer="layer0/back", size=48)
    assert refusal(exchange(target=back)) == (
        "step/mb0/layer0/dispatch: both buffers hold rows by own source; exchange needs one"
    )


def test_an_exchange_of_rows_that_are_sorted_by_expert_is_refused() -> None:
    def sorted_by_expert(buffer: Buffer) -> Buffer:
        assert buffer.rows is not None
        return changed(buffer, rows=changed(buffer.rows, order=(RowIndex.EXPERT, RowIndex.SOURCE)))

    assert refusal(lambda: with_buffer("layer0/recv", sorted_by_expert)) == (
        "step/mb0/layer0/dispatch: layer0/recv cannot be cut by member: its outer index is expert, "
        "which the rank has alone"
    )


def test_an_exchange_with_a_buffer_without_counts_is_refused() -> None:
    plain = View(buffer="layer0/asked", size=4)
    assert refusal(exchange(target=plain)) == (
        "step/mb0/layer0/dispatch: exchanges counted rows with layer0/asked, which has none"
    )


def test_a_part_of_counted_rows_is_no_view() -> None:
    part = View(buffer="layer0/recv", size=48)
    assert refusal(exchange(target=part)) == (
        "step/mb0/layer0/dispatch: a view of layer0/recv must have all its counted rows"
    )


def test_only_an_exchange_moves_counted_rows_between_ranks() -> None:
    build = ScheduleBuilder.of("sum", expert=2)
    group = build.group("ep", "expert")
    count = build.count("routed", group, experts=2, sent=4, maximum=8)
    x = build.counted("x", count, RowIndex.SOURCE)
    build.step.allocate(x, micro_batch=0)
    build.step.all_reduce("sum", group, x.all)
    assert refusal(build.schedule) == ("step/sum: rows of x are counted; only AllToAll moves them")


def test_the_host_reads_a_number_for_each_source_and_own_expert() -> None:
    part = View(buffer="layer0/host", size=3)
    assert refusal(lambda: with_operation(ReadCounts, lambda each: changed(each, source=part))) == (
        "step/mb0/layer0/read: reads 3 elements, 2 sources with 2 experts need 4"
    )
    assert refusal(lambda: with_operation(ReadCounts, lambda each: changed(each, count="x"))) == (
        "step/mb0/layer0/read: no count 'x'; counts are routed"
    )


def uneven(sent: tuple[int, ...], received: tuple[int, ...], kept: int) -> Schedule:
    build = ScheduleBuilder.of("one", data=2)
    group = build.group("data", "data")
    x, y = build.buffer("x", 5, persistent=True), build.buffer("y", 6, persistent=True)
    build.setup.allocate(x, y)
    operation = AllToAll(
        id="step/it",
        stream="communication",
        group=group,
        source=x.all,
        target=y.all,
        wire=DType.FP32,
        sent=sent,
        received=received,
        kept=kept,
    )
    build.step.add(operation)
    return build.schedule()


def test_unequal_blocks_fill_their_views() -> None:
    uneven((2, 3), (2, 4), 2)
    assert refusal(lambda: uneven((2, 2), (2, 4), 2)) == (
        "step/it: sent has blocks of 4, x has 5 elements"
    )
    assert refusal(lambda: uneven((2, 3), (6,), 2)) == (
        "step/it: received has 1 blocks for 2 members"
    )
    assert refusal(lambda: uneven((2, 3), (2, 4), 5)) == (
        "step/it: kept 5 is no block that it sends and receives"
    )


def test_an_allocation_names_its_micro_batch() -> None:
    (program,) = HAND.programs
    found = [
        each.micro_batch
        for each in program.step
        if isinstance(each, Allocate) and each.buffer == "layer1/recv"
    ]
    assert found == [0, 1]


def test_a_count_is_a_value() -> None:
    assert NamedCount(name="routed", group="ep", experts=4, sent=12, maximum=24) == COUNT
