import pytest
import torch
from drawn_shapes import architectures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from zsim.model.architecture import GPT, Architecture, Llama, Positions
from zsim.model.transformer import transformer as described
from zsim_torch.module.causal_attention import attend, rotated
from zsim_torch.module.norm import RootMeanSquareNorm
from zsim_torch.module.transformer import Decoder, initial_value, transformer

SMALL = GPT(layers=2, hidden_size=8, attention_heads=2, sequence_length=6, vocab_size=11)


def tokens(shape: Architecture, sequences: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (sequences, shape.sequence_length + 1)
    return torch.randint(shape.vocab_size, size, generator=generator)


def values(module: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.one_commit_in(6)
@given(architectures())
@settings(deadline=None, max_examples=30)
def test_names_and_shapes_are_those_of_the_model(shape: Architecture) -> None:
    model, module = described(shape, micro_batch_size=1), transformer(shape)
    assert {parameter.name: parameter.shape for parameter in model.parameters} == {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert sum(each.numel() for each in module.parameters()) == model.parameter_count


@pytest.mark.one_commit_in(6)
@given(architectures())
@settings(deadline=None, max_examples=30)
def test_each_unit_holds_the_parameters_that_the_model_gives_it(shape: Architecture) -> None:
    model, module = described(shape, micro_batch_size=1), transformer(shape, seed=None)
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert module.units == tuple(unit.name for unit in model.units)
    for unit in model.units:
        own = {names[parameter] for parameter in module.get_submodule(unit.name).parameters()}
        assert own == {parameter.name for parameter in unit.parameters}


@pytest.mark.one_commit_in(6)
@given(architectures(), st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_what_flows_between_units_has_the_size_that_the_model_says(
    shape: Architecture, size: int
) -> None:
    model, module = described(shape, micro_batch_size=size), transformer(shape)
    batch = tokens(shape, size)
    assert batch.numel() == model.batch.elements
    flow = module.get_submodule("embedding")(batch)
    for unit in model.units[:-1]:
        assert flow.numel() == unit.segments[-1].outputs[-1].elements
    loss = module(batch)
    assert (loss.shape, model.loss.elements) == ((), 1)


def test_the_loss_before_training_is_that_of_guessing() -> None:
    """Logits are near zero, so each of V tokens is as likely: log V = log 11 = 2.398."""
    loss = transformer(SMALL)(tokens(SMALL, 4))
    torch.testing.assert_close(loss, torch.tensor(11.0).log(), rtol=0.02, atol=0)


@pytest.mark.one_commit_in(6)
@given(architectures())
@settings(deadline=None, max_examples=30)
def test_a_hidden_state_depends_on_the_past_alone(shape: Architecture) -> None:
    module = transformer(shape, dtype=torch.float64)
    batch = tokens(shape, 1)
    changed = batch.clone()
    changed[0, -2] = (changed[0, -2] + 1) % shape.vocab_size
    block = module.get_submodule("block0")
    with torch.no_grad():
        one, other = (block(module.embedding(each)) for each in (batch, changed))
    torch.testing.assert_close(one[:, :-1], other[:, :-1], rtol=0, atol=0)
    assert not torch.equal(one[:, -1:], other[:, -1:])


@pytest.mark.one_commit_in(6)
@given(architectures(), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_however_scores_are_held_attention_and_its_gradients_are_the_same(
    shape: Architecture, sequences: int
) -> None:
    """The reference is written out: one row of scores at a time, keys repeated for their heads."""
    heads, shared = shape.attention_heads, shape.shared_heads
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> torch.Tensor:
        size = (sequences, shape.sequence_length, count, shape.head_width)
        made = torch.randn(size, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    operands = (drawn(heads), drawn(shared), drawn(shared))
    found = attend(shape, *operands)
    rows = []
    for place in range(shape.sequence_length):
        query, key, value = (each[:, : place + 1] for each in operands)
        scores = torch.einsum(
            "bhd,bkhd->bhk", query[:, -1], key.repeat_interleave(heads // shared, 2)
        )
        scores = scores / shape.head_width**0.5
        if shape.positions is Positions.ALIBI:
            slopes = torch.tensor([2.0 ** (-8 * (each + 1) / heads) for each in range(heads)])
            back = torch.arange(place, -1, -1)
            scores = scores - slopes.double()[:, None] * back
        weights = scores.softmax(-1)
        repeated = value.repeat_interleave(heads // shared, 2)
        rows.append(torch.einsum("bhk,bkhd->bhd", weights, repeated).flatten(1))
    expected = torch.stack(rows, 1)
    torch.testing.assert_close(found, expected)
    incoming = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found, operands, incoming),
        torch.autograd.grad(expected, operands, incoming),
    )


def test_rotary_positions_turn_pairs_so_that_scores_depend_on_distance_alone() -> None:
    one = torch.randn(1, 1, 1, 6, dtype=torch.float64).expand(1, 5, 1, 6)
    other = torch.randn(1, 1, 1, 6, dtype=torch.float64).expand(1, 5, 1, 6)
    scores = rotated(one, 1)[0, :, 0] @ rotated(other, 1)[0, :, 0].T
    for distance in range(-4, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(scores[0, 0], scores[0, 1])
    heads = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    assert torch.equal(rotated(heads, 1)[:, :, 1], heads[:, :, 1])


def test_gradients_of_turned_heads_and_of_rms_norm_are_those_of_small_differences() -> None:
    heads = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: rotated(each, 1), [heads])
    norm = RootMeanSquareNorm(4, torch.float64)
    with torch.no_grad():
        norm.weight.normal_()
    assert torch.autograd.gradcheck(norm, [heads])
    (by_us,) = torch.autograd.grad(norm(heads).sin().sum(), [norm.weight])
    theirs = functional.rms_norm(heads, (4,), norm.weight, eps=1e-5)
    torch.testing.assert_close(norm(heads), theirs)
    torch.testing.assert_close(by_us, torch.autograd.grad(theirs.sin().sum(), [norm.weight])[0])


def test_a_llama_has_the_parts_that_its_name_says() -> None:
    module = transformer(
        Llama(
            layers=1,
            hidden_size=8,
            attention_heads=4,
            key_value_heads=2,
            intermediate_size=12,
            sequence_length=4,
            vocab_size=11,
        )
    )
    assert {name: tuple(value.shape) for name, value in values(module).items()} == {
        "embedding.token.weight": (11, 8),
        "block0.ln1.weight": (8,),
        "block0.q.weight": (8, 8),
        "block0.k.weight": (4, 8),
        "block0.v.weight": (4, 8),
        "block0.proj.weight": (8, 8),
        "block0.ln2.weight": (8,),
        "block0.gate.weight": (12, 8),
        "block0.up.weight": (12, 8),
        "block0.down.weight": (8, 12),
        "head.ln.weight": (8,),
        "head.weight": (11, 8),
    }


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    deeper = GPT(layers=2, hidden_size=8, attention_heads=1, sequence_length=4, vocab_size=11)
    size = (24, 8)
    first = initial_value(SMALL, "block0.qkv.weight", size, seed=1)
    assert torch.equal(first, initial_value(deeper, "block0.qkv.weight", size, seed=1))
    assert not torch.equal(first, initial_value(SMALL, "block1.qkv.weight", size, seed=1))
    assert not torch.equal(first, initial_value(SMALL, "block0.qkv.weight", size, seed=2))


def test_building_a_model_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    transformer(SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_two_models_of_one_seed_are_equal_and_another_seed_differs() -> None:
    one, same, other = (
        values(transformer(SMALL, seed=3)),
        values(transformer(SMALL, seed=3)),
        values(transformer(SMALL)),
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_tied_embeddings_are_one_parameter() -> None:
    tied = GPT(
        layers=1,
        hidden_size=4,
        attention_heads=1,
        sequence_length=3,
        vocab_size=5,
        tied_embeddings=True,
    )
    module = transformer(tied)
    assert module.head.weight is module.embedding.token.weight
    assert "head.weight" not in values(module)


def test_every_format_gives_a_finite_loss_in_the_format_of_the_optimizer() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        loss = transformer(SMALL, dtype=dtype)(tokens(SMALL, 2))
        assert loss.isfinite()
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
