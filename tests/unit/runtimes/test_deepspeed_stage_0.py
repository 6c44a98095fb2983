"""DeepSpeed without ZeRO: buckets of a fixed size, flat gradients, and refusals in one line."""

import pytest

from zsim.model.architecture import GPT
from zsim.model.model import ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce, walk
from zsim.schedule.schedule_writer import POOL
from zsim.strategy.optimizer_rule import Adam, Adam8bit, Optimizer
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed import stage_0, stage_0_volume
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice, OffloadOptimizer

SHAPE = GPT(layers=3, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=32)


def strategy(
    precision: Precision, *, clip_norm: float | None = None, optimizer: Optimizer | None = None
) -> Strategy:
    return Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=0, emulate=DeepSpeed()),
        train=Train(
            precision=precision,
            gradient_accumulation_steps=2,
            clip_norm=clip_norm,
            optimizer=optimizer or Adam(),
        ),
    )


def test_a_bucket_closes_with_the_parameter_that_makes_it_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer(SHAPE, micro_batch_size=1, precision=Precision.FP16)
    for limit in (1, 300, 5000):
        monkeypatch.setattr(stage_0, "BUCKET_ELEMENTS", limit)
        monkeypatch.setattr(stage_0_volume, "BUCKET_ELEMENTS", limit)
        wanted, filled = list[int](), 0
        for each in model.parameters:
            filled += each.elements
            if filled > limit:
                wanted.append(filled)
                filled = 0
        made = make_schedule(model, strategy(Precision.FP16))
        assert check(made, model) == ()
        reduced = [each for each in made.programs[0].step if isinstance(each, AllReduce)]
        assert [each.source.size for each in reduced] == wanted + [filled] * bool(filled)


def test_no_rank_exchanges_norms_or_overflow_flags() -> None:
    model = transformer(SHAPE, micro_batch_size=1, precision=Precision.FP16)
    made = make_schedule(model, strategy(Precision.FP16, clip_norm=1.0))
    reduced = [each for each in walk(made.programs[0].step) if isinstance(each, AllReduce)]
    assert reduced
    assert all(each.source.size > 1 for each in reduced)


def test_the_update_holds_casts_and_flat_gradients_at_once() -> None:
    """FP16_Optimizer.step: 16-bit gradients, their fp32 casts and the flat fp32 tensor."""
    elements = sum(
        each.elements
        for each in transformer(SHAPE, micro_batch_size=1, precision=Precision.BF16).parameters
    )
    model = transformer(SHAPE, micro_batch_size=1, precision=Precision.BF16)
    made = make_schedule(model, strategy(Precision.BF16))
    peak = next(peak for _, pool, peak in made.contract.peak_bytes if pool == POOL)
    states = 2 + 4 + 4 + 4  # parameters, masters, two moments
    assert peak >= elements * (states + 2 + 4 + 4)


@pytest.mark.parametrize(
    ("precision", "rule", "why"),
    [
        (
            Precision.PURE_BF16,
            Adam(),
            'train.precision: "pure_bf16" needs zero.stage 1, 2 or 3 with DeepSpeed; say bf16',
        ),
        (
            Precision.BF16,
            Adam8bit(),
            "train.optimizer: adamw_8bit with zero.stage 0 is wrapped by FP16_UnfusedOptimizer, "
            "which is not modelled; say zero.emulate = ddp",
        ),
    ],
)
def test_what_stage_0_does_not_have_is_refused(
    precision: Precision, rule: Optimizer, why: str
) -> None:
    with pytest.raises(ModelError) as caught:
        make_schedule(
            transformer(SHAPE, micro_batch_size=1, precision=precision),
            strategy(precision, optimizer=rule),
        )
    assert str(caught.value) == why


def test_an_offloaded_optimizer_is_refused() -> None:
    offload = OffloadOptimizer(device=OffloadDevice.CPU)
    with pytest.raises(ValueError, match="stage 0 keeps states on the device"):
        Strategy(zero=Zero(stage=0, emulate=DeepSpeed(offload_optimizer=offload)))
