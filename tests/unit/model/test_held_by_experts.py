"""Memory of experts until backward: expert ranks do not divide it if experts are balanced."""

from functools import cache

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.model import Model, Segment
from zsim.model.transformer import transformer
from zsim.strategy.execution import DispatchLibrary, Execution, Float8, Quantizer, TokenDispatch
from zsim.strategy.precision import Precision

TOKENS = 256


@cache
def built(
    experts: Experts,
    *,
    hidden: int,
    ranks: int,
    recipe: Float8 | None = None,
    library: DispatchLibrary | None = None,
) -> Model:
    dispatch = None if library is None else TokenDispatch(library=library, num_sms=20)
    execution = Execution(
        compiled=True,
        expert=ranks,
        dispatch=dispatch,
        recipe=recipe,
        quantizer=Quantizer.TRANSFORMER_ENGINE,
    )
    shape = Llama(
        layers=1,
        hidden_size=hidden,
        attention_heads=2,
        sequence_length=TOKENS,
        vocab_size=64,
        intermediate_size=32,
        experts=experts,
        execution=execution,
    )
    return transformer(shape, micro_batch_size=1, precision=Precision.BF16)


def products(model: Model) -> Segment:
    """Return the segment with the products of experts."""
    (block,) = (each for each in model.units if each.name == "block0")
    (found,) = (each for each in block.segments if "permuted" in each.inputs[0])
    return found


def held(model: Model) -> int:
    """Return the bytes that the segment of experts keeps until its backward."""
    segment = products(model)
    given = sum(model.values[name].size_bytes for name in segment.inputs)
    return segment.saved_bytes + given * segment.saves_input


shapes = st.builds(
    Experts,
    count=st.sampled_from((8, 16)),
    top_k=st.sampled_from((1, 2, 4)),
    intermediate_size=st.sampled_from((32, 96)),
)


@given(
    experts=shapes,
    hidden=st.sampled_from((64, 128)),
    ranks=st.sampled_from((2, 4, 8)),
    library=st.none() | st.sampled_from(DispatchLibrary),
)
@settings(max_examples=20, deadline=None)
def test_expert_ranks_do_not_divide_what_experts_hold(
    experts: Experts, hidden: int, ranks: int, library: DispatchLibrary | None
) -> None:
    """The law: R H, 2 R F and R F elements of two bytes for R = T k rows, on any ranks."""
    assume(experts.count % ranks == 0)
    rows, inner = TOKENS * experts.top_k, experts.intermediate_size
    law = 2 * rows * (hidden + 2 * inner + inner)
    found = held(built(experts, hidden=hidden, ranks=ranks, library=library))
    small = 4 * rows + 4 * experts.count * 2  # weights of tokens, and the first row of each expert
    assert law <= found <= law + small
    assert found == held(built(experts, hidden=hidden, ranks=2))


def test_narrow_products_hold_their_rows_in_8_bits_with_scales() -> None:
    experts = Experts(count=8, top_k=2, intermediate_size=128)
    wide, narrow = (
        products(built(experts, hidden=256, ranks=4, recipe=recipe))
        for recipe in (None, Float8.BLOCKWISE)
    )
    rows = TOKENS * 2
    cast = rows * 256 + 4 * rows * 256 // 128  # fc1's rows are kept in place of the input
    cast += rows * 128 + 4 * rows * 128 // 128
    assert narrow.saved_bytes == wide.saved_bytes + cast - 2 * rows * 128
