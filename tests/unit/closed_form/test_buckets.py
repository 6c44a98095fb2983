"""Buckets are those of the model and the strategy that are asked for, whatever was asked before."""

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from zsim.closed_form.zero_stages import buckets
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero

LIMITS = (1, 100, 10**9)
STRATEGIES = [
    Strategy(zero=Zero(stage=stage, bucket_elements=limit)) for stage in (1, 3) for limit in LIMITS
]


def made(layers: int) -> Model:
    shape = GPT(layers=layers, hidden_size=4, attention_heads=1, sequence_length=2, vocab_size=5)
    return gpt(shape, micro_batch_size=1, precision=Precision.BF16)


MODELS = [made(1), made(2)]
ALONE = {
    (m, s): buckets(made(m + 1), strategy) for m in (0, 1) for s, strategy in enumerate(STRATEGIES)
}


@given(st.lists(st.sampled_from(sorted(ALONE)), max_size=8))
def test_they_are_the_same_in_any_order_of_questions(asked: list[tuple[int, int]]) -> None:
    for model, strategy in asked:
        assert buckets(MODELS[model], STRATEGIES[strategy]) == ALONE[model, strategy]


def test_a_model_of_which_they_were_asked_goes_away() -> None:
    model = made(1)
    buckets(model, STRATEGIES[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
