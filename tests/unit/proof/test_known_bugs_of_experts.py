"""Bugs of training with experts in public repositories, planted in schedules: each is found.

Each test names the repository and the number of the issue or pull request. The schedule without the
fault has no finding. What is not planted stands in docs/check.md with the reason.
"""

from dataclasses import replace
from functools import cache

import pytest
from aimed_expert_edits import broadcast, divisor
from expert_changes import (
    Edit,
    after,
    before,
    copied,
    doubled,
    dropped,
    fields,
    put,
    recomputes,
    zeroed,
)
from expert_edits_of_loads import both, load_again, moved_before, of
from experts_by_hand import Plan
from experts_schedule import schedule_of
from faults.schedules import changed, moved, split
from routed_by_hand import Routed

from zsim.model.experts import LoadScope
from zsim.proof import Finding, check
from zsim.schedule.operation import Operation, Reduction
from zsim.schedule.replace import replace as changed_struct
from zsim.schedule.schedule import Schedule

EP4 = Plan(ranks=4, experts=8, layers=1)
COPIES = Plan(data=2, layers=1)
TENSOR = Plan(
    tensor=2, auxiliary=LoadScope.SEQUENCE, bias=True, shared=True, clipped=True, layers=1
)
BATCH = Plan(auxiliary=LoadScope.BATCH, data=2, layers=1)
HALF = Plan(half=True, auxiliary=LoadScope.RANK, layers=1)
NORM = Plan(clipped=True, data=2, layers=1)
SHARED = Plan(shared=True, layers=1)
BIAS = Plan(bias=True, data=2, layers=1)
FOLDED = Plan(ranks=1, data=2, tensor=2, layers=1)
"""Expert ranks are 1, and experts are summed over other ranks than a dense group has."""
WHOLE = Plan(whole=True, layers=1)
HAND = Routed(layers=1, micro_batches=1).schedule()


@cache
def right(plan: Plan) -> Schedule:
    """Return the schedule of a plan, which has no finding."""
    schedule = schedule_of(plan)
    assert check(schedule, plan.model()) == ()
    return schedule


def planted(plan: Plan, edit: Edit) -> Finding:
    """Return the first finding of a schedule with a fault."""
    found, *_ = check(edit(right(plan)), plan.model())
    return found


def on_stream(name: str, reader: str) -> Edit:
    """Run an operation on a second stream, after all issued before; a reader waits for it."""

    def edit(schedule: Schedule) -> Schedule:
        schedule = replace(schedule, streams=(*schedule.streams, "side"))
        (program,) = schedule.programs
        ids = [each.id for each in program.step if hasattr(each, "stream")]
        for own in [each for each in ids if each.endswith(name)]:
            last = ids[ids.index(own) - 1]
            place = own.removesuffix(name)
            schedule = changed(schedule, own, stream="side", after=(last,))
            schedule = changed(schedule, f"{place}{reader}", after=(own,))
        return schedule

    return edit


def unordered(plan: Plan, name: str, reader: str) -> list[Finding]:
    """Return the findings if a reader does not wait for an operation on a second stream."""
    apart = on_stream(name, reader)(right(plan))
    assert check(apart, plan.model()) == ()
    return list(check(fields(reader, after=())(apart), plan.model()))


def one_rank(plan: Plan, edit: Edit, axis: str = "expert") -> list[Finding]:
    """Return the findings if the first ranks along an axis run an edited program."""
    schedule = right(plan)
    return list(check(split(schedule, edit(schedule), axis=axis), plan.model()))


def test_expert_gradients_multiplied_by_expert_ranks() -> None:
    """NVIDIA/Megatron-LM 5956, 5656: Megatron-FSDP leaves out the factor edp / dp."""
    assert planted(EP4, divisor("experts0", 1, 4)).operation == "step/experts0/update"


def test_expert_gradients_divided_by_their_own_mesh() -> None:
    """pytorch/pytorch 160285: FSDP2 averages over EDP, and the loss is divided by all ranks."""
    edit = both(fields("experts0/reduce", reduction=Reduction.AVERAGE), divisor("experts0", 1, 2))
    schedule = right(COPIES)
    assert check(edit(schedule), COPIES.model()) == ()  # divided once
    wrong = both(edit, divisor("experts0", 1, 2))
    assert planted(COPIES, wrong).operation == "step/experts0/update"


def test_gradients_divided_by_a_group_that_was_not_summed() -> None:
    """NVIDIA/Megatron-LM 7160: gradients of GTP are scaled by another group's size."""
    assert planted(TENSOR, divisor("experts0", 2)).invariant == "values"


def test_an_exchange_without_its_adjoint() -> None:
    """NVIDIA-NeMo/Automodel 1260: forward gathers over expert ranks, backward does not scatter."""
    assert planted(EP4, zeroed("/dispatch_back")).operation == "step/embed/update"


def test_an_auxiliary_loss_without_the_loss_scale() -> None:
    """NVIDIA-NeMo/Automodel 1412, 1408: the scale of the auxiliary loss is never set."""
    found = planted(HALF, fields("auxiliary0/seed", scalar=None))
    assert found.operation == "step/apply/embed/update"


@pytest.mark.parametrize(
    "edit", [load_again("sequence"), fields("auxiliary0/seed", value=2.0)], ids=["loads", "loss"]
)
def test_an_auxiliary_loss_scaled_by_tensor_ranks(edit: Edit) -> None:
    """NVIDIA/Megatron-LM 5047: the auxiliary loss counts tokens of tensor ranks twice."""
    assert planted(TENSOR, edit).invariant == "values"


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_global_auxiliary_loss_divided_twice_or_not_at_all(factor: float) -> None:
    """NVIDIA/Megatron-LM 3672, 3768, 3769: the global loss is divided by dp twice, or never."""
    assert planted(BATCH, fields("auxiliary0/seed", value=factor)).invariant == "values"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_loss_scaled_by_ranks_that_share_a_sequence(factor: float) -> None:
    """NVIDIA/Megatron-LM 673, 906: the factor of context ranks is lost or doubled."""
    assert planted(TENSOR, fields("loss/seed", value=factor)).invariant == "values"


def test_a_rank_without_tokens_that_skips_the_backward_of_experts() -> None:
    """PaddlePaddle/PaddleFormers 3010: its exchanges in backward are never issued."""
    skips = dropped("/combine_back", "/dispatch_back", "/probs_back")
    assert {each.invariant for each in one_rank(Plan(layers=1), skips)} >= {"matching"}


def test_ranks_that_reduce_only_experts_with_tokens() -> None:
    """deepspeedai/DeepSpeed 5066, 4966, 5008: ZeRO-3 follows the experts that a rank ran."""
    (found, *_) = one_rank(WHOLE, dropped("experts0/reduce"))
    assert found.invariant == "matching"


def test_a_rank_of_the_expert_group_that_runs_a_further_micro_batch() -> None:
    """NVIDIA/TensorRT-Model-Optimizer 1966: ranks have different numbers of steps."""
    found = one_rank(Plan(layers=1), doubled("mb1/layer0/dispatch"))
    assert {each.invariant for each in found} >= {"matching"}


@pytest.mark.parametrize(
    "issue", ["pytorch/torchtitan 3336", "ByteDance-Seed/VeOmni 979", "NVIDIA-NeMo/RL 1203"]
)
def test_routing_that_recomputation_chooses_again(issue: str) -> None:
    """Checkpointing runs the router again, and splits differ between forward and backward."""
    plan = Plan(layers=1, shared=issue.startswith("NVIDIA"), bias=issue.startswith("pytorch"))
    found = planted(plan, lambda schedule: recomputes(schedule, 0, "/1/backward"))
    assert found.why.endswith("routing is saved, never recomputed")


def test_a_summand_that_each_rank_adds_before_the_sum() -> None:
    """pytorch/torchtitan 4245: a bias of experts is added once on each tensor rank."""
    edit = after(
        "shared0/0/forward",
        more=lambda each: copied(
            each, of("layer0/shared", 6), of("layer0/shared", 6), accumulate=True
        ),
    )
    assert planted(TENSOR, edit).operation == "step/mb0/layer0/3/forward"


def test_gradients_below_experts_that_lose_their_sum_over_tensor_ranks() -> None:
    """pytorch/torchtitan 4054: a partial placement is not reduced before its use."""
    assert planted(TENSOR, fields("embed/reduce", group="dense")).operation == "step/embed/update"


def test_a_bias_of_experts_that_moves_before_the_last_micro_batch() -> None:
    """pytorch/torchtitan 3686: the bias is updated at another time than the optimizer step."""
    early = moved_before("step/bias0/update", "step/mb1/layer0/0/forward")
    assert planted(BIAS, early).invariant == "values"


def test_a_shared_expert_on_a_side_stream_without_a_fence_in_backward() -> None:
    """NVIDIA-NeMo/Automodel 3109: nothing waits for its gradients."""
    found = unordered(SHARED, "shared0/0/backward", "common0/add")
    assert "races" in {each.invariant for each in found}


def test_sums_of_rows_that_are_read_while_they_arrive() -> None:
    """deepseek-ai/DeepEP 589, 600: the output of combine is read before its event."""
    found = unordered(Plan(layers=1), "layer0/combine", "layer0/3/forward")
    assert "races" in {each.invariant for each in found}


def test_rows_that_are_overwritten_while_they_are_sent() -> None:
    """deepseek-ai/DeepEP 513: a buffer is used again while the dispatch before is in flight."""
    assert check(HAND) == ()
    early = changed(HAND, "step/layer0/send/free", uses=())
    assert {each.invariant for each in check(early)} == {"lifetime"}
    late = moved(HAND, "step/layer0/send/free", before="step/mb0/layer0/wait")
    write = before(
        "layer0/experts",
        more=lambda each: changed_struct(
            next(own for own in HAND.programs[0].step if own.id.endswith("permute")),
            id=f"{each.id}/next",
        ),
    )
    assert "races" in {each.invariant for each in check(write(late))}


def test_a_norm_that_counts_experts_once_for_each_copy() -> None:
    """deepspeedai/DeepSpeed 8469, 8475, 8476, 8478: the dense group sums squares of experts."""
    assert planted(NORM, fields("norm/experts/reduce", group="all")).invariant == "values"


def test_a_norm_of_the_experts_of_one_rank() -> None:
    """NVIDIA/Megatron-LM 5916: squares of experts are not summed over expert ranks."""
    assert planted(NORM, dropped("norm/experts/reduce")).invariant == "values"


def test_a_norm_without_the_experts_of_other_ranks() -> None:
    """hpcaitech/ColossalAI 2192: squares are summed over the copies of experts."""
    assert planted(NORM, fields("norm/experts/reduce", group="edp")).invariant == "values"


def test_experts_that_are_not_reduced_over_their_copies() -> None:
    """facebookresearch/fairseq 4220: copies of experts drift apart."""
    assert planted(COPIES, dropped("experts0/reduce")).operation == "step/experts0/update"


def test_experts_that_are_summed_over_ranks_with_other_experts() -> None:
    """NVIDIA/Megatron-LM 2833, 2772: FSDP shards experts over a group with expert peers."""
    assert planted(COPIES, fields("experts0/reduce", group="all")).invariant == "values"


def test_experts_of_the_first_rank_on_all_ranks() -> None:
    """huggingface/transformers 45662: a broadcast at load overwrites the rank's experts."""
    edit = broadcast("experts0", "experts0/initialize", 0)
    assert planted(Plan(layers=1), edit).invariant == "values"


def test_a_group_size_that_is_the_number_of_the_rank() -> None:
    """flagos-ai/Megatron-LM-FL 149: gradients of experts are divided by the number of a rank."""
    found = one_rank(COPIES, divisor("experts0", 3))
    assert {each.invariant for each in found} == {"values"}


def test_experts_summed_over_the_dense_group_although_expert_ranks_are_one() -> None:
    """NVIDIA/Megatron-LM 1628: with folding, the groups of experts differ from dense ones."""
    assert planted(FOLDED, fields("experts0/reduce", group="dense")).invariant == "values"


def test_gradients_that_double_in_each_micro_batch() -> None:
    """NVIDIA/Megatron-LM 6660: with one copy the buffer is added to itself."""
    view = of("experts0/sum", 9)

    def more(each: Operation) -> Operation:
        return copied(each, view, view, accumulate=True)

    assert planted(Plan(layers=1), after("experts0/add", more=more)).invariant == "values"


def test_modules_that_divide_by_different_numbers_of_tokens() -> None:
    """NVIDIA-NeMo/Megatron-Bridge 5555: a flag of the loss differs between two modules."""
    found = planted(SHARED, divisor("common0", 4))
    assert found.operation == "step/common0/update"


def test_rows_and_their_weights_exchanged_in_another_order_on_one_rank() -> None:
    found = one_rank(
        Plan(layers=1),
        moved_before("step/mb0/layer0/dispatch_probs", "step/mb0/layer0/dispatch"),
    )
    assert {each.invariant for each in found} >= {"matching"}


def test_reductions_of_experts_and_others_in_another_order_on_one_rank() -> None:
    """No issue: ranks hang if their groups overlap."""
    other = moved_before("step/experts0/reduce", "step/embed/reduce")
    found = one_rank(COPIES, other, "data")
    assert {each.invariant for each in found} & {"progress", "order across communicators"}
    assert one_rank(COPIES, other) == []  # no member of a group differs


@pytest.mark.parametrize(
    ("name", "reader"),
    [("shared0/0/forward", "layer0/3/forward"), ("experts0/reduce", "experts0/update")],
)
def test_outputs_of_a_second_stream_that_are_read_too_early(name: str, reader: str) -> None:
    """NVIDIA-NeMo/Automodel 3109, deepseek-ai/DeepEP 589: the same class, at other places."""
    plan = SHARED if name.startswith("shared") else COPIES
    assert "races" in {each.invariant for each in unordered(plan, name, reader)}


def test_every_operation_is_named_that_is_changed() -> None:
    with pytest.raises(AssertionError):
        put(right(Plan(layers=1)), lambda name: name == "no such", lambda each: (each,))
