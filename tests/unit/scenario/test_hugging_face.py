"""Published configurations give the published numbers of parameters, to the last one."""

import json
from dataclasses import replace

import pytest

import zsim_topologies
from zsim.model.model import Model
from zsim.scenario.hugging_face import configured, shape_fields
from zsim.scenario.resolve import resolve
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

Config = dict[str, object]

LLAMA: Config = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GPT2: Config = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEOX: Config = {
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "rotary_pct": 0.25,
    "vocab_size": 50304,
}
MPT: Config = {
    "model_type": "mpt",
    "attn_config": {"alibi": True, "attn_impl": "torch", "attn_type": "multihead_attention"},
    "d_model": 4096,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "vocab_size": 50432,
}
QWEN2: Config = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA3 = LLAMA | {
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PUBLISHED: dict[str, tuple[Config, int]] = {
    # Radford et al. 2019; the counts that transformers gives for the four sizes of GPT-2.
    "gpt2": (GPT2, 124_439_808),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
    # Biderman et al. 2023, "Pythia", table 1 and its repository: parameters in all.
    "pythia-70m": (NEOX, 70_426_624),
    "pythia-6.9b": (
        NEOX
        | {
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
        },
        6_857_302_016,
    ),
    "pythia-12b": (
        NEOX
        | {
            "hidden_size": 5120,
            "intermediate_size": 20480,
            "num_attention_heads": 40,
            "num_hidden_layers": 36,
            "vocab_size": 50688,
        },
        11_846_072_320,
    ),
    # MosaicML, model card of mpt-7b: 6.7B; 50432 x 4096 + 32 (12 x 4096^2 + 2 x 4096) + 4096.
    "mpt-7b": (MPT, 6_649_286_656),
    # MosaicML, llm-foundry, scripts/train/benchmarking at 4952183: mpt-70b, its column of
    # parameters; that configuration has learned positions and biases.
    "mpt-70b of the benchmark": (
        MPT
        | {
            "attn_config": {"alibi": False},
            "d_model": 8192,
            "n_heads": 64,
            "n_layers": 80,
            "no_bias": False,
            "vocab_size": 50368,
        },
        64_862_437_376,
    ),
    # Weights published by Meta, Mistral AI and Qwen: elements of their safetensors, all told.
    "llama-2-7b": (LLAMA, 6_738_415_616),
    "llama-3-8b": (LLAMA3, 8_030_261_248),
    "llama-3-70b": (
        LLAMA3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
        70_553_706_496,
    ),
    "llama-3.1-405b": (
        LLAMA3
        | {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_hidden_layers": 126,
        },
        405_853_388_800,
    ),
    "mistral-7b-v0.1": (
        LLAMA3
        | {
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "qwen2-7b": (QWEN2, 7_615_616_512),
    "qwen2.5-0.5b": (
        QWEN2
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
}

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
        lambda name, _, nodes: replace(zsim_topologies.load(name), nodes=nodes),
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


def test_the_longest_sequence_is_the_one_in_which_all_tokens_see_each_other() -> None:
    mistral, _ = PUBLISHED["mistral-7b-v0.1"]
    assert shape_fields(json.dumps(mistral))["sequence_length"] == 4096
    assert shape_fields(json.dumps(mistral | {"sliding_window": None}))["sequence_length"] == 32768
    assert shape_fields(json.dumps(QWEN2))["sequence_length"] == 131072
    assert shape_fields(json.dumps(LLAMA3))["sequence_length"] == 8192


WRONG: dict[str, tuple[str, str]] = {
    "an unknown architecture": (
        json.dumps({"model_type": "bert"}),
        "model.hf_config: model_type 'bert' must be one of gpt2, gpt_neox, mpt, llama, mistral",
    ),
    "no architecture": ("{}", "model.hf_config: model_type None must be one of gpt2"),
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
        json.dumps(LLAMA | {"attention_bias": True}),
        "model.hf_config: attention_bias: True is not modelled, only False",
    ),
    "norms of queries": (
        json.dumps(MPT | {"attn_config": {"qk_ln": True}}),
        "model.hf_config: qk_ln: True is not modelled, only False",
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
