"""Values of training with experts: judged as an oracle on real rows judges it."""

from dataclasses import replace

import pytest
from aimed_expert_edits import EDITS as AIMED
from drawn_expert_edits import drawn
from expert_changes import Edit, fields, recomputes
from expert_edits import EDITS
from expert_edits_of_loads import EDITS as OF_LOADS
from expert_edits_of_loads import counted
from experts_by_hand import Plan
from experts_schedule import schedule_of
from real_rows import trains_plainly

from zsim.model.experts import DropRule, Drops, LoadScope
from zsim.model.model import Model
from zsim.proof import check, prove, values
from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import Allocate, Branch, ReadCounts, View
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Schedule, ScheduleError


def in_order(buffer: str) -> Edit:
    """Let received rows be ordered by expert, then by source."""

    def edit(schedule: Schedule) -> Schedule:
        (program,) = schedule.programs
        order = (RowIndex.EXPERT, RowIndex.SOURCE)
        buffers = tuple(
            changed(each, rows=changed(each.rows, order=order)) if each.name == buffer else each
            for each in program.buffers
        )
        return replace(schedule, programs=(replace(program, buffers=buffers),))

    return edit


WEIGHT, POSITION = Drops(capacity=2), Drops(capacity=2, by=DropRule.POSITION)
RIGHT = (
    Plan(),
    Plan(whole=True),
    Plan(ranks=1, data=2),
    Plan(ranks=4, data=2, experts=8),
    Plan(ranks=3, experts=6, layers=1, micro_batches=1),
    Plan(ranks=2, data=2, whole=True, layers=1),
    Plan(drops=WEIGHT, auxiliary=LoadScope.RANK, bias=True),
    Plan(drops=POSITION, padded=True, bias=True),
    Plan(tensor=2, auxiliary=LoadScope.SEQUENCE, bias=True, shared=True, clipped=True),
    Plan(data=2, auxiliary=LoadScope.MICRO_BATCH, recomputed=True, shared=True, layers=1),
    Plan(auxiliary=LoadScope.BATCH, micro_batches=3, layers=1),
    Plan(whole=True, auxiliary=LoadScope.BATCH, bias=True),
    Plan(ranks=4, experts=8, data=2, drops=WEIGHT, bias=True, clipped=True, recomputed=True),
    Plan(half=True, clipped=True, bias=True, auxiliary=LoadScope.BATCH, layers=1),
    Plan(stages=2, bias=True, shared=True, clipped=True, auxiliary=LoadScope.RANK),
    Plan(stages=2, half=True, micro_batches=1, data=2),
)
HARMLESS = {
    "expert gradients: not reduced where EDP is 1",
    "expert gradients: average of a mean over EP",
    "router gradient: over EP, then EDP",
    "combine twice",
    "probabilities before rows",
    "experts computed again",
    "experts computed twice",
    "ZeRO-3: over EP, then EDP",
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("plan", RIGHT, ids=lambda plan: str(RIGHT.index(plan)))
def test_experts_on_any_ranks_train_as_all_experts_in_one_process_do(plan: Plan) -> None:
    schedule = schedule_of(plan)
    assert trains_plainly(plan, schedule)
    assert check(schedule, plan.model()) == ()


def test_rows_padded_to_a_capacity_need_no_counts_and_have_the_values_of_others() -> None:
    plan = Plan(padded=True)
    schedule = schedule_of(plan)
    assert not any(isinstance(each, ReadCounts) for each in schedule.programs[0].step)
    assert check(schedule, plan.model()) == ()
    bare = replace(schedule, counts=(replace(schedule.counts[0], padded=False),))
    assert {each.invariant for each in check(bare, plan.model())} == {"counts"}


def test_more_ranks_than_are_run_are_represented() -> None:
    plan = Plan(ranks=2, data=12, layers=1, micro_batches=1)
    proof = prove(schedule_of(plan), plan.model())
    assert proof.findings == ()
    assert any("24 ranks by 6 classes" in each for each in proof.proved)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_if_real_rows_train_otherwise(name: str) -> None:
    plan, edit = EDITS[name]
    schedule = edit(plan)(schedule_of(plan))
    right = trains_plainly(plan, schedule)
    assert right is (name in HARMLESS)
    assert (check(schedule, plan.model()) == ()) is right


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", OF_LOADS)
def test_an_edit_of_loads_drops_or_stages_is_found_if_real_rows_train_otherwise(name: str) -> None:
    plan, edit = OF_LOADS[name]
    schedule = edit(schedule_of(plan))
    right = trains_plainly(plan, schedule)
    assert right is name.endswith("harmless")
    assert (check(schedule, plan.model()) == ()) is right


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", AIMED)
def test_no_wrong_edit_that_is_aimed_at_experts_passes(name: str) -> None:
    plan, edit = AIMED[name]
    schedule = edit(schedule_of(plan))
    assert not trains_plainly(plan, schedule)
    assert check(schedule, plan.model())


@pytest.mark.matrix(8)
@pytest.mark.parametrize("seed", range(64))
def test_a_drawn_edit_is_found_if_real_rows_train_otherwise(seed: int) -> None:
    edit = drawn(seed, schedule_of)
    if edit is None:
        return
    plan, schedule, words = edit
    if not check(schedule, plan.model()):
        assert trains_plainly(plan, schedule), words


def test_there_are_edits_of_each_fault_that_is_known() -> None:
    wrong = [name for name in OF_LOADS if not name.endswith("harmless")]
    assert len(EDITS) - len(HARMLESS) + len(wrong) >= 90
    assert len(AIMED) >= 60


def test_routing_that_is_recomputed_is_refused_although_its_values_are_equal() -> None:
    plan = Plan(layers=1)
    schedule = recomputes(schedule_of(plan), 0, "/1/backward")
    assert trains_plainly(plan, schedule)
    found = [each for each in check(schedule, plan.model()) if each.invariant == "counts"]
    assert [each.operation for each in found] == [
        f"step/mb{batch}/layer0/0/recompute" for batch in range(2)
    ]
    assert found[0].why == "recomputes the routing of layer0: routing is saved, never recomputed"
    assert {each.invariant for each in check(schedule)} >= {"counts"}


def test_counts_of_rows_that_are_dropped_later_are_found() -> None:
    plan, edit = OF_LOADS["counts of chosen rows are sent"]
    (found, *_) = check(edit(schedule_of(plan)), plan.model())
    assert found.why == (
        "reads numbers that layer0 in step/mb0/layer0/0/forward made, which are not the rows that "
        "it sends"
    )


def without_counts(plan: Plan) -> tuple[Schedule, Model]:
    """Return a schedule in which all rows stay, without counts, and its model."""
    schedule, model = schedule_of(plan), plan.model()
    (program,) = schedule.programs
    step = (
        changed(each, micro_batch=None) if isinstance(each, Allocate) else each
        for each in program.step
    )
    buffers = (changed(each, rows=None) for each in program.buffers)
    plain = replace(program, buffers=tuple(buffers), step=tuple(step))
    units = (
        replace(unit, segments=tuple(replace(each, experts=None) for each in unit.segments))
        for unit in model.units
    )
    return replace(schedule, counts=(), programs=(plain,)), replace(model, units=tuple(units))


@pytest.mark.parametrize(
    ("scope", "bias", "alike"),
    [
        (LoadScope.MICRO_BATCH, False, True),
        (LoadScope.BATCH, False, False),
        (LoadScope.RANK, True, True),
    ],
)
def test_losses_over_the_batch_are_not_proved_from_two_micro_batches(
    monkeypatch: pytest.MonkeyPatch, scope: LoadScope, *, bias: bool, alike: bool
) -> None:
    """Megatron-LM's global auxiliary loss: every micro-batch adds the loads of those before it.

    A bias reads the sum of all loads after the last of them, as an update reads gradients.
    """
    asked: list[Schedule] = []
    monkeypatch.setattr(values, "with_fewer", lambda schedule, _: asked.append(schedule))
    plan = Plan(whole=True, auxiliary=scope, bias=bias, layers=1, micro_batches=6)
    schedule, model = without_counts(plan)
    assert check(schedule, model) == ()
    assert bool(asked) is alike


def test_a_loss_that_forgets_early_micro_batches_is_found() -> None:
    plan = Plan(whole=True, auxiliary=LoadScope.BATCH, layers=1, micro_batches=6)
    schedule, model = without_counts(plan)
    late = fields("mb5/layer0/so_far", accumulate=False)(schedule)
    (found, *_) = check(late, model)
    assert found.operation == "step/mb5/auxiliary0/0/forward"


def test_more_rules_of_dropping_than_are_followed_are_refused() -> None:
    plan = Plan(layers=1)
    schedule = schedule_of(plan)
    (count,) = schedule.counts
    counts = [
        replace(count, name=f"other{capacity}", drops=Drops(capacity=capacity))
        for capacity in range(1, 6)
    ]
    (found,) = check(replace(schedule, counts=(count, *counts)), plan.model())
    assert found.why == "not followed: 5 rules that drop rows, at most 4 are followed"


def test_a_bias_of_experts_is_not_judged_without_a_model() -> None:
    proof = prove(schedule_of(Plan(bias=True, layers=1)))
    assert proof.findings == ()
    assert "values: no model is given, and bias0 follows the load of experts" in proof.not_shown


def test_the_verdict_lists_how_rows_are_routed_and_what_is_not_shown() -> None:
    plan = Plan(drops=WEIGHT, auxiliary=LoadScope.BATCH, bias=True, layers=1)
    proof = prove(schedule_of(plan), plan.model())
    (words,) = (each for each in proof.proved if each.startswith("values"))
    assert (
        "any numbers of rows, routing saved, rows beyond 2 by probs dropped, auxiliary loss of "
        "the batch so far, biases of experts by the load of the step" in words
    )
    assert (
        "rows of experts: the order of those of one source for one expert, and zeros in the "
        "gradient of an expert without rows" in proof.not_shown
    )
    unjudged = prove(schedule_of(plan))
    assert not any(each.startswith("rows of experts") for each in unjudged.not_shown)


UNWRITABLE: dict[str, tuple[Edit, str]] = {
    "rows of some experts are sent": (
        fields("layer0/dispatch", source=View(buffer="layer0/rows", start=4, size=4)),
        "a view of layer0/rows must have all its counted rows",
    ),
    "rows are not sorted by source": (
        in_order("layer0/recv"),
        "layer0/recv cannot be cut by member",
    ),
    "rows are exchanged over another group": (
        fields("layer0/dispatch", group="edp"),
        "group edp, but routed is of ep",
    ),
    "rows arrive in the buffer of another layer": (
        fields("layer0/dispatch", target=View(buffer="layer1/recv", size=96)),
        "blocks are routed of layer 0, 4 wide and routed of layer 1",
    ),
    "a capacity of none": (counted(drops=Drops(capacity=0)), "drops: capacity 0 must be at least"),
    "padding to another number": (
        counted(padded=True, maximum=12, drops=Drops(capacity=3)),
        "padded: sent 12 must be the capacity, 3 for each of 6 experts",
    ),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_edit_that_places_could_not_tell_apart_cannot_be_written(name: str) -> None:
    edit, why = UNWRITABLE[name]
    with pytest.raises(ScheduleError, match=why):
        edit(schedule_of(Plan()))


def test_an_update_only_if_an_expert_has_rows_is_refused() -> None:
    """No token chooses the last expert of layer 1 in the oracle."""
    plan = Plan()
    (program,) = schedule_of(plan).programs
    update, free = (
        program.by_id[f"step/{name}"] for name in ("experts1/update", "layer1/chosen/free1")
    )
    view = View(buffer="layer1/chosen", start=plan.experts - 1, size=1)
    only = Branch(id="step/only", value=view, then=(update,), otherwise=())
    step = [
        own
        for each in program.step
        if each is not free
        for own in ((only, free) if each is update else (each,))
    ]
    wrong = replace(schedule_of(plan), programs=(replace(program, step=tuple(step)),))
    assert not trains_plainly(plan, wrong)
    assert any(each.operation == "step/only" for each in check(wrong, plan.model()))


def test_a_segment_that_may_mix_rows_of_several_ranks_is_refused() -> None:
    plan = Plan()
    model = plan.model()
    mixing = tuple(
        replace(
            unit,
            segments=tuple(replace(segment, experts=None) for segment in unit.segments),
        )
        for unit in model.units
    )
    (found,) = check(schedule_of(plan), replace(model, units=mixing))
    assert found.operation == "step/mb0/layer0/2/forward"
    assert found.why == "runs on layer0/recv, rows of several sources, which it may mix"


def test_a_model_with_other_experts_is_refused() -> None:
    plan = Plan()
    model = plan.model()
    fewer = tuple(
        replace(
            unit,
            segments=tuple(
                replace(segment, experts=segment.experts and 2) for segment in unit.segments
            ),
        )
        for unit in model.units
    )
    (found,) = check(schedule_of(plan), replace(model, units=fewer))
    assert found.why == "has 6 experts of routed, the model has 2"
