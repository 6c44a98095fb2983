from mutation import split, without

from zsim.architecture import GPT
from zsim.builder import RoleBuilder, ScheduleBuilder
from zsim.check import Finding, check
from zsim.gpt import gpt
from zsim.mesh import Span
from zsim.operation import Reduction
from zsim.schedule import Schedule
from zsim.strategy import Precision, Strategy
from zsim.zero import schedule

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)


def uniformity(made: Schedule) -> list[Finding]:
    return [each for each in check(made) if each.invariant == "uniformity"]


def fp16() -> Schedule:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.FP16, tensor=2)
    return schedule(model, Strategy(stage=2, data=4, tensor=2, precision=Precision.FP16))


def test_a_flag_that_every_rank_has_reduced_is_fine() -> None:
    assert uniformity(fp16()) == []


def test_a_flag_that_is_not_reduced_is_found_where_it_is_decided_on() -> None:
    """DS 8415: each rank skips by what it sees itself."""
    (found,) = uniformity(without(fp16(), "step/update/overflow/reduce"))
    assert found.operation == "step/update/branch"
    assert found.why == "decides on overflow, which may differ from rank to rank"
    assert found.witness[-2].startswith("step/update/overflow/measure writes it, on each rank")


def decides(*groups: str, received: bool = False) -> list[Finding]:
    """A flag that is reduced over groups of a mesh of 2 x 2, one after the other."""
    build = ScheduleBuilder.of("decides", data=2, tensor=2)
    for group in ("data", "tensor"):
        build.group(group, group)
    build.group("world", "data", "tensor")
    x, flag = build.buffer("x", 4, persistent=True), build.buffer("flag", 1, persistent=True)
    build.setup.allocate(x, flag)
    build.setup.fill("x", x.all, 0.0)
    build.setup.fill("flag", flag.all, 0.0)
    step = build.step
    after: list[str] = []
    if received:
        step.send("send", "data", x[:1], 1, stream="compute")
        step.receive("receive", "data", flag.all, -1, stream="compute")
        step.together("both", 2)
    for group in groups:
        after = [
            step.all_reduce(
                f"reduce/{group}", group, flag.all, reduction=Reduction.MAX, stream="compute"
            )
        ]
    yes, no = step.side("yes"), step.side("no")
    yes.all_reduce("inside", "world", x.all, stream="compute")
    step.branch("branch", flag.all, yes, no, after=after)
    return uniformity(build.schedule())


def test_a_constant_is_the_same_everywhere() -> None:
    assert decides() == []


def test_what_is_received_is_not() -> None:
    assert len(decides(received=True)) == 1
    assert decides("world", received=True) == []


def test_groups_one_after_the_other_must_span_all_ranks() -> None:
    assert decides("data", "tensor", received=True) == []
    (found,) = decides("tensor", received=True)
    assert found.witness[1] == "step/reduce/tensor makes it equal, but not along data"


def test_roles_that_share_a_group_decide_on_the_same_collective() -> None:
    def write(role: RoleBuilder, *, swapped: bool) -> None:
        one, other = role.buffer("one", 1), role.buffer("other", 1)
        role.step.allocate(one, other)
        for flag in (one, other):
            filled = role.step.fill(f"{flag.name}/fill", flag.all, 0.0)
            reduced = role.step.all_reduce(f"{flag.name}/reduce", "data", flag.all, after=[filled])
        chosen = other if swapped else one
        yes, no = role.step.side("yes"), role.step.side("no")
        yes.all_reduce("inside", "data", one.all)
        role.step.branch("branch", chosen.all, yes, no, after=[reduced])
        role.step.host_wait("wait", reduced)
        role.step.free(one, uses=["step/yes/inside"])
        role.step.free(other)

    def two(*, swapped: bool) -> list[Finding]:
        build = ScheduleBuilder.of("two", data=2)
        build.group("data", "data")
        for place, name in enumerate(("first", "second")):
            role = build.role(name, Span(axis="data", start=place, end=place + 1))
            write(role, swapped=swapped and place == 1)
        return uniformity(build.schedule())

    assert two(swapped=False) == []
    (found,) = two(swapped=True)
    assert found.role == "first and second"
    assert found.witness == (
        "first: step/branch decides on the outcome of operation 0 on data",
        "second: step/branch decides on the outcome of operation 1 on data",
    )


def test_host_scalars_change_alike_on_all_roles() -> None:
    made = fp16()
    assert uniformity(split(made, made)) == []
    (found,) = uniformity(split(made, without(made, "step/skip/loss_scale")))
    assert found.why == "the roles change host scalars differently"
    assert found.role == "first and rest"
