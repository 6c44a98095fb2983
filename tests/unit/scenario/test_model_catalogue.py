"""Models by name: as large as published, found by the names that people use, refused with why."""

import tomllib
from typing import Any

import pytest

import zsim_scenarios
from zsim.files.installed import (
    model_catalogue,
    network_profile,
    topology,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.scenario.model_catalogue import CatalogueModel, named
from zsim.scenario.resolve import resolve
from zsim.scenario.tables import ScenarioError
from zsim.scenario.toml import parse

TEXT = """
title = "by name"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
stage = 3
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
"""
MODELS = {model.name: model for model in model_catalogue().models}
SHAPES: dict[str, dict[str, Any]] = {
    model["name"]: model["shape"]
    for family in zsim_scenarios.model_family_names()
    for model in tomllib.loads(zsim_scenarios.model_family_text(family)).get("model", ())
}


def counted(*settings: str) -> int:
    """Parameters of the model that zsim makes of a scenario with these settings."""
    scenario = named(parse(TEXT, settings), model_catalogue())
    found = resolve(scenario, topology, network_profile, kernel_profile)
    return found.make_model().parameter_count


def by_hand(shape: dict[str, Any]) -> int:
    """Parameters by arithmetic on the written keys: what each of the matrices and norms has."""
    llama = shape["architecture"] == "llama"
    width, heads = shape["hidden_size"], shape["attention_heads"]
    head = shape.get("head_size", width // heads)
    queries, keys = heads * head, shape.get("key_value_heads", heads) * head
    inner = shape.get("intermediate_size", 4 * width)
    bias = shape.get("bias", not llama)
    gated = shape.get("activation", "swiglu" if llama else "gelu") in ("swiglu", "geglu")
    layer_norm = shape.get("norm", "rms" if llama else "layer") == "layer"
    scale = int(shape.get("norm_weight", True))
    norm = scale + int(layer_norm and shape.get("norm_bias", bias))
    norms = 4 if shape.get("norm_placement") == "both" else 1 if shape.get("shared_norm") else 2
    block = width * (queries + 2 * keys) + queries * width
    if latent := shape.get("latent"):
        block = latent_by_hand(shape, latent)
    mlp = (3 if gated else 2) * width * inner
    block += heads if shape.get("sinks") else 0
    block += width if shape.get("output_bias") and not bias else 0
    block += norms * norm * width
    block += (queries + 2 * keys) * int(shape.get("qkv_bias", bias))
    block += int(bias) * (width + inner + width)
    block += {None: 0, "head": 2 * head, "width": queries + keys}[shape.get("qk_norm")] * scale
    words = shape["vocab_size"]
    learned = shape.get("positions", "rotary" if llama else "learned") == "learned"
    places = shape.get("position_embeddings", shape["sequence_length"]) if learned else 0
    ends = words * width * (1 if shape.get("tied_embeddings") else 2) + places * width
    ends += norm * width + words * int(shape.get("head_bias", False))
    experts = shape.get("experts", {"dense_layers": shape["layers"]})
    dense = experts.get("dense_layers", 0)
    routed = routed_by_hand(width, experts) if dense < shape["layers"] else 0
    mlps = dense * mlp + (shape["layers"] - dense) * routed
    return int(shape["layers"] * block + mlps + ends)


def latent_by_hand(shape: dict[str, Any], latent: dict[str, Any]) -> int:
    """Parameters of latent attention: the compressing and the expanding layers, their norms."""
    width, heads = shape["hidden_size"], shape["attention_heads"]
    rank, nope, rope = (latent[each] for each in ("key_value_rank", "nope_size", "rope_size"))
    low = latent.get("query_rank")
    queries = heads * (nope + rope)
    count = width * queries if low is None else width * low + low + low * queries
    count += width * (rank + rope) + rank + rank * heads * (nope + latent["value_size"])
    return int(count + heads * latent["value_size"] * width)


def routed_by_hand(width: int, experts: dict[str, Any]) -> int:
    """Parameters of the experts of a block, of its router, and of the expert for all tokens."""
    count, inner = experts["count"], experts["intermediate_size"]
    own = 3 * width * inner + (2 * inner + width if experts.get("bias") else 0)
    router = width * count + (count if experts.get("router_bias") else 0)
    return int(count * own + router + 3 * width * experts.get("shared_intermediate_size", 0))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    model, count = MODELS[name], counted(f"model.name={name}")
    assert count == by_hand(SHAPES[name])
    assert is_published(model, count)


def is_published(model: CatalogueModel, count: int) -> bool:
    """Tell whether `count` is what was published of `model`, to the last digit that was."""
    given = (model.parameters, model.stored_parameters, model.rounded_parameters)
    (exact,) = (each for each in given if each is not None)
    if model.parameters is not None:
        return count == exact
    if model.stored_parameters is not None:
        shape = SHAPES[model.name]
        return exact == count + int(shape["vocab_size"] * shape["hidden_size"])
    digits = str(exact).rstrip("0")
    unit = int(10 ** (len(str(exact)) - len(digits)))
    return 2 * abs(count - exact) <= unit


def test_every_family_has_a_source_for_shapes_and_for_sizes() -> None:
    for family in model_catalogue().families:
        assert family.source
        assert family.parameters_source or not family.model
    assert len(MODELS) == len(SHAPES) > 30


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("meta-llama/Llama-3.1-70B", "llama3.1-70b"),
        ("META-LLAMA/llama-3.1-70b", "llama3.1-70b"),
        ("Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("tiiuae/falcon-180B", "falcon-180b"),
        ("llama2_7b", "llama2-7b"),
        ("microsoft/phi-1_5", "phi-1.5"),
    ],
)
def test_a_model_is_found_by_the_name_of_hugging_face_in_any_case(given: str, found: str) -> None:
    _, model = model_catalogue().find(given)
    assert model.name == found


def test_no_name_is_that_of_two_models_or_of_one_that_is_refused() -> None:
    names = [name.lower() for each in MODELS.values() for name in (each.name, *each.hugging_face)]
    assert len(set(names)) == len(names)
    for name, model in MODELS.items():
        assert model_catalogue().find(name)[1] is model


def test_keys_beside_the_name_go_first() -> None:
    settings = ("model.name=llama3.1-8b", "model.layers=2", "model.attention=flash2")
    table = named(parse(TEXT, settings), model_catalogue()).model
    assert (table.layers, table.hidden_size, table.attention) == (2, 4096, "flash2")
    assert counted(*settings) == by_hand(SHAPES["llama3.1-8b"] | {"layers": 2})


def test_a_setting_of_the_name_replaces_the_shape_of_the_file() -> None:
    whole = zsim_scenarios.text("tiny_llama") + "\n[model.lora]\nrank = 2\n"
    table = named(parse(whole, ["model.name=gpt2"]), model_catalogue()).model
    assert (table.architecture, table.layers, table.vocab_size) == ("gpt", 12, 50257)
    assert table.lora is not None


WRONG = {
    "model.name=llama3.1-71b": "model.name: 'llama3.1-71b' is not the name of a model; did you "
    "mean llama3.1-70b",
    "model.name=#": "model.name: '#' is not the name of a model; zsim list models prints all",
    "model.name=google-t5/t5-11b": "model.name: 'google-t5/t5-11b' is an encoder and a decoder",
    "model.name=google/flan-t5-xl": "model.name: 'google/flan-t5-xl' is an encoder and a decoder",
    "model.name=databricks/dbrx-base": "model.name: 'databricks/dbrx-base' is a mixture of "
    "experts whose blocks are not modelled",
    "model.name=Qwen/Qwen3-Next-80B-A3B": "model.name: 'Qwen/Qwen3-Next-80B-A3B' is recurrent, or "
    "a hybrid with recurrent or state space layers; only attention is modelled",
    "model.name=bert-base-uncased": "model.name: 'bert-base-uncased' is an encoder, only",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_name_that_does_not_ship_is_one_line_that_says_why(setting: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        named(parse(TEXT, [setting]), model_catalogue())
    assert str(caught.value).startswith(WRONG[setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["model.hf_config=config.json"], "model.name: 'gpt2' cannot be combined with hf_config"),
        (["model.parameters=7e9"], "model.name: 'gpt2' cannot be combined with parameters"),
        (
            [
                "model.layers=1",
                "model.hidden_size=4",
                "model.attention_heads=1",
                "model.sequence_length=4",
                "model.vocab_size=5",
            ],
            "model.name: 'gpt2' says nothing beside all of layers, hidden_size",
        ),
    ],
)
def test_a_name_beside_another_shape_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        named(parse(TEXT, ["model.name=gpt2", *settings]), model_catalogue())
    assert str(caught.value).startswith(told)


def test_a_name_that_nobody_looked_up_is_named() -> None:
    scenario = parse(TEXT, ["model.name=gpt2"])
    found = resolve(scenario, topology, network_profile, kernel_profile)
    with pytest.raises(ScenarioError, match=r"^model\.name: 'gpt2' was not looked up"):
        found.make_model()


def test_what_is_shown_of_a_model_is_a_table_of_a_scenario_with_its_sources() -> None:
    for name in MODELS:
        text = model_catalogue().text(name)
        assert tomllib.loads(text)["model"] == SHAPES[name]
        assert text.startswith(f"# {name} (")
        assert "# Shape: " in text
