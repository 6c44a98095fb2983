from dataclasses import replace

from faults.schedules import hand, without

from zsim.proof import Finding, check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Schedule, WireBytes

# A layer is 8 elements with padding, a shard 2, on 4 ranks in fp32: a gather or a reduce-scatter
# sends 3 shards x 2 elements x 4 bytes = 24 bytes. Three layers are gathered twice, reduced once.
GATHERED, REDUCED = 6 * 24, 3 * 24


def promising(schedule: Schedule, *lines: WireBytes) -> list[Finding]:
    contract = replace(schedule.contract, wire_bytes=lines)
    found = check(replace(schedule, contract=contract))
    return [each for each in found if each.invariant == "volume"]


def line(collective: str, size: int, *, group: str = "data", scalar: bool = False) -> WireBytes:
    return WireBytes(group=group, collective=collective, bytes=size, scalar=scalar)


BOTH = (line("all_gather", GATHERED), line("reduce_scatter", REDUCED))


def test_a_kept_promise_is_no_finding() -> None:
    assert promising(hand(), *BOTH) == []


def test_nothing_promised_is_nothing_examined() -> None:
    assert check(hand()) == ()


def test_a_gather_too_few_is_found_to_the_byte() -> None:
    (found,) = promising(without(hand(), "step/layer1/gather_again"), *BOTH)
    assert found.operation == "data/all_gather"
    assert found.why == "a step sends 120 bytes by all_gather, promised are 144"
    assert found.witness[0] == "step/layer0/gather: 24 bytes"
    assert found.witness[-1] == "5 operations in all"


def test_a_byte_too_many_in_the_promise_is_found() -> None:
    (found,) = promising(hand(), line("all_gather", GATHERED + 1), BOTH[1])
    assert found.operation == "data/all_gather"


def test_what_is_not_promised_and_what_is_not_sent_are_both_found() -> None:
    found = promising(hand(), BOTH[0], line("all_reduce", 8))
    assert [each.operation for each in found] == ["data/all_reduce", "data/reduce_scatter"]
    assert found[0].witness[0] == "nothing sends"


def number_reduced(*, in_then: bool) -> ScheduleBuilder:
    """One number is reduced in one list of a branch, a tensor in the other."""
    build = ScheduleBuilder.of("scalars", data=4)
    build.group("data", "data")
    number, x = build.buffer("number", 1, persistent=True), build.buffer("x", 4, persistent=True)
    build.setup.allocate(number, x)
    build.setup.fill("number", number.all, 0.0)
    build.setup.fill("x", x.all, 0.0)
    then, otherwise = build.step.side("then"), build.step.side("otherwise")
    small, large = (then, otherwise) if in_then else (otherwise, then)
    small.all_reduce("number", "data", number.all)
    large.all_reduce("x", "data", x.all)
    build.step.branch("branch", number.all, then, otherwise, after=[])
    return build


def test_scalars_are_apart_and_the_list_without_overflow_counts() -> None:
    # An all-reduce on 4 ranks: 2 x 3 chunks of ceil(n / 4) = 1 element of 4 bytes, n = 1 or 4.
    tensor, scalar = line("all_reduce", 24), line("all_reduce", 24, scalar=True)
    assert promising(number_reduced(in_then=True).schedule(), tensor) == []
    assert promising(number_reduced(in_then=False).schedule(), scalar) == []
    assert len(promising(number_reduced(in_then=False).schedule(), tensor)) == 2


def test_the_members_of_a_together_count() -> None:
    build = ScheduleBuilder.of("ring", data=4)
    build.group("data", "data")
    x, y = build.buffer("x", 4, persistent=True), build.buffer("y", 4, persistent=True)
    build.setup.allocate(x, y)
    build.setup.fill("x", x.all, 0.0)
    build.step.send("send", "data", x.all, 1)
    build.step.receive("receive", "data", y.all, -1)
    build.step.together("both", 2)
    assert promising(build.schedule(), line("send", 16)) == []


def test_one_rank_sends_nothing() -> None:
    build = ScheduleBuilder.of("one", data=1)
    build.group("data", "data")
    x = build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    build.step.all_reduce("reduce", "data", x.all)
    assert promising(build.schedule()) == []
