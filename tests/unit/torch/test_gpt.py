import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim import gpt as described
from zsim.architecture import GPT
from zsim_torch.gpt import Decoder, gpt, initial_value


@st.composite
def shapes(draw: st.DrawFn) -> GPT:
    heads = draw(st.integers(1, 3))
    return GPT(
        layers=draw(st.integers(1, 3)),
        hidden_size=heads * draw(st.integers(1, 4)),
        attention_heads=heads,
        sequence_length=draw(st.integers(1, 6)),
        vocab_size=draw(st.integers(2, 9)),
        tied_embeddings=draw(st.booleans()),
    )


SMALL = GPT(layers=2, hidden_size=8, attention_heads=2, sequence_length=6, vocab_size=11)


def tokens(shape: GPT, sequences: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (sequences, shape.sequence_length + 1)
    return torch.randint(shape.vocab_size, size, generator=generator)


def values(module: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@given(shapes())
@settings(deadline=None, max_examples=30)
def test_names_and_shapes_are_those_of_the_model(shape: GPT) -> None:
    model, module = described.gpt(shape, micro_batch_size=1), gpt(shape)
    assert {parameter.name: parameter.shape for parameter in model.parameters} == {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert sum(each.numel() for each in module.parameters()) == model.parameter_count


@given(shapes())
@settings(deadline=None, max_examples=30)
def test_each_unit_holds_the_parameters_that_the_model_gives_it(shape: GPT) -> None:
    model, module = described.gpt(shape, micro_batch_size=1), gpt(shape, seed=None)
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert module.units == tuple(unit.name for unit in model.units)
    for unit in model.units:
        own = {names[parameter] for parameter in module.get_submodule(unit.name).parameters()}
        assert own == {parameter.name for parameter in unit.parameters}


@given(shapes(), st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_what_flows_between_units_has_the_size_that_the_model_says(shape: GPT, size: int) -> None:
    model, module = described.gpt(shape, micro_batch_size=size), gpt(shape)
    batch = tokens(shape, size)
    assert batch.numel() == model.batch.elements
    flow = module.get_submodule("embedding")(batch)
    for unit in model.units[:-1]:
        assert flow.numel() == unit.segments[-1].outputs[-1].elements
    loss = module(batch)
    assert (loss.shape, model.loss.elements) == ((), 1)


def test_the_loss_before_training_is_that_of_guessing() -> None:
    """Logits are near zero, so each of V tokens is as likely: log V = log 11 = 2.398."""
    loss = gpt(SMALL)(tokens(SMALL, 4))
    torch.testing.assert_close(loss, torch.tensor(11.0).log(), rtol=0.02, atol=0)


def test_a_hidden_state_depends_on_the_past_alone() -> None:
    module = gpt(SMALL)
    batch = tokens(SMALL, 1)
    changed = batch.clone()
    changed[0, 4] = (changed[0, 4] + 1) % SMALL.vocab_size
    block = module.get_submodule("block0")
    with torch.no_grad():
        one, other = (block(module.embedding(each)) for each in (batch, changed))
    torch.testing.assert_close(one[:, :4], other[:, :4], rtol=0, atol=0)
    assert not torch.equal(one[:, 4:], other[:, 4:])


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    deeper = GPT(layers=2, hidden_size=8, attention_heads=1, sequence_length=4, vocab_size=11)
    size = (24, 8)
    first = initial_value(SMALL, "block0.qkv.weight", size, seed=1)
    assert torch.equal(first, initial_value(deeper, "block0.qkv.weight", size, seed=1))
    assert not torch.equal(first, initial_value(SMALL, "block1.qkv.weight", size, seed=1))
    assert not torch.equal(first, initial_value(SMALL, "block0.qkv.weight", size, seed=2))


def test_building_a_model_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    gpt(SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_two_models_of_one_seed_are_equal_and_another_seed_differs() -> None:
    one, same, other = values(gpt(SMALL, seed=3)), values(gpt(SMALL, seed=3)), values(gpt(SMALL))
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
    module = gpt(tied)
    assert module.head.weight is module.embedding.token.weight
    assert "head.weight" not in values(module)


def test_every_format_gives_a_finite_loss_in_the_format_of_the_optimizer() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        loss = gpt(SMALL, dtype=dtype)(tokens(SMALL, 2))
        assert loss.isfinite()
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
