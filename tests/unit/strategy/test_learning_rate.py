"""Learning rates of steps: up in a line, then down to a minimum."""

from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.strategy.learning_rate import Decay, LearningRates


@st.composite
def drawn(draw: st.DrawFn) -> LearningRates:
    warmup, peak = draw(st.integers(0, 20)), draw(st.floats(1e-6, 10.0))
    decay = draw(st.sampled_from(Decay))
    return LearningRates(
        peak=peak,
        decay=decay,
        warmup_steps=warmup,
        decay_steps=None if decay is Decay.CONSTANT else warmup + draw(st.integers(1, 30)),
        minimum=draw(st.floats(0.0, peak)),
    )


@given(drawn())
def test_it_only_grows_in_the_warmup_and_never_after(rates: LearningRates) -> None:
    found = [rates.at(step) for step in range(60)]
    peak = rates.warmup_steps
    assert found[:peak] == sorted(found[:peak])
    assert found[peak] == pytest.approx(rates.peak)
    assert found[peak:] == sorted(found[peak:], reverse=True)
    last = rates.peak if rates.decay is Decay.CONSTANT else rates.minimum
    assert found[-1] == pytest.approx(last)


def test_it_is_that_of_nanogpt() -> None:
    def get_lr(it: int) -> float:  # nanoGPT, train.py
        learning_rate, warmup_iters, lr_decay_iters, min_lr = 6e-4, 20, 100, 6e-5
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        coeff = 0.5 * (1.0 + cos(pi * decay_ratio))
        return min_lr + coeff * (learning_rate - min_lr)

    rates = LearningRates(peak=6e-4, warmup_steps=20, decay_steps=100, minimum=6e-5)
    for step in range(130):
        assert rates.at(step) == pytest.approx(get_lr(step), rel=1e-12)
