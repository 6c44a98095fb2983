"""Published configurations give the published numbers of parameters, to the last one."""

import json
from dataclasses import replace

import pytest
from published_configs import GEMMA2, GPT2, LLAMA, LLAMA3, MPT, OLMO2, OPT, PUBLISHED, QWEN2, Config

import zsim_topologies
from zsim.files.installed import model_catalogue
from zsim.model.model import Model
from zsim.scenario.hugging_face import configured, shape_fields
from zsim.scenario.resolve import resolve
from zsim.scenario.tables import ModelTable, Scenario, ScenarioError
from zsim.scenario.toml import parse

TEXT = """
title = "from a config"
[model]
hf_config = "config.json"
sequence_length = 64
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
stage = 1
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
"""


def model_of(config: Config, *settings: str) -> Model:
    return resolved(configured(parse(TEXT, settings), json.dumps(config)))


def resolved(scenario: Scenario) -> Model:
    return resolve(
        scenario,
        lambda name, _, nodes, __, /, **___: replace(zsim_topologies.load(name), nodes=nodes),
        lambda name: (_ for _ in ()).throw(LookupError(name)),
    ).make_model()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_published_number_of_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    assert model_of(config).parameter_count == count


def test_what_the_scenario_says_goes_before_the_configuration() -> None:
    model = model_of(LLAMA3, "model.layers=2", "model.tied_embeddings=true")
    assert model.tokens == 64
    assert [unit.name for unit in model.units] == ["embedding", "block0", "block1", "head"]
    assert model.units[-1].parameters[-1].name == "embedding.token.weight"


SHIPPED = {model.name: model for model in model_catalogue().models}


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() & SHIPPED.keys()))
def test_a_configuration_gives_the_shape_that_ships_under_its_name(name: str) -> None:
    """The sequence apart: shipped is that of the training, read the longest there can be."""
    read, shipped = (
        ModelTable.model_validate(each).model_dump(exclude_unset=True)
        for each in (
            {"architecture": "gpt", **shape_fields(json.dumps(PUBLISHED[name][0]))},
            SHIPPED[name].shape.model_dump(exclude_unset=True),
        )
    )
    differ = {key for key in read | shipped if settled(read, key) != settled(shipped, key)}
    assert differ <= {"sequence_length"}


def settled(fields: Config, key: str) -> object:
    """Return the value of a key, or what it is if nobody says it."""
    defaults = {
        "key_value_heads": fields["attention_heads"],
        "intermediate_size": 4 * int(str(fields["hidden_size"])),
        "head_size": int(str(fields["hidden_size"])) // int(str(fields["attention_heads"])),
        "position_embeddings": fields["sequence_length"],
        "parallel_residual": False,
        "shared_norm": False,
        "tied_embeddings": False,
        "qkv_bias": fields["architecture"] == "gpt" and fields.get("bias") is not False,
        "bias": fields["architecture"] == "gpt",
        "norm": "layer" if fields["architecture"] == "gpt" else "rms",
    }
    return fields.get(key, defaults.get(key))


def window_of(config: Config) -> tuple[object, object]:
    fields = shape_fields(json.dumps(config))
    return fields.get("window"), fields.get("global_every")


def test_windows_are_those_of_the_configuration() -> None:
    mistral, _ = PUBLISHED["mistral-7b-v0.1"]
    assert window_of(mistral) == (4096, None)
    assert window_of(mistral | {"sliding_window": None}) == (None, None)
    assert shape_fields(json.dumps(mistral))["sequence_length"] == 32768
    assert window_of(QWEN2) == (None, None)
    windowed = {"use_sliding_window": True, "max_window_layers": 28}
    assert window_of(QWEN2 | windowed) == (None, None)  # of 28 layers none is behind the 28th
    assert window_of(QWEN2 | windowed | {"max_window_layers": 0}) == (131072, None)
    assert window_of(GEMMA2) == (4096, 2)
    assert window_of(PUBLISHED["gemma3-1b"][0]) == (512, 6)
    every_fourth = (["sliding_attention"] * 3 + ["full_attention"]) * 8
    olmo3 = OLMO2 | {"model_type": "olmo3", "layer_types": every_fourth}
    assert window_of(olmo3) == (4096, 4)


WRONG: dict[str, tuple[str, str]] = {
    "an unknown architecture": (
        json.dumps({"model_type": "elmo"}),
        "model.hf_config: model_type 'elmo' must be one of gpt2, gpt_neox, mpt, llama, mistral",
    ),
    "no architecture": ("{}", "model.hf_config: model_type missing; must be one of gpt2"),
    "a list": ("[]", "model.hf_config: must be an object"),
    "no JSON": ("layers = 3", "model.hf_config: not JSON: Expecting value"),
    "a missing key": (
        json.dumps({name: value for name, value in LLAMA.items() if name != "hidden_size"}),
        "model.hf_config: hidden_size: missing",
    ),
    "a word for a number": (
        json.dumps(GPT2 | {"n_layer": "12"}),
        "model.hf_config: n_layer: '12' must be a positive whole number",
    ),
    "a slip of the exponent": (
        json.dumps(GPT2 | {"n_layer": 12_000_000}),
        "model.hf_config: layers: 12000000 must be at most 100000",
    ),
    "another activation": (
        json.dumps(LLAMA | {"hidden_act": "relu"}),
        "model.hf_config: hidden_act: 'relu' is not modelled, only silu",
    ),
    "biases that are not modelled": (
        json.dumps(LLAMA | {"mlp_bias": True}),
        "model.hf_config: mlp_bias: true is not modelled, only false",
    ),
    "an encoder and a decoder": (
        json.dumps({"model_type": "t5"}),
        "model.hf_config: model_type 't5' is an encoder and a decoder, only decoders are modelled",
    ),
    "a mixture of experts": (
        json.dumps({"model_type": "dbrx"}),
        "model.hf_config: model_type 'dbrx' is a mixture of experts whose blocks are not modelled",
    ),
    "windows of the last layers": (
        json.dumps(QWEN2 | {"use_sliding_window": True, "max_window_layers": 21}),
        "model.hf_config: max_window_layers: 21 is not modelled, only 0",
    ),
    "windows in another order": (
        json.dumps(GEMMA2 | {"layer_types": ["full_attention"] * 42}),
        "model.hf_config: layer_types: only full_attention in one of 2 layers",
    ),
    "norms behind sublayers of OPT": (
        json.dumps(OPT | {"do_layer_norm_before": False}),
        "model.hf_config: do_layer_norm_before: false is not modelled, only true",
    ),
    "an embedding of OPT of another width": (
        json.dumps(OPT | {"word_embed_proj_dim": 512}),
        "model.hf_config: word_embed_proj_dim: 512 is not modelled, only 4096",
    ),
    "norms of queries": (
        json.dumps(MPT | {"attn_config": {"qk_ln": True}}),
        "model.hf_config: qk_ln: true is not modelled, only false",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_one_line_that_says_why(name: str) -> None:
    text, line = WRONG[name]
    with pytest.raises(ScenarioError) as caught:
        configured(parse(TEXT), text)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_nobody_read_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"^model\.hf_config: 'config\.json' was not read"):
        resolved(parse(TEXT))
