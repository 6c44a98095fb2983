from faults.schedules import moved, split
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, check, progress
from zsim.proof.context import Context
from zsim.proof.execution.rank_class import rank_classes
from zsim.runtimes.registry import make_schedule as zero
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import AllReduce, ReduceScatter, View
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train


def orders(schedule: Schedule) -> list[Finding]:
    return [each for each in check(schedule) if each.invariant == "order across communicators"]


def roles(*sequences: tuple[str, ...]) -> list[Finding]:
    """One rank each issues all-reduces on the groups of a sequence, every group on a stream."""
    build = ScheduleBuilder.of("orders", data=len(sequences))
    names = sorted({group for sequence in sequences for group in sequence})
    for number, group in enumerate(names):
        build.group(group, "data")
        build.stream(f"stream{number}")
    for place, sequence in enumerate(sequences):
        role = build.role(f"rank{place}", Span(axis="data", start=place, end=place + 1))
        for group in names:
            x = role.buffer(f"x/{group}", 4, persistent=True)
            role.setup.allocate(x)
            role.setup.fill(f"fill/{group}", x.all, 0.0)
        for number, group in enumerate(sequence):
            whole = View(buffer=f"x/{group}", size=4)
            stream = f"stream{names.index(group)}"
            role.step.all_reduce(f"{number}/{group}", group, whole, stream=stream)
    return orders(build.schedule())


def test_one_order_on_all_ranks_is_fine() -> None:
    assert roles(("a", "b", "a"), ("a", "b", "a")) == []


def test_two_communicators_in_opposite_orders_are_found_though_no_stream_waits() -> None:
    """NVIDIA/nccl 195, 574: each rank has started the one that the other one has not."""
    (found,) = roles(("a", "b"), ("b", "a"))
    assert found.role == "rank0 and rank1"
    first = "the host issues that first, on another communicator"
    assert f"rank0: step/1/b waits for step/0/a: {first}" in found.witness
    assert f"rank1: step/1/a waits for step/0/b: {first}" in found.witness


def test_a_cycle_over_three_ranks_is_found() -> None:
    assert roles(("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c")) == []
    (found,) = roles(("a", "b", "c"), ("b", "c", "a"), ("a", "b", "c"))
    assert "rank1" in found.role


def test_a_rank_that_reduces_over_the_world_before_the_others_do_is_found() -> None:
    """ROCm/rccl 2191: two kinds of parallelism, each with a communicator of its own."""
    shape = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
    model = gpt(shape, micro_batch_size=1)
    made = zero(
        model,
        Strategy(
            parallel=Parallel(data=4),
            zero=Zero(stage=2, bucket_elements=1),
            train=Train(clip_norm=1.0),
        ),
    )
    scatters = [each.id for each in made.programs[0].step if isinstance(each, ReduceScatter)]
    early = moved(made, "step/update/norm/reduce", before=scatters[-1])
    assert orders(split(made, made)) == []
    found = [each for each in check(split(made, early)) if each.why.startswith("deadlock")]
    (deadlock,) = found
    assert deadlock.role == "first and rest"
    assert orders(split(made, early)) == []  # the same cause, told once


def pipeline(*sequences: tuple[str, ...]) -> Schedule:
    """Ranks in a row hand on (`send`, `receive`) on one stream and sum (`sum`) on another one."""
    build = ScheduleBuilder.of("row", data=len(sequences))
    build.group("row", "data")
    build.group("all", "data")
    build.stream("along")
    build.stream("over")
    for place, sequence in enumerate(sequences):
        role = build.role(f"rank{place}", Span(axis="data", start=place, end=place + 1))
        views = {}
        for name in ("send", "receive", "sum"):
            x = role.buffer(name, 4, persistent=True)
            views[name] = x.all
            role.setup.allocate(x)
            role.setup.fill(f"fill/{name}", x.all, 0.0)
        for number, each in enumerate(sequence):
            if each == "send":
                role.step.send(f"{number}/send", "row", views[each], offset=1, stream="along")
            elif each == "receive":
                role.step.receive(
                    f"{number}/receive", "row", views[each], offset=-1, stream="along"
                )
            else:
                role.step.all_reduce(f"{number}/sum", "all", views[each], stream="over")
    return build.schedule()


def test_a_send_after_a_sum_that_its_receiver_issues_behind_the_receive_is_found() -> None:
    """Both are started on one rank each, and hold the GPU that the other one needs."""
    assert orders(pipeline(("send", "sum"), ("receive", "sum"))) == []
    (found,) = orders(pipeline(("send", "sum"), ("sum", "receive")))
    assert found.role == "rank0 and rank1"


def test_sends_count_over_three_ranks_of_a_row() -> None:
    right = (("sum", "send"), ("sum", "receive", "send"), ("sum", "receive"))
    assert orders(pipeline(*right)) == []
    late = (("sum", "send"), ("sum", "receive", "send"), ("receive", "sum"))
    (found,) = orders(pipeline(*late))
    assert "rank2" in found.role


def test_groups_of_ranks_that_share_no_second_one_may_come_in_any_order() -> None:
    shape = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
    model = gpt(shape, micro_batch_size=1, tensor=2)
    made = zero(
        model, Strategy(parallel=Parallel(data=2, tensor=2), zero=Zero(stage=2, bucket_elements=1))
    )
    (program,) = made.programs
    scatter = next(each for each in program.step if isinstance(each, ReduceScatter))
    place = program.step.index(scatter)
    over_tensor = next(
        each
        for each in reversed(program.step[:place])
        if isinstance(each, AllReduce) and each.group == "tensor"
    )
    late = moved(made, over_tensor.id, before=program.step[place + 1].id)
    assert orders(split(made, late)) == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["send", "receive", "sum"]), max_size=4).map(tuple),
        min_size=2,
        max_size=3,
    )
)
def test_communications_alone_have_a_cycle_where_all_operations_have_one(
    sequences: list[tuple[str, ...]],
) -> None:
    """Proofs may look at those alone: any order of ranks in a row, right or wrong."""
    context = Context.of(pipeline(*sequences), None)
    among = rank_classes(context.schedule, frozenset({"data"}))
    alone = progress.RankWaits(context, among, set(), of=progress.CommunicationWalker)
    every = progress.RankWaits(context, among, set(), in_order=True)
    assert any(alone.graph.cycles()) == any(every.cycles())
