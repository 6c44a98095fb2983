"""Tensor and pipeline axes on real ranks, with data ranks around them, train as one process does."""

from dataclasses import replace

import pytest
from tiny_training import BOUND, distance
from trained_axes import AxesCase, by_plain_loop, by_ranks, whole

from zsim.model.architecture import GPT, Llama
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.nanotron.options import Nanotron, TensorMode
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Activations, Checkpointing, Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.supervise.ranks import RankPool

SMALL_GPT = GPT(layers=2, hidden_size=8, attention_heads=4, sequence_length=6, vocab_size=11)
TIED_GPT = replace(SMALL_GPT, tied_embeddings=True, parallel_residual=True, joined_qkv=False)
SMALL_LLAMA = Llama(
    layers=3,
    hidden_size=8,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=12,
    sequence_length=6,
    vocab_size=11,
)
ADAM = Adam(learning_rate=0.01, epsilon=1e-5)
CUT = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
KEPT = CUT.but(tp_recompute_allgather=False)


def strategy(
    *, data: int = 1, tensor: int = 1, pipeline: int = 1, micro_batches: int = 2, **changes: object
) -> Strategy:
    """A strategy in fp32 without emulation, but for `changes` by path."""
    made = Strategy(
        parallel=Parallel(data=data, tensor=tensor, pipeline=pipeline),
        zero=Zero(stage=0),
        train=Train(
            gradient_accumulation_steps=micro_batches, precision=Precision.FP32, optimizer=ADAM
        ),
    )
    return made.but({path.replace("__", "."): value for path, value in changes.items()})


def of_nanotron(
    options: Nanotron | None = None,
    *,
    stage: int = 0,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    micro_batches: int = 3,
    checkpointing: Checkpointing = Checkpointing.NONE,
    clip_norm: float | None = None,
) -> Strategy:
    return Strategy(
        parallel=Parallel(data=data, tensor=tensor, pipeline=pipeline),
        zero=Zero(stage=stage, emulate=options or Nanotron()),
        activations=Activations(checkpointing=checkpointing),
        train=Train(
            gradient_accumulation_steps=micro_batches,
            precision=Precision.FP32,
            optimizer=ADAM,
            clip_norm=clip_norm,
        ),
    )


CASES_2 = {
    "pipeline 2": AxesCase(SMALL_LLAMA, of_nanotron(pipeline=2)),
}


def trains_as_one_process(ranks: int, cases: dict[str, AxesCase]) -> None:
    """Train all cases in one pool, and compare with the plain loop."""
    with RankPool(ranks) as pool:
        by_rank = pool.run(by_ranks, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        results = [each[number] for each in by_rank]
        before, after, losses = by_plain_loop(case)
        bound = BOUND[case.strategy.train.precision]
        assert results[0].losses == pytest.approx(losses, rel=10 * bound), name
        assert distance(whole(case, results), after, before) <= bound, name


def test_two_ranks() -> None:
    trains_as_one_process(2, CASES_2)
