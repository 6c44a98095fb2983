"""Experts on real ranks train as one process does that holds all of them.

Sums over the experts of a token, and over ranks, are in another order than those of one process.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resumed_axes import AxesPart, run_parts
from shared_ranks import SharedPools
from tiny_training import BOUND, distance
from torch import nn
from trained_axes import FULL, MEGATRON, MEGATRON_OF_TOKENS, OF_TOKENS, PLAIN
from trained_experts import (
    FEW,
    MIXTURES,
    ExpertCase,
    ExpertResult,
    PlainTraining,
    by_plain_mixtures,
    flips,
    mixing,
    over,
    trained_experts,
    whole_of,
)

import zsim
from zsim.backend.backend import RefusedError
from zsim.backend.document import Document, encode, encode_trace
from zsim.mistake import MistakeError
from zsim.model.architecture import Transformer
from zsim.model.experts import LoadBalancing
from zsim.schedule.bind import bound
from zsim.schedule.binding import CountTrace
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel
from zsim_des import SimBackend
from zsim_runtimes.deepspeed.options import DeepSpeed, ExpertLayer
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.backend import TorchBackend
from zsim_torch.rank_result import merged
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

TABLE = {"count": 4, "top_k": 2, "intermediate_size": 16}

FSDP2_PLAIN = PLAIN.but(
    {"zero.stage": 3, "zero.emulate": FSDP2(), "train.precision": Precision.FP32}
)
DEEPSPEED = PLAIN.but(
    {"zero.stage": 1, "zero.emulate": DeepSpeed(), "train.precision": Precision.FP32}
)
TWO_RANKS = {
    **{
        f"stage 1, {name}": ExpertCase(mixing(experts), over(2, 2, stage=1))
        for name, experts in MIXTURES.items()
    },
    "stage 0, recomputed, poisoned": ExpertCase(
        mixing(FEW), over(2, 2, stage=0).but(FULL), poison=True
    ),
    "stage 3, clipped": ExpertCase(
        mixing(FEW), over(2, 2, stage=3, bucket_elements=200).but({"train.clip_norm": 0.1})
    ),
    "Megatron-LM": ExpertCase(mixing(FEW), over(2, 2, MEGATRON)),
    "bf16": ExpertCase(
        mixing(FEW), over(2, 2, PLAIN.but({"train.precision": Precision.BF16}), stage=2)
    ),
}
FOUR_RANKS = {
    "two experts ranks of two, stage 2": ExpertCase(
        mixing(FEW), over(2, 4, stage=2).but({"train.clip_norm": 0.1}), poison=True
    ),
    "an expert on each, stage 3": ExpertCase(mixing(FEW), over(4, 4, stage=3)),
    "two experts on each, Megatron-LM": ExpertCase(
        mixing(MIXTURES["sigmoids in groups, shared experts"]), over(4, 4, MEGATRON)
    ),
}
AT_SOURCE = {
    "FSDP2, two expert ranks": ExpertCase(mixing(FEW), over(2, 2, FSDP2_PLAIN)),
    "FSDP2, a capacity, shared experts, two replicas": ExpertCase(
        mixing(
            replace(MIXTURES["a capacity by position"], shared_intermediate_size=5, z_loss=True)
        ),
        over(2, 4, FSDP2_PLAIN),
    ),
    "FSDP2, recomputed": ExpertCase(mixing(FEW), over(2, 2, FSDP2_PLAIN.but(FULL))),
    "FSDP2, biases, all experts on each rank": ExpertCase(
        mixing(MIXTURES["biases of sigmoids"]), over(1, 2, FSDP2_PLAIN)
    ),
    "DeepSpeed, two expert ranks, stage 1": ExpertCase(mixing(FEW), over(2, 2, DEEPSPEED)),
    "DeepSpeed's own layer, padded, two replicas, stage 2": ExpertCase(
        mixing(MIXTURES["a capacity with padding"]),
        over(2, 4, DEEPSPEED, stage=2, emulate=DeepSpeed(expert_layer=ExpertLayer.NATIVE)),
    ),
    "FSDP2, two expert ranks in each of two stages": ExpertCase(
        mixing(FEW, layers=4),
        over(
            2,
            2,
            FSDP2_PLAIN.but(
                {
                    "zero.emulate": FSDP2(reshard_after_forward=False),
                    "train.gradient_accumulation_steps": 4,
                }
            ),
            pipeline=2,
        ),
    ),
    "FSDP2, two tensor ranks": ExpertCase(mixing(FEW), over(2, 2, FSDP2_PLAIN, tensor=2)),
}
OTHER_AXES = {
    "two expert ranks in each of two stages": ExpertCase(
        mixing(MIXTURES["a capacity, biases of softmax"], layers=4),
        over(2, 2, MEGATRON.but({"train.gradient_accumulation_steps": 4}), pipeline=2),
    ),
    "a stage of a pipeline with all experts": ExpertCase(
        mixing(MIXTURES["a loss of all ranks and micro-batches"], layers=2),
        over(1, 1, MEGATRON, pipeline=2),
    ),
    "two tensor ranks with different experts": ExpertCase(
        mixing(MIXTURES["losses of each sequence and of logits"]), over(2, 1, OF_TOKENS, tensor=2)
    ),
    "four ranks with different experts, two share tokens": ExpertCase(
        mixing(
            replace(
                MIXTURES["sigmoids in groups, shared experts"],
                shared_intermediate_size=4,
                shared_gate=True,
            )
        ),
        over(4, 2, OF_TOKENS, tensor=2),
    ),
    "two tensor ranks in each of two replicas of experts": ExpertCase(
        mixing(MIXTURES["a loss of all ranks and micro-batches"]),
        over(2, 2, MEGATRON_OF_TOKENS, tensor=2),
    ),
    "tensor ranks with all experts": ExpertCase(
        mixing(replace(MIXTURES["biases of sigmoids"], shared_intermediate_size=4)),
        over(1, 2, OF_TOKENS, tensor=2),
    ),
}
ONE_RANK = {name: ExpertCase(mixing(experts), over(1, 1)) for name, experts in MIXTURES.items()}


def assert_as_one_process(pool: RankPool, case: ExpertCase) -> None:
    """Train a case on ranks, and compare it with a plain loop if the format is as wide."""
    results = trained_experts(pool, case)
    assert {result.losses for result in results} == {results[0].losses}
    bound = BOUND.get(case.strategy.train.precision)
    if bound is not None:
        assert_near(case, by_plain_mixtures(case), results, bound)


def assert_near(
    case: ExpertCase, plain: PlainTraining, results: list[ExpertResult], bound: float
) -> None:
    """Compare losses and the change of all parameters with those of one process."""
    assert results[0].losses == pytest.approx(plain.losses, rel=10 * bound)
    assert distance(whole_of(case, results), plain.after, plain.before) <= bound


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_expert_ranks_train_as_one_process(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(2), TWO_RANKS[name])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_with_experts_train_as_one_process(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(4), FOUR_RANKS[name])


ROUTED = {
    "two ranks, a loss of each sequence": replace(
        TWO_RANKS["stage 1, losses of each sequence and of logits"], steps=3
    ),
    "four ranks, a loss of all ranks": ExpertCase(
        mixing(MIXTURES["a loss of all ranks and micro-batches"]), over(4, 4, stage=3), steps=3
    ),
}
MARGIN = 2**-8
"""Largest difference of the scores of two experts that rounding to bf16 exchanges."""


def in_precision(name: str, precision: Precision) -> ExpertCase:
    """Return a case of routed tokens in another precision."""
    case = ROUTED[name]
    return replace(case, strategy=case.strategy.but({"train.precision": precision}))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ROUTED)
def test_with_the_routing_of_one_process_replayed_ranks_train_as_it_does(
    pool_of: SharedPools, name: str
) -> None:
    case = in_precision(name, Precision.FP32)
    assert isinstance(case.shape, Transformer)
    assert case.shape.experts is not None
    plain = by_plain_mixtures(case)
    pool = pool_of(case.strategy.ranks)
    results = trained_experts(pool, case, plain.choices(case.shape.experts))
    assert not [*flips(plain, results)]
    assert_near(case, plain, results, BOUND[Precision.FP32])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ROUTED)
def test_tokens_that_change_experts_in_bf16_have_close_scores(
    pool_of: SharedPools, name: str
) -> None:
    case = in_precision(name, Precision.BF16)
    plain = by_plain_mixtures(case)
    results = trained_experts(pool_of(case.strategy.ranks), case)
    found = [*flips(plain, results)]
    assert all(each.margin <= MARGIN for each in found), found
    assert results[0].losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.matrix(6)
def test_losses_of_routers_are_scaled_as_all_others_in_fp16(pool_of: SharedPools) -> None:
    case = in_precision("two ranks, a loss of each sequence", Precision.FP16)
    results = trained_experts(pool_of(2), case)
    plain = by_plain_mixtures(in_precision("two ranks, a loss of each sequence", Precision.FP32))
    assert results[0].losses == pytest.approx(plain.losses, rel=1e-4)
    assert distance(whole_of(case, results), plain.after, plain.before) <= 2**-5


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", AT_SOURCE)
def test_expert_ranks_train_whose_weights_stay_at_the_source(
    pool_of: SharedPools, name: str
) -> None:
    case = AT_SOURCE[name]
    assert_as_one_process(pool_of(case.strategy.ranks), case)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", OTHER_AXES)
def test_expert_ranks_train_with_other_axes(pool_of: SharedPools, name: str) -> None:
    case = OTHER_AXES[name]
    assert_as_one_process(pool_of(case.strategy.ranks), case)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ONE_RANK)
def test_a_rank_with_all_experts_trains_as_a_plain_loop(pool_of: SharedPools, name: str) -> None:
    assert_as_one_process(pool_of(1), replace(ONE_RANK[name], observe=False))


@pytest.mark.matrix(6)
def test_books_of_a_real_run_are_those_of_a_simulation_with_its_counts(
    pool_of: SharedPools, tmp_path: Path
) -> None:
    case = ExpertCase(mixing(FEW), over(2, 4, stage=2), steps=1)
    results = trained_experts(pool_of(4), case)
    rows = [row for result in results for row in result.trace.ranks[0].rows]
    job = case.job()
    (count,) = job.written.counts
    assert sum(row[-1] for row in rows) == 4 * 2 * 3 * count.sent  # ranks, micro-batches, layers
    numbers = CountTrace(rows=tuple((a, b, c, d, e, f) for _, a, b, c, d, e, f in rows))
    found = bound(job.written, numbers)
    simulated = SimBackend(unfold=True).run(replace(job, schedule=found.schedule), seed=0)
    books = {each.rank: each.book for each in simulated.ranks}
    for result in results:
        (rank,) = result.trace.ranks
        assert rank.rows
        changes = [each.change_bytes for each in rank.book]
        assert changes == [each.change_bytes for each in books[rank.rank]]
    document = Document(schedule=job.written, model=job.model, cluster=job.cluster, steps=1)
    schedule, trace = tmp_path / "schedule.json", tmp_path / "trace.json"
    schedule.write_text(encode(document), "utf-8")
    whole = merged([result.trace for result in results])
    trace.write_text(encode_trace(whole), "utf-8")
    assert zsim.check(schedule, against=trace).is_right
    (first, *others) = whole.ranks
    other = replace(first, rows=first.rows[1:])
    trace.write_text(encode_trace(replace(whole, ranks=(other, *others))), "utf-8")
    with pytest.raises(MistakeError, match="the rows that a member sends"):
        zsim.check(schedule, against=trace)
    later = replace(whole, steps=2, step_end_ps=(*whole.step_end_ps, whole.step_end_ps[0] + 1))
    trace.write_text(encode_trace(later), "utf-8")
    with pytest.raises(MistakeError, match="counts of rows differ in each step"):
        zsim.check(schedule, against=trace)


RESUMED = {
    "biases of scores, a loss of all ranks": ExpertCase(
        mixing(
            replace(
                MIXTURES["biases of sigmoids"], load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS
            )
        ),
        over(2, 2, stage=2),
    ),
    "FSDP2, shared experts": ExpertCase(
        mixing(replace(FEW, shared_intermediate_size=5)), over(2, 2, FSDP2_PLAIN)
    ),
}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", RESUMED)
def test_two_steps_and_two_more_from_a_checkpoint_are_four_bit_for_bit(
    pool_of: SharedPools, tmp_path: Path, name: str
) -> None:
    half = AxesPart(RESUMED[name], stop=2, saved=tmp_path / "saved")
    asked = [replace(half, stop=4, saved=None), half, half.then(4)]
    for complete, first, rest in pool_of(2).run(run_parts, asked):
        assert first.losses + rest.losses == complete.losses
        assert rest.evaluated == complete.evaluated
        assert complete.parameters.keys() == rest.parameters.keys()
        for key, value in complete.parameters.items():
            assert torch.equal(value, rest.parameters[key]), key


@pytest.mark.matrix(12)
def test_biases_move_with_a_checkpoint_to_more_expert_ranks(
    pool_of: SharedPools, tmp_path: Path
) -> None:
    two = AxesPart(RESUMED["biases of scores, a loss of all ranks"], stop=1, saved=tmp_path / "2")
    pool_of(2).run(run_parts, [two])
    case = replace(two.case, strategy=over(4, 4, stage=3))
    four = AxesPart(case, start=1, stop=1, loaded=two.saved, saved=tmp_path / "4")
    pool_of(4).run(run_parts, [four])
    again = AxesPart(two.case, start=1, stop=2, loaded=four.saved)
    results = pool_of(2).run(run_parts, [again, replace(two, stop=2, saved=None)])
    for moved, stayed in results:
        for key, value in moved.parameters.items():
            assert torch.equal(value, stayed.parameters[key]), key


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "fp16 with a loss of balance": (
        {"model.experts": TABLE, "train.precision": "fp16"},
        "model.experts.auxiliary_loss: true needs a loss that is not scaled, and train.precision "
        "is fp16; say bf16 or auxiliary_loss = false",
    ),
    "ranks with parts of an expert": (
        {
            "model.experts": TABLE,
            "parallel.tensor": 2,
            "parallel.expert": 2,
            "zero.sequence_parallel": True,
        },
        "parallel.expert_tensor: 2 is simulated only for a model with experts; say 1",
    ),
    "ranks that share a sequence": (
        {
            "model.experts": TABLE,
            "parallel.context": 2,
            "parallel.context_exchange": "all_gather",
        },
        "parallel.context: 2 is simulated only for a model with experts; say 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_without_a_module_of_experts_are_refused_in_one_line(name: str) -> None:
    changes, line = REFUSED[name]
    job = zsim.load("tiny_llama", changes).job
    assert TorchBackend().refusal(job) == line


@pytest.mark.matrix(6)
def test_a_rank_that_receives_more_rows_than_declared_ends_the_run(pool_of: SharedPools) -> None:
    case = ExpertCase(mixing(FEW), over(2, 2), most=1.0)
    with pytest.raises(RankFailedError, match=r"raise experts\.maximum"):
        trained_experts(pool_of(2), case)


class Mixed(nn.Module):
    """Experts in a list, one for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for each in self.experts:
            hidden = each(hidden)
        return hidden.square().mean()


def test_expert_ranks_need_stacked_experts_that_zsim_finds() -> None:
    strategy = PLAIN.but({"parallel": Parallel(data=2, expert=2)})
    batch = torch.ones(3, 4).double()
    with pytest.raises(RefusedError, match="2 needs a module with stacked experts"):
        Trainer(Mixed(), strategy, batch=batch)
    with pytest.raises(RefusedError, match="must be 1 for units of your own choice"):
        Trainer(
            Mixed(), strategy, units=["experts.0", "experts.1"], batch=torch.ones(3, 4).double()
        )
