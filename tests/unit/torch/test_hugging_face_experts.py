"""`Trainer` trains mixtures of transformers on expert ranks as a plain loop does."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_training
from hugging_face_mixtures import (
    MixtureCase,
    MixtureResult,
    PlainResult,
    by_plain_loop,
    by_trainer,
    flips,
)
from shared_ranks import SharedPools
from tiny_training import distance

from zsim.strategy.precision import Precision
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

BOUND = 1e-5
"""Norms and losses of transformers are in fp32."""

MARGIN = 2**-8
"""Largest difference of the scores of two experts that rounding to bf16 exchanges."""

CASES = {
    "mixtral, 2 expert ranks, stage 1": MixtureCase("mixtral", 2, 2),
    "mixtral, 4 expert ranks, stage 3": MixtureCase("mixtral", 4, 4, stage=3),
    "mixtral, 2 expert ranks, recomputed": MixtureCase("mixtral", 2, 2, stage=0, full=True),
    "qwen3_moe, 2 expert ranks, stage 3": MixtureCase("qwen3_moe", 2, 2, stage=3),
    "qwen3_moe, 2 of 4 ranks, stage 2": MixtureCase("qwen3_moe", 2, 4, stage=2),
    "deepseek_v3, 2 expert ranks, stage 2": MixtureCase("deepseek_v3", 2, 2, stage=2),
    "deepseek_v3, 4 expert ranks, stage 1": MixtureCase("deepseek_v3", 4, 4),
    "mixtral, all experts on each rank": MixtureCase("mixtral", 1, 2),
}


def assert_as_plain(plain: PlainResult, results: list[MixtureResult]) -> None:
    """Compare losses and the parameters of the module of each rank, which are whole."""
    for result in results:
        assert result.losses == pytest.approx(plain.losses, rel=BOUND)
        assert distance(result.parameters, plain.after, plain.before) <= BOUND
        assert result.proved
        assert result.simulated_s > 0


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", CASES)
def test_mixtures_train_on_ranks_as_in_one_process(pool_of: SharedPools, name: str) -> None:
    case = CASES[name]
    results = [*pool_of(case.data).run(by_trainer, case)]
    assert_as_plain(by_plain_loop(case.name, case.data, case.stop), results)


RUNTIMES = {
    "FSDP2": MixtureCase("qwen3_moe", 2, 4, stage=3, emulate=FSDP2()),
    "DeepSpeed": MixtureCase("mixtral", 2, 2, emulate=DeepSpeed()),
    "Megatron-LM": MixtureCase("deepseek_v3", 2, 2, emulate=Megatron()),
}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", RUNTIMES)
def test_mixtures_train_on_expert_ranks_of_runtimes(pool_of: SharedPools, name: str) -> None:
    precision = Precision.FP32
    case = replace(RUNTIMES[name], precision=precision)
    plain = by_plain_loop(case.name, case.data, case.stop, precision)
    bound = tiny_training.BOUND[precision]
    for result in pool_of(case.data).run(by_trainer, case):
        assert distance(result.parameters, plain.after, plain.before) <= bound
        assert result.proved


@pytest.mark.matrix(12)
def test_a_mixture_on_meta_gets_the_experts_of_each_rank(pool_of: SharedPools) -> None:
    precision = Precision.FP32
    case = MixtureCase("qwen3_moe", 2, 2, stage=3, precision=precision, meta=True)
    plain = by_plain_loop(case.name, case.data, case.stop, precision)
    for result in pool_of(2).run(by_trainer, case):
        assert (
            distance(result.parameters, plain.after, plain.before) <= tiny_training.BOUND[precision]
        )


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_with_the_routing_of_one_process_replayed_ranks_train_as_it_does(
    pool_of: SharedPools, name: str
) -> None:
    plain = by_plain_loop(name, 2, 2)
    results = [*pool_of(2).run(by_trainer, MixtureCase(name, 2, 2), plain.routed)]
    assert_as_plain(plain, results)
    assert not [*flips(plain, results)]


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_tokens_that_change_experts_in_bf16_have_close_scores(
    pool_of: SharedPools, name: str
) -> None:
    precision = Precision.PURE_BF16
    plain = by_plain_loop(name, 2, 3, precision)
    case = MixtureCase(name, 2, 2, precision=precision, stop=3)
    results = [*pool_of(2).run(by_trainer, case)]
    found = [*flips(plain, results)]
    assert all(each.margin <= MARGIN for each in found), found
    assert results[0].losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.matrix(12)
def test_checkpoints_move_between_numbers_of_expert_ranks(
    pool_of: SharedPools, tmp_path: Path
) -> None:
    """Two and four ranks load and save between two steps of one rank."""
    loaded: Path | None = None
    for number, (expert, start, stop) in enumerate([(1, 0, 1), (2, 1, 1), (4, 1, 1), (1, 1, 2)]):
        case = MixtureCase(
            "qwen3_moe",
            expert,
            data=expert,
            stage=number,
            start=start,
            stop=stop,
            loaded=loaded,
            saved=tmp_path / str(number),
        )
        plain = by_plain_loop("qwen3_moe", 1, stop)
        for result in pool_of(expert).run(by_trainer, case):
            assert distance(result.parameters, plain.after, plain.before) <= BOUND
        loaded = case.saved
