"""Norms that DeepSpeed adds up on the host count copies on tensor ranks once."""

import pytest
from small_files import small_files

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed

SHAPE = GPT(layers=1, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=16)
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("stage", "precision", "said"),
    [
        (1, "fp32", {"overlap_comm": True}),
        (1, "fp16", {"communication_data_type": "fp32"}),
        (2, "bf16", {"migration_stream": True, "reduce_bucket_size": 100}),
        (2, "fp16", {}),
        (3, "fp32", {}),
        (3, "bf16", {"offload_param": CPU, "sub_group_size": 300}),
        (3, "fp16", {"offload_optimizer": NVME, "sub_group_size": 300}),
    ],
)
def test_a_norm_on_the_host_counts_what_tensor_ranks_share_once(
    stage: int, precision: str, said: dict[str, object]
) -> None:
    runtime = DeepSpeed.model_validate({"offload_optimizer": CPU, **said})
    strategy = Strategy.of(
        {
            "parallel.data": 2,
            "parallel.tensor": 2,
            "zero.stage": stage,
            "zero.emulate": runtime,
            "train.precision": precision,
            "train.clip_norm": 1.0,
            "train.gradient_accumulation_steps": 2,
        }
    )
    model = gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision, tensor=2)
    with small_files():
        assert check(make_schedule(model, strategy), model) == ()
