"""Schedules with the numbers of a binding: ranks of one program, blocks that fit, memory."""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL
from drawn_examples import examples
from exact_training import cluster
from hypothesis import given
from hypothesis import strategies as st
from routed_by_hand import WIDTH, Routed

from zsim.backend.backend import Job
from zsim.backend.document import Document, DocumentError, decode, encode
from zsim.memory.ledger import memory_ledger
from zsim.memory.peak import peak_bytes
from zsim.proof import check
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced, Binding, CountTrace, Ratio, Zipf
from zsim.schedule.operation import AllToAll
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_null import NullBackend


@st.composite
def plans(draw: st.DrawFn) -> Routed:
    ranks = draw(st.sampled_from((1, 2, 3, 4)))
    sent = draw(st.integers(1, 40))
    return Routed(
        ranks=ranks,
        data=draw(st.sampled_from((1, 2))),
        experts=ranks * draw(st.integers(1, 2)),
        sent=sent,
        maximum=sent * ranks,
        layers=draw(st.integers(1, 2)),
        micro_batches=draw(st.integers(1, 2)),
    )


@st.composite
def bindings(draw: st.DrawFn, plan: Routed) -> Binding:
    busiest = draw(st.floats(1, plan.ranks))
    found: tuple[Binding, ...] = (
        Balanced(),
        Ratio(busiest=busiest),
        Zipf(seed=3, busiest=busiest),
    )
    return draw(st.sampled_from(found))


def peak(schedule: Schedule) -> int:
    ledgers = [memory_ledger(program, 2) for program in schedule.programs]
    return max(peak_bytes(ledger, "device") for ledger in ledgers)


@given(st.data())
@examples(25)
def test_members_agree_on_every_block_and_no_peak_exceeds_that_at_the_maximum(
    data: st.DataObject,
) -> None:
    plan = data.draw(plans())
    named = plan.schedule()
    assert check(named) == ()
    found = bound(named, data.draw(bindings(plan)))
    assert found.excess is None
    assert check(found.schedule, compares=False) == ()
    assert {each.rows for program in found.schedule.programs for each in program.buffers} == {None}
    assert peak(found.schedule) <= peak(named) + WIDTH * 4 * 2 * plan.ranks


def test_equal_counts_leave_one_program_and_a_ratio_makes_two() -> None:
    named = Routed(ranks=4, data=2, experts=8, sent=32, maximum=128).schedule()
    assert len(bound(named, Balanced()).schedule.programs) == 1
    ratio = bound(named, Ratio(busiest=1.5)).schedule
    assert [role.size(named.mesh) for role in ratio.roles] == [2, 6]
    busy, other = (
        next(each for each in program.step if isinstance(each, AllToAll) and each.sent)
        for program in ratio.programs
    )
    assert busy.received == (48, 48, 48, 48)
    assert other.received == (28, 28, 28, 28)  # 20 / 3 rows, rounded up for all of the class
    assert busy.sent == other.sent == (48, 28, 28, 28)
    assert (busy.kept, other.kept) == (48, 28)
    assert len(bound(named, Zipf(seed=1, busiest=1.2)).schedule.programs) == 8


def test_padded_rows_have_equal_numbers_under_every_binding() -> None:
    named = Routed(ranks=4, experts=8, sent=32, maximum=32).schedule()
    padded = replace(named, counts=(replace(named.counts[0], padded=True),))
    even = bound(padded, Balanced()).schedule
    assert len(even.programs) == 1
    assert bound(padded, Ratio(busiest=2)).schedule == even
    assert bound(padded, Zipf(seed=1, busiest=2)).schedule == even


def test_rows_that_differ_between_micro_batches_have_buffers_of_their_own() -> None:
    named = Routed(ranks=2, experts=2, sent=4, maximum=8, layers=1).schedule()
    rows = (
        *((0, 0, 0, 0, 0, 4), (0, 0, 0, 1, 1, 4)),
        *((1, 0, 0, 0, 1, 4), (1, 0, 0, 1, 1, 4)),
    )
    first, second = bound(named, CountTrace(rows=rows)).schedule.programs
    sizes = [
        {each.name: each.elements for each in program.buffers if "recv" in each.name}
        for program in (first, second)
    ]
    assert sizes == [
        {"layer0/recv/mb0": 4 * WIDTH, "layer0/recv/mb1": 0},
        {"layer0/recv/mb0": 4 * WIDTH, "layer0/recv/mb1": 8 * WIDTH},
    ]


def job(named: Schedule, binding: Binding) -> Job:
    document = Document(
        schedule=named,
        model=NO_MODEL,
        cluster=cluster(named.mesh.size),
        steps=2,
        binding=binding,  # type: ignore[arg-type]  # the union of its kinds
    )
    assert decode(encode(document)) == document
    made = document.job()
    assert Document.of(made) == document
    assert made.written == named
    return made


@given(st.data())
@examples(15)
def test_a_folded_run_is_the_unfolded_one_and_books_agree_in_all_backends(
    data: st.DataObject,
) -> None:
    plan = data.draw(plans())
    made = job(plan.schedule(), data.draw(bindings(plan)))
    trace = SimBackend().run(made, seed=0)
    assert SimBackend(unfold=True).step_ends_ps(made) == trace.step_end_ps
    recorded = {each.rank: each for each in NullBackend().run(made, seed=0).ranks}
    for each in trace.ranks:
        assert each.book == recorded[each.rank].book
        assert each.transfers == recorded[each.rank].transfers


def test_an_exchange_takes_as_long_as_its_busiest_member() -> None:
    plan = Routed(ranks=4, experts=4, sent=4000, maximum=16000, layers=1, micro_batches=1)
    times = [
        SimBackend().step_ends_ps(job(plan.schedule(), Ratio(busiest=busiest)))[0]
        for busiest in (1.0, 2.0, 3.0)
    ]
    one, two, three = times
    assert two - one == pytest.approx(three - two, rel=0.01)
    # 4,000 more rows of 16 bytes at the busiest member: 3/4 come from others and go back to them,
    # and the copy that stands for experts reads and writes them
    more_bytes = 4000 * 16
    hardware = cluster(4)
    moved_s = 2 * 3 / 4 * more_bytes / hardware.switch_link.bytes_per_s
    copied_s = 2 * more_bytes / hardware.gpu.memory_bytes_per_s
    assert (two - one) / 1e12 == pytest.approx(moved_s + copied_s, rel=0.01)


def test_more_rows_than_declared_are_out_of_memory() -> None:
    named = Routed(ranks=4, experts=4, sent=32, maximum=64).schedule()
    fits = SimBackend().run(job(named, Ratio(busiest=2.0)), seed=0)
    assert fits.out_of_memory is None
    trace = SimBackend().run(job(named, Ratio(busiest=2.25)), seed=0)
    assert trace.out_of_memory is not None
    assert trace.out_of_memory.rank == 0
    assert trace.out_of_memory.operation == "step/layer0/recv/allocate"
    assert trace.out_of_memory.capacity_bytes == 64 * WIDTH * 4
    assert trace.out_of_memory.needed_bytes == 72 * WIDTH * 4


def test_a_binding_that_does_not_fit_is_one_line() -> None:
    named = Routed(ranks=2).schedule()
    whole = Document(schedule=named, model=NO_MODEL, cluster=cluster(2))
    with pytest.raises(DocumentError, match=r"^binding.busiest: 3 must be at most 2, the members"):
        replace(whole, binding=Ratio(busiest=3)).job()
    with pytest.raises(DocumentError, match="counts sum to 0, must be 12, the rows that a member"):
        replace(whole, binding=CountTrace(rows=())).job()
