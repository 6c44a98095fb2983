"""Values of training with experts: judged as an oracle on real rows judges it."""

from dataclasses import replace

import pytest
from expert_edits import EDITS
from experts_by_hand import Plan
from experts_schedule import schedule_of
from real_rows import trains_plainly

from zsim.proof import check, prove
from zsim.schedule.operation import ReadCounts

RIGHT = (
    Plan(),
    Plan(whole=True),
    Plan(ranks=1, data=2),
    Plan(ranks=4, data=2, experts=8),
    Plan(ranks=3, experts=6, layers=1, micro_batches=1),
    Plan(ranks=2, data=2, whole=True, layers=1),
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


@pytest.mark.parametrize("plan", RIGHT, ids=str)
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


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_if_real_rows_train_otherwise(name: str) -> None:
    plan, edit = EDITS[name]
    schedule = edit(plan)(schedule_of(plan))
    right = trains_plainly(plan, schedule)
    assert right is (name in HARMLESS)
    assert (check(schedule, plan.model()) == ()) is right


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
    assert found.why == "has 4 experts of routed, the model has 2"
