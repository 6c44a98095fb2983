"""Published configurations give the published numbers of parameters, to the last one."""

import json
from dataclasses import replace

import pytest

import zsim_topologies
from zsim.files.installed import model_catalogue
from zsim.model.model import Model
from zsim.scenario.hugging_face import configured, shape_fields
from zsim.scenario.resolve import resolve
from zsim.scenario.tables import ModelTable, Scenario, ScenarioError
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
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "max_window_layers": 36,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2: Config = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
PHI2 = NEOX | {
    "model_type": "phi",
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 51200,
}
OLMO2 = LLAMA | {"model_type": "olmo2", "vocab_size": 100352}
OPT: Config = {
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 50272,
    "word_embed_proj_dim": 4096,
}
FALCON: Config = {
    "model_type": "falcon",
    "bias": False,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
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
    "qwen3-8b": (QWEN3, 8_190_735_360),
    "gemma-2b": (
        GEMMA2
        | {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
        },
        2_506_172_416,
    ),
    "gemma2-9b": (GEMMA2, 9_241_705_984),
    "gemma3-1b": (
        GEMMA2
        | {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
    "phi-2": (PHI2, 2_779_683_840),
    "phi-3-mini": (
        LLAMA
        | {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "sliding_window": 2047,
            "vocab_size": 32064,
        },
        3_821_079_552,
    ),
    "olmo-7b": (
        LLAMA | {"model_type": "olmo", "max_position_embeddings": 2048, "vocab_size": 50304},
        6_888_095_744,
    ),
    "olmo2-7b": (OLMO2, 7_298_617_344),
    # peft's example of OPT 6.7B in 8 bits: all parameters, less those of its adapters.
    "opt-6.7b": (OPT, 6_666_862_592 - 8_388_608),
    # Less the projection, which is the embedding and stands in the files a second time.
    "falcon-7b": (FALCON, 7_217_189_760 - 65024 * 4544),
    "falcon-40b": (
        FALCON
        | {
            "hidden_size": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
        },
        41_835_970_560 - 65024 * 8192,
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
    "an encoder and a decoder": (
        json.dumps({"model_type": "t5"}),
        "model.hf_config: model_type 't5' is an encoder and a decoder, only decoders are modelled",
    ),
    "a mixture of experts": (
        json.dumps({"model_type": "mixtral"}),
        "model.hf_config: model_type 'mixtral' is a mixture of experts, only dense models",
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
        "model.hf_config: do_layer_norm_before: False is not modelled, only True",
    ),
    "an embedding of OPT of another width": (
        json.dumps(OPT | {"word_embed_proj_dim": 512}),
        "model.hf_config: word_embed_proj_dim: 512 is not modelled, only 4096",
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
