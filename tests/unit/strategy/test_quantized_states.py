"""Adam with 8-bit states: bytes, codes, rounding and refusals."""

import pytest
import torch
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Kind
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Adam, Adam8bit, codes, rounded, scale_elements
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2

SHAPE = GPT(layers=2, hidden_size=64, attention_heads=4, sequence_length=8, vocab_size=128)


@pytest.mark.parametrize("signed", [True, False])
def test_a_byte_has_256_codes_of_seven_decades(signed: bool) -> None:
    found = codes(signed=signed)
    assert len(found) == len(set(found)) == 256
    assert (min(found), max(found)) == (
        -max(each for each in found if each < 1) if signed else 0,
        1,
    )
    assert 1e-7 < min(each for each in found if each > 0) < 1e-6


@given(st.integers(0, 2**32 - 1), st.booleans())
@examples(20)
def test_rounding_takes_the_nearest_code_of_each_block(seed: int, signed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(4096 + 100, generator=generator, dtype=torch.float64)
    exact = exact if signed else exact.square()
    moment = exact.clone()
    rounded(moment, signed=signed)
    table = torch.tensor(codes(signed=signed), dtype=torch.float64)
    for start in range(0, len(exact), 256):
        own, largest = exact[start : start + 256], exact[start : start + 256].abs().max()
        nearest = ((own / largest).unsqueeze(-1) - table).abs().min(-1).values
        error = ((moment[start : start + 256] - own) / largest).abs()
        assert torch.allclose(error, nearest, atol=1e-12)


def test_a_small_tensor_is_updated_as_adam_does() -> None:
    states = [torch.zeros(8), torch.zeros(8)]
    others = [torch.zeros(8), torch.zeros(8)]
    one, other = torch.ones(8), torch.ones(8)
    gradient = torch.arange(8.0)
    Adam8bit().update(gradient, one, states, rate=0.1, step=1.0)
    Adam().update(gradient, other, others, rate=0.1, step=1.0)
    assert torch.equal(one, other)


def test_states_take_a_byte_an_element_and_a_scale_a_block() -> None:
    assert scale_elements([4096]) == 16
    assert scale_elements([4096 + 1]) == 17
    assert scale_elements([4095]) == -(-3 * 4095 // 4)  # kept in fp32: 4 bytes, of which 1 counts
    for stage, data in ((0, 1), (2, 4), (3, 3)):
        chosen = Strategy(
            parallel=Parallel(data=data),
            zero=Zero(stage=stage),
            train=Train(optimizer=Adam8bit(), precision=Precision.BF16),
        )
        model = transformer(SHAPE, micro_batch_size=1, precision=Precision.BF16)
        made = make_schedule(model, chosen)
        assert check(made, model) == ()
        sizes = [each.elements for each in model.parameters]
        bucket = -(-sum(sizes) // data) if stage else sum(sizes)
        program = made.programs[0]
        held = sum(
            program.by_name[name].size_bytes
            for name in program.persistent
            if program.by_name[name].kind is Kind.MOMENT
        )
        if stage < 3:  # one bucket, of which a rank has its shard as one tensor
            scales = scale_elements([bucket] if stage else sizes)
            assert held == 2 * (bucket + 4 * scales)


@pytest.mark.parametrize(
    ("runtime", "offload", "why"),
    [
        (
            FSDP2(),
            Offload(),
            "train.optimizer: 'adamw_8bit' is not modelled for FSDP2; use ddp, deepspeed, fsdp1 "
            "or adam",
        ),
        (
            None,
            Offload(optimizer=MemoryTier.HOST),
            "train.optimizer: 'adamw_8bit' keeps its states on the device; remove the offload, or "
            "use adam",
        ),
    ],
)
def test_shards_and_hosts_that_8_bit_states_do_not_have_are_refused(
    runtime: RuntimeOptions | None, offload: Offload, why: str
) -> None:
    with pytest.raises(ValueError, match=r"train\.optimizer") as caught:
        Strategy(
            zero=Zero(stage=3, emulate=runtime),
            offload=offload,
            train=Train(optimizer=Adam8bit(), precision=Precision.BF16),
        )
    assert str(caught.value) == why
