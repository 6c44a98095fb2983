"""Decoders of transformers have as many parameters as its own modules, or as their weights."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from published_configs import Config
from transformers import CONFIG_MAPPING
from transformers_counts import SIZES, counted, counted_by_transformers

import zsim
from zsim.scenario.hugging_face import shape_fields
from zsim.scenario.hugging_face_architectures import READERS
from zsim.scenario.hugging_face_decoders import DECODERS
from zsim.scenario.tables import ScenarioError

OLD: Config = {"vocab_size": 208, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 128}
BLOOM: Config = {"vocab_size": 208, "hidden_size": 64, "n_layer": 3, "n_head": 8}
OF_GPT = {"gpt_bigcode": OLD, "gptj": OLD | {"rotary_dim": 4}, "bloom": BLOOM}
OF_GPT["codegen"] = OF_GPT["gptj"]
OF_GPT.update(dict.fromkeys(("hunyuan_v1_dense", "ministral"), SIZES | {"head_dim": 8}))
OF_GPT["helium"] = SIZES | {"hidden_size": 1024}  # 8 heads of 128 elements
CHANGES: dict[str, list[Config]] = {
    "llama": [{"attention_bias": True}],
    "granite": [{"attention_bias": True}, {"tie_word_embeddings": True}],
    "starcoder2": [{"use_bias": False}, {"tie_word_embeddings": False}],
    "cohere": [{"attention_bias": True}],
    "cohere2": [{"head_dim": 16}],
    "glm": [{"head_dim": 16}, {"attention_bias": False}],
    "nemotron": [{"head_dim": 8}],
    "seed_oss": [{"attention_out_bias": True}, {"attention_bias": False}],
    "stablelm": [{"use_qkv_bias": True}, {"use_parallel_residual": True}],
    "gpt_bigcode": [{"multi_query": False}, {"n_inner": 96}],
    "bloom": [{"tie_word_embeddings": False}],
    "hunyuan_v1_dense": [{"head_dim": 16}, {"tie_word_embeddings": True}],
}
"""Keys of a kind that change its parameters; each is tried alone."""

OF_TRANSFORMERS = sorted(
    (kind, json.dumps(changes))
    for kind in (*DECODERS, "llama")
    if kind in CONFIG_MAPPING
    for changes in ({}, *CHANGES.get(kind, ()))
)


@pytest.mark.parametrize(("kind", "changes"), OF_TRANSFORMERS)
def test_a_decoder_has_the_parameters_of_its_module_in_transformers(
    kind: str, changes: str, tmp_path: Path
) -> None:
    config: Config = {"model_type": kind, **OF_GPT.get(kind, SIZES), **json.loads(changes)}
    assert counted(config, tmp_path) == counted_by_transformers(config)


@pytest.mark.parametrize("kind", ["granite", "glm", "cohere2", "smollm3", "apertus"])
def test_a_key_that_a_file_lacks_has_the_default_of_transformers(kind: str) -> None:
    """As files written by `save_pretrained` before version 5 lack them."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config: Config = {key: SIZES[key] for key in (*sizes, "num_attention_heads")}
    made = CONFIG_MAPPING[kind](**cast("dict[str, Any]", config))
    read = shape_fields(json.dumps({"model_type": kind, **config}))
    assert read["tied_embeddings"] == made.tie_word_embeddings
    assert read["key_value_heads"] == made.num_key_value_heads
    assert read["sequence_length"] == made.max_position_embeddings
    assert read.get("head_size", 8) == (getattr(made, "head_dim", None) or 8)


PUBLISHED: dict[str, tuple[Config, int]] = {
    "baichuan2-7b": (
        SIZES
        | {
            "model_type": "baichuan",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 125_696,
        },
        7_505_973_248,
    ),
    "internlm2-20b": (
        SIZES
        | {
            "model_type": "internlm2",
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "vocab_size": 92_544,
            "bias": False,
        },
        19_861_149_696,
    ),
    "phi-2": (
        {
            "model_type": "phi-msft",
            "n_embd": 2560,
            "n_layer": 32,
            "n_head": 32,
            "n_positions": 2048,
            "vocab_size": 51_200,
        },
        2_779_683_840,
    ),
    "qwen-7b": (
        {
            "model_type": "qwen",
            "hidden_size": 4096,
            "intermediate_size": 22_016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "seq_length": 8192,
            "no_bias": True,
            "vocab_size": 151_936,
        },
        7_721_324_544,
    ),
    "exaone-3.0-7.8b": (
        {
            "model_type": "exaone",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "activation_function": "silu",
            "vocab_size": 102_400,
        },
        7_818_448_896,
    ),
}
"""Models whose code is published with their weights, and the elements of those weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_decoder_with_code_of_its_own_has_the_parameters_of_its_weights(
    name: str, tmp_path: Path
) -> None:
    config, count = PUBLISHED[name]
    assert counted(config, tmp_path) == count


REASONS = {
    "bert": "an encoder, only decoders are modelled",
    "vit": "of images or sound, only decoders of text are modelled",
    "mamba": "recurrent, or a hybrid with recurrent or state space layers; only attention is",
    "gemma3": "a decoder with an encoder of images or sound; save its text_config as config.json",
    "dbrx": "a mixture of experts whose blocks are not modelled",
    "minicpm3": "with blocks that are not modelled",
}


@pytest.mark.parametrize("kind", REASONS)
def test_an_architecture_that_is_not_modelled_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ScenarioError, match=f"model_type '?{kind}'? is {REASONS[kind][:30]}"):
        shape_fields(json.dumps({"model_type": kind}))
    assert kind not in READERS


def test_numbers_of_an_activation_are_refused_on_tensor_ranks(tmp_path: Path) -> None:
    config: Config = {"model_type": "apertus", **SIZES}
    with pytest.raises(zsim.MistakeError, match="xielu is not modelled with tensor 2"):
        counted(config, tmp_path, **{"parallel.tensor": 2})
