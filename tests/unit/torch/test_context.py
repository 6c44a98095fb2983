"""Ranks that share sequences train as one process does, each with its tokens of them."""

from dataclasses import replace

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import BOUND, distance
from trained_axes import (
    FSDP2_OF_TOKENS,
    FULL,
    MEGATRON,
    PLAIN,
    SMALL_GPT,
    SMALL_LLAMA,
    AxesCase,
    by_plain_loop,
    sharing,
    trained_on_axes,
    whole,
)

from zsim.model.architecture import Architecture, QKNorm
from zsim.proof import against_trace as refinement
from zsim_torch.backend import TorchBackend
from zsim_torch.module.context_place import ContextPlace
from zsim_torch.rank_result import merged

LLAMA = replace(SMALL_LLAMA, sequence_length=8)
GPT: Architecture = replace(SMALL_GPT, sequence_length=12, parallel_residual=True)


CASES = {
    2: {
        "stage 3": AxesCase(LLAMA, sharing(PLAIN, 2, 2, stage=3, bucket_elements=200), poison=True),
        "FSDP2, checkpoints": AxesCase(
            LLAMA, sharing(FSDP2_OF_TOKENS, 2, 2).but(FULL), witness=True
        ),
        "Megatron-LM": AxesCase(GPT, sharing(MEGATRON, 2, 2), witness=True),
        "stage 3, norms of all heads": AxesCase(
            replace(LLAMA, joined_qkv=False, qk_norm=QKNorm.WIDTH), sharing(PLAIN, 2, 2, stage=3)
        ),
    },
    4: {
        "stage 2, two groups": AxesCase(
            LLAMA, sharing(PLAIN, 4, 2, stage=2, bucket_elements=200), poison=True
        ),
        "stage 1, one group": AxesCase(
            replace(LLAMA, sequence_length=16), sharing(PLAIN, 4, 4, stage=1).but(FULL)
        ),
    },
}


@pytest.mark.matrix(18)
@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases]
)
def test_ranks_that_share_sequences_train_as_one_process(
    pool_of: SharedPools, ranks: int, name: str
) -> None:
    case = CASES[ranks][name]
    (results,) = trained_on_axes(pool_of(ranks), [case])
    bound = BOUND[case.strategy.train.precision]
    before, after, losses = by_plain_loop(case)
    assert results[0].losses == pytest.approx(losses, rel=10 * bound)
    assert distance(whole(case, results), after, before) <= bound
    if case.witness:
        trace = merged([result.trace for result in results])
        assert refinement.examine(case.job().schedule, trace) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_rank_has_as_many_tokens_and_sees_as_many_before_them(ranks: int) -> None:
    device, length = torch.device("cpu"), 2 * ranks * 3
    places = [ContextPlace(number, ranks).tokens(length, device) for number in range(ranks)]
    assert torch.equal(torch.cat(places), ContextPlace(0, ranks).all_tokens(length, device))
    assert sorted(torch.cat(places).tolist()) == list(range(length))
    assert len({int(each.sum()) for each in places}) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"context_exchange": "ring"},
            "parallel.context_exchange: ring is simulated only, say all_gather",
        ),
        (
            {"tensor": 2},
            "parallel.context: 2 has no torch module for 2 ranks of parallel.tensor",
        ),
        (
            {"pipeline": 2},
            "parallel.context: 2 has no torch module for 2 ranks of parallel.pipeline",
        ),
    ],
)
def test_what_no_module_does_is_refused_by_its_field(changes: dict[str, object], why: str) -> None:
    made = sharing(MEGATRON, 2, 2)
    case = AxesCase(GPT, made.but({"parallel": made.parallel.but(changes)}))
    assert TorchBackend().refusal(case.job()) == why
