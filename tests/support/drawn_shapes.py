"""Small transformers of every kind."""

from dataclasses import replace

from hypothesis import strategies as st

from zsim.model.architecture import (
    GPT,
    Activation,
    Architecture,
    Attention,
    Llama,
    Norm,
    NormPlacement,
    Positions,
    QKNorm,
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
        activation=draw(st.sampled_from([Activation.GELU, Activation.SWIGLU])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from([None, True, False])),
        joined_qkv=draw(st.booleans()),
        parallel_residual=draw(st.booleans()),
        attention=attention,
        recompute_attention=draw(st.booleans()),
    )


ALIBI = Positions.ALIBI


@st.composite
def wider_architectures(draw: st.DrawFn) -> Architecture:
    """As above, with what no module of `zsim_torch` has: other norms, windows, MLPs, biases."""
    shape = draw(architectures())
    placement = draw(st.sampled_from(NormPlacement))
    split = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 7))
    if placement is not NormPlacement.BEFORE:
        shape = replace(shape, bias=False, parallel_residual=False)
    return replace(
        shape,
        layers=draw(st.integers(1, 3)),
        activation=draw(st.sampled_from(Activation)),
        norm_placement=placement,
        norm_bias=draw(st.sampled_from([None, True, False])),
        norm_weight=draw(st.booleans()),
        head_bias=draw(st.booleans()),
        joined_qkv=not split,
        qk_norm=draw(st.none() | st.sampled_from(QKNorm)) if split else None,
        shared_norm=shape.parallel_residual and draw(st.booleans()),
        window=window,
        global_every=None if window is None else draw(st.none() | st.integers(1, 3)),
    )
