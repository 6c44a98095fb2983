"""Small transformers of every kind."""

from hypothesis import strategies as st

from zsim.model.architecture import (
    GPT,
    Activation,
    Architecture,
    Attention,
    Llama,
    Norm,
    Positions,
)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any field of either family, as long as they go together."""
    families: list[type[Architecture]] = [GPT, Llama]
    family = draw(st.sampled_from(families))
    shared, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attention = draw(st.sampled_from(Attention))
    known = [each for each in Positions if attention is Attention.PLAIN or each is not ALIBI]
    positions = draw(st.sampled_from(known))
    length = draw(st.integers(1, 6))
    learned = positions is Positions.LEARNED and draw(st.booleans())
    return family(
        layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 8)),
        attention_heads=shared * groups,
        key_value_heads=shared,
        head_size=2 * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 9)),
        sequence_length=length,
        position_embeddings=length + draw(st.integers(0, 2)) if learned else None,
        vocab_size=draw(st.integers(2, 9)),
        tied_embeddings=draw(st.booleans()),
        positions=positions,
        norm=draw(st.sampled_from(Norm)),
        activation=draw(st.sampled_from(Activation)),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from([None, True, False])),
        joined_qkv=draw(st.booleans()),
        parallel_residual=draw(st.booleans()),
        attention=attention,
        recompute_attention=draw(st.booleans()),
    )


ALIBI = Positions.ALIBI
