"""Buffers of counted rows are used with the rows that they have; blocks of members agree."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from experts_by_hand import Plan
from experts_schedule import schedule_of
from faults.schedules import changed, edited, moved, without
from numbered_blocks import numbered
from routed_by_hand import Routed

from zsim.proof import check, prove
from zsim.schedule.bind import bound
from zsim.schedule.binding import Ratio
from zsim.schedule.operation import Action, AllToAll, Branch, Operation, View
from zsim.schedule.replace import replace as changed_struct
from zsim.schedule.schedule import Contract, Scalar, Schedule

HAND = Routed().schedule()
LAYER = "step/mb0/layer0"


def found(schedule: Schedule) -> dict[str, str]:
    """Return reasons of the findings of the family, by operation."""
    return {each.operation: each.why for each in check(schedule) if each.invariant == "counts"}


def families(schedule: Schedule) -> set[str]:
    return {each.invariant for each in check(schedule)}


def test_a_step_that_reads_its_counts_is_proved() -> None:
    assert check(HAND) == ()


def test_rows_allocated_before_the_host_has_read_their_count_are_found() -> None:
    schedule = moved(HAND, "step/layer0/recv/allocate", before=f"{LAYER}/read")
    assert found(schedule) == {
        "step/layer0/recv/allocate": "allocates received rows before the host has read routed of "
        "layer 0, micro-batch 0"
    }


@pytest.mark.parametrize("taken", ["then", "otherwise"])
def test_an_exchange_that_runs_only_if_a_number_is_positive_is_found(taken: str) -> None:
    names = [
        each.id
        for each in HAND.programs[0].step
        if isinstance(each, AllToAll)
        and "layer0" in each.id
        and HAND.programs[0].by_name[each.source.buffer].rows is not None
    ]

    def conditional(each: Operation) -> Iterable[Operation]:
        if each.id != names[0]:
            return (each,)
        then, otherwise = ((each,), ()) if taken == "then" else ((), (each,))
        return (Branch(id="if_any", scalar="any", then=then, otherwise=otherwise),)

    scalars = (*HAND.scalars, Scalar(name="any", initial=1.0))
    schedule = edited(replace(HAND, scalars=scalars), conditional)
    assert found(schedule)["if_any"] == (
        f"runs {names[0]} under a condition: ranks without rows must run it, too"
    )


def test_rows_that_are_sent_need_no_count() -> None:
    schedule = moved(HAND, "step/layer0/send/allocate", before=f"{LAYER}/read")
    assert found(schedule) == {}


@pytest.mark.parametrize("fields", [{"layer": 1}, {"micro_batch": 1}])
def test_a_count_of_another_layer_or_micro_batch_is_found(fields: dict[str, int]) -> None:
    schedule = changed(HAND, f"{LAYER}/read", **fields)
    assert "step/layer0/recv/allocate" in found(schedule)


def test_rows_of_no_micro_batch_are_found() -> None:
    schedule = changed(HAND, "step/layer0/send/allocate", micro_batch=None)
    assert (
        found(schedule)["step/layer0/send/allocate"]
        == "allocates rows of routed for no micro-batch"
    )


def test_an_exchange_of_rows_of_two_micro_batches_is_found() -> None:
    schedule = changed(HAND, "step/layer0/send/allocate", micro_batch=1)
    assert found(schedule) == {
        f"{LAYER}/dispatch": "uses rows of several micro-batches: layer0/send of micro-batch 1 and "
        "layer0/recv of micro-batch 0"
    }


def test_a_copy_to_rows_of_another_layer_is_found() -> None:
    target = View(buffer="layer1/out", size=96)
    schedule = changed(HAND, f"{LAYER}/experts", target=target)
    assert found(schedule)[f"{LAYER}/experts"] == (
        "copies rows of routed by own expert of layer 0 to rows of routed by own expert of layer 1"
    )


def read_too_early(schedule: Schedule) -> Schedule:
    """Read the counts after the exchange, before they are copied to the host."""
    return changed(schedule, f"{LAYER}/read", operation=f"{LAYER}/counts")


def copied_too_early(schedule: Schedule) -> Schedule:
    """Copy the counts to the host before the exchange is over."""
    return changed(schedule, f"{LAYER}/to_host", after=())


def sent_too_early(schedule: Schedule) -> Schedule:
    """Exchange rows before the permutation is over."""
    return changed(schedule, f"{LAYER}/dispatch", after=())


def computed_too_early(schedule: Schedule) -> Schedule:
    """Run experts before their rows have arrived; the free that waits for them comes late."""
    late = moved(schedule, "step/layer0/send/free", before=f"{LAYER}/wait")
    return changed(late, f"{LAYER}/experts", after=())


def reused_too_early(schedule: Schedule) -> Schedule:
    """Give up the rows to be sent while they are exchanged."""
    return changed(schedule, "step/layer0/send/free", uses=())


EARLY: dict[Callable[[Schedule], Schedule], str] = {
    read_too_early: "races",
    copied_too_early: "races",
    sent_too_early: "races",
    computed_too_early: "races",
    reused_too_early: "lifetime",
}


@pytest.mark.parametrize("edit", EARLY)
def test_what_happens_too_early_is_found(edit: Callable[[Schedule], Schedule]) -> None:
    assert EARLY[edit] in families(edit(HAND))


def apart(schedule: Schedule, *names: str) -> Schedule:
    """Return the schedule as bound, in which the second program lacks operations."""
    made = bound(schedule, Ratio(busiest=1.5)).schedule
    first, second = made.programs
    rest = without(replace(made, roles=made.roles, programs=(first, second)), *names).programs[1]
    return replace(made, programs=(first, rest))


@pytest.mark.parametrize("names", [("dispatch",), ("combine", "wait"), ("counts",)])
def test_a_rank_without_rows_that_skips_an_exchange_does_not_match(names: tuple[str, ...]) -> None:
    assert "matching" in families(apart(HAND, *(f"{LAYER}/{name}" for name in names)))


def test_blocks_of_numbers_agree_between_members() -> None:
    right = numbered(3, uneven=True)
    assert check(right, compares=False) == ()
    first, *others = right.programs
    steps = tuple(
        replace_blocks(each) if isinstance(each, AllToAll) else each for each in first.step
    )
    wrong = replace(right, programs=(replace(first, step=steps), *others))
    (why, *_) = found(wrong).values()
    assert why == "members send blocks of other sizes than members receive"


def replace_blocks(exchange: AllToAll) -> AllToAll:
    """Return the exchange with two blocks that it sends in the other order."""
    first, second, *rest = exchange.sent
    return changed_struct(exchange, sent=(second, first, *rest), kept=second)


def test_the_memory_of_a_proof_names_the_maximum_of_rows() -> None:
    contract = Contract(peak_bytes=(("all", "device", 2**20),))
    proof = prove(replace(HAND, contract=contract))
    assert proof.findings == ()
    assert (
        "memory 1.05 MB while no rank receives more than 24 rows of routed in a layer (2 x mean)"
        in proof.proved
    )
    tight = replace(HAND, contract=replace(contract, peak_bytes=(("all", "device", 600),)))
    assert "memory" in families(tight)


TRAINED = Plan(experts=4)


def trained(edit: Callable[[Schedule], Schedule]) -> dict[str, str]:
    """Return reasons of the family's findings for an edit of training with experts."""
    schedule = edit(schedule_of(TRAINED))
    found = check(schedule, TRAINED.model(), compares=False)
    return {each.operation: each.why for each in found if each.invariant == "counts"}


def test_counts_of_the_router_of_each_layer_are_proved() -> None:
    assert trained(lambda schedule: schedule) == {}


def test_counts_that_were_not_exchanged_are_found() -> None:
    def own(schedule: Schedule) -> Schedule:
        view = View(buffer="layer0/chosen", size=4)
        return changed(schedule, "step/mb0/layer0/to_host", source=view)

    assert trained(own) == {
        "step/mb0/layer0/read": "reads counts exchanged over no group, needed is ep, once"
    }


def test_counts_of_another_layer_are_found() -> None:
    def other(schedule: Schedule) -> Schedule:
        view = View(buffer="layer0/host", size=4)
        return changed(schedule, "step/mb0/layer1/read", source=view)

    assert trained(other)["step/mb0/layer1/read"] == (
        "reads counts that layer0 in step/mb0/layer0/0/forward made, layer 0 has those of layer0"
    )


def test_counts_of_another_micro_batch_are_found() -> None:
    def later(schedule: Schedule) -> Schedule:
        return changed(schedule, "step/mb0/layer0/0/forward", micro_batch=1)

    assert trained(later)["step/mb0/layer0/read"] == (
        "reads counts of micro-batch 1, which layer0 in step/mb0/layer0/0/forward made"
    )


def test_counts_of_a_router_that_chooses_again_are_found() -> None:
    def again(schedule: Schedule) -> Schedule:
        return changed(schedule, "step/mb0/layer0/0/forward", action=Action.RECOMPUTE)

    assert trained(again)["step/mb0/layer0/read"] == (
        "reads counts of a recompute: routing is saved, layer0 in step/mb0/layer0/0/forward "
        "chooses again"
    )


def test_counts_that_no_router_made_are_found() -> None:
    """The exchange is left out, or what it brings is divided."""
    left_out = {each: f"step/mb0/{each}/read" for each in ("layer0", "layer1")}

    def without_exchange(schedule: Schedule) -> Schedule:
        return without(schedule, *(f"step/mb0/{each}/counts" for each in left_out))

    assert trained(without_exchange) == dict.fromkeys(
        left_out.values(), "reads numbers that no router has made"
    )
    halved = trained(lambda schedule: changed(schedule, "step/mb0/layer0/to_host", divisor=2))
    assert halved == {left_out["layer0"]: "reads numbers that no router has made"}


def test_counts_that_nothing_wrote_are_found_without_a_model() -> None:
    (found, *_) = check(without(HAND, f"{LAYER}/counts"))
    assert (found.operation, found.invariant) == (f"{LAYER}/read", "values")
    assert found.why == "computes with layer0/host, of which nothing wrote a part"
