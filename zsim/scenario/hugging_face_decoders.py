"""More readers of `config.json`: decoders whose blocks are variants of Llama's or of GPT-2's.

An optional key has the default of the configuration class in transformers (5.0). For models whose
code is published with their weights (baichuan, internlm, internlm2, minicpm, phi-msft, qwen,
exaone), the default is the one of that code.
"""

from zsim.config_error import shown
from zsim.scenario.hugging_face_values import (
    Config,
    Fields,
    alternating,
    biased_llama,
    decoder,
    flag,
    llama,
    must,
    number,
    windows,
)
from zsim.scenario.tables import ScenarioError

GELUS = ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh")
"""Variants of GELU, which cost the same."""

PARALLEL: Fields = {"parallel_residual": True, "shared_norm": True}
"""Attention and MLP read the same normed hidden state."""


def _granite(config: Config) -> Fields:
    return biased_llama({"max_position_embeddings": 2048} | config)


def _starcoder2(config: Config) -> Fields:
    must(config, "hidden_act", ("gelu_pytorch_tanh", *GELUS))
    must(config, "norm_type", ("layer_norm",))
    must(config, "mlp_type", ("default",))
    merged: Config = {"tie_word_embeddings": True, "max_position_embeddings": 4096} | config
    return (
        decoder(merged)
        | windows(config)
        | {
            "architecture": "gpt",
            "positions": "rotary",
            "joined_qkv": False,
            "bias": flag(config, "use_bias", default=True),
            "norm_bias": True,
        }
    )


def _cohere(config: Config) -> Fields:
    """Return the fields of Command R; its layer norms have no biases."""
    must(config, "use_qk_norm", (False,))
    merged: Config = {"tie_word_embeddings": True, "max_position_embeddings": 8192} | config
    return biased_llama(merged) | {"norm": "layer", "norm_bias": False} | PARALLEL


def _cohere2(config: Config) -> Fields:
    every = number(config, "sliding_window_pattern", 4)
    return _cohere(config) | alternating(config, every)


def _glm(config: Config) -> Fields:
    """Return the fields of GLM-4; one matrix computes gate and up, which costs the same."""
    defaults: Config = {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
    }
    merged = defaults | config
    return llama(merged | {"attention_bias": False}) | {
        "qkv_bias": flag(merged, "attention_bias", default=True)
    }


def _glm4(config: Config) -> Fields:
    return _glm(config) | {"norm_placement": "both"}


def _nemotron(config: Config) -> Fields:
    """Return the fields of Nemotron: squared ReLU without a gate, layer norms with biases."""
    return _squared(config) | {"norm": "layer", "norm_bias": True}


def _squared(config: Config) -> Fields:
    """Return the fields of a decoder like Llama whose MLP is two layers with a squared ReLU."""
    must(config, "hidden_act", ("relu2",))
    must(config, "attention_bias", (False,))
    must(config, "mlp_bias", (False,))
    merged: Config = {"max_position_embeddings": 4096} | config
    return decoder(merged) | {"activation": "relu2"}


def _smollm3(config: Config) -> Fields:
    must(config, "use_sliding_window", (False,))
    defaults: Config = {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    }
    return biased_llama(defaults | config)


def _ministral3(config: Config) -> Fields:
    defaults: Config = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
    }
    return llama(defaults | config) | windows(config)


def _bloom(config: Config) -> Fields:
    """Return the fields of BLOOM: ALiBi, and a layer norm after the embedding.

    Its file names no sequence length; 2,048 is that of its training (BigScience 2022, arXiv
    2211.05100, table 3).
    """
    must(config, "apply_residual_connection_post_layernorm", (False,))
    hidden = number(config, "hidden_size", _optional(config, "n_embed"))
    return {
        "layers": number(config, "n_layer", _optional(config, "num_hidden_layers")),
        "hidden_size": hidden,
        "attention_heads": number(config, "n_head", _optional(config, "num_attention_heads")),
        "sequence_length": number(config, "seq_length", 2048),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
        "positions": "alibi",
        "embedding_norm": True,
    }


def _optional(config: Config, name: str) -> int | None:
    return number(config, name) if config.get(name) is not None else None


def _gpt_bigcode(config: Config) -> Fields:
    """Return the fields of StarCoder: GPT-2 with one head of keys and values."""
    must(config, "activation_function", ("gelu_pytorch_tanh", *GELUS))
    must(config, "add_cross_attention", (False,))
    hidden, heads = number(config, "n_embd"), number(config, "n_head")
    positions = number(config, "n_positions", 1024)
    return {
        "layers": number(config, "n_layer"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": 1 if flag(config, "multi_query", default=True) else heads,
        "intermediate_size": number(config, "n_inner", 4 * hidden),
        "sequence_length": positions,
        "position_embeddings": positions,
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
    }


def _gptj(config: Config) -> Fields:
    """Return the fields of GPT-J and CodeGen: only the MLP and the head have biases."""
    must(config, "activation_function", GELUS)
    hidden = number(config, "n_embd")
    return {
        "layers": number(config, "n_layer"),
        "hidden_size": hidden,
        "attention_heads": number(config, "n_head"),
        "intermediate_size": number(config, "n_inner", 4 * hidden),
        "sequence_length": number(config, "n_positions", 2048),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
        "positions": "rotary",
        "qkv_bias": False,
        "output_bias": False,
        "head_bias": True,
        **PARALLEL,
    }


def _codegen(config: Config) -> Fields:
    return _gptj(config) | {"joined_qkv": True}


def _hunyuan(config: Config) -> Fields:
    fields = biased_llama({"max_position_embeddings": 2048} | config)
    return fields | {"qk_norm": "head"}


def _ernie(config: Config) -> Fields:
    """Return the fields of ERNIE 4.5; `use_bias` gives every linear layer of a block a bias."""
    must(config, "use_bias", (False,))
    defaults: Config = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    }
    return llama(defaults | config)


def _seed_oss(config: Config) -> Fields:
    defaults: Config = {
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
    }
    merged = defaults | config
    return llama(merged | {"attention_bias": False}) | {
        "qkv_bias": flag(merged, "attention_bias", default=True),
        "output_bias": flag(merged, "attention_out_bias", default=False),
    }


def _helium(config: Config) -> Fields:
    defaults: Config = {
        "vocab_size": 48_000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 4096,
    }
    return llama(defaults | config | {"head_dim": None})  # its attention ignores head_dim


def _apertus(config: Config) -> Fields:
    """Return the fields of Apertus, whose activation has two trained numbers in each block."""
    must(config, "hidden_act", ("xielu",))
    must(config, "attention_bias", (False,))
    merged: Config = {"max_position_embeddings": 65_536} | config
    return decoder(merged) | {"activation": "xielu", "qk_norm": "head"}


def _stablelm(config: Config) -> Fields:
    """Return the fields of StableLM; with parallel residuals, both branches share a norm."""
    must(config, "qk_layernorm", (False,))
    must(config, "hidden_act", ("silu",))
    merged: Config = {"max_position_embeddings": 4096} | config
    fields = decoder(merged) | {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": flag(config, "use_qkv_bias", default=False),
    }
    return fields | (PARALLEL if flag(config, "use_parallel_residual", default=False) else {})


def _internlm(config: Config) -> Fields:
    """Return the fields of InternLM 1 to 3; `bias` gives the layers of attention biases."""
    biased = flag(config, "bias", default=config.get("model_type") == "internlm")
    fields = llama(config | {"attention_bias": False})
    return fields | {
        "qkv_bias": flag(config, "qkv_bias", default=biased),
        "output_bias": biased,
    }


def _internlm3(config: Config) -> Fields:
    return _internlm({"num_key_value_heads": 2, "head_dim": 128} | config)


def _baichuan(config: Config) -> Fields:
    """Return the fields of Baichuan 1 and 2; the 13B, with 40 heads, uses ALiBi."""
    length = number(config, "max_position_embeddings", _optional(config, "model_max_length"))
    fields = llama(config | {"max_position_embeddings": length}) | {"joined_qkv": True}
    is_13b = "max_position_embeddings" not in config or fields["attention_heads"] == 40
    return fields | ({"positions": "alibi"} if is_13b else {})


def _minicpm(config: Config) -> Fields:
    """Return the fields of MiniCPM; the head multiplies by the embedding."""
    return biased_llama({"tie_word_embeddings": True} | config)


def _phi_msft(config: Config) -> Fields:
    """Return the fields of Phi 1 to 2 under the names of the code published with them."""
    must(config, "activation_function", GELUS)
    hidden, heads = number(config, "n_embd"), number(config, "n_head")
    return {
        "layers": number(config, "n_layer"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": number(config, "n_head_kv", heads),
        "intermediate_size": number(config, "n_inner", 4 * hidden),
        "sequence_length": number(config, "n_positions"),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
        "positions": "rotary",
        "head_bias": True,
        **PARALLEL,
    }


def _first_qwen(config: Config) -> Fields:
    """Return the fields of Qwen 1; each half of `intermediate_size` is the width of a layer."""
    must(config, "no_bias", (True,))
    length = number(config, "seq_length", 8192)
    changed: Config = {
        "intermediate_size": number(config, "intermediate_size") // 2,
        "head_dim": number(config, "kv_channels", 128),
        "max_position_embeddings": length,
    }
    return llama(config | changed) | {"joined_qkv": True, "qkv_bias": True}


def _exaone(config: Config) -> Fields:
    must(config, "activation_function", ("silu",))
    changed: Config = {"num_hidden_layers": number(config, "num_layers")}
    return llama(config | changed)


def _exaone4(config: Config) -> Fields:
    """Return the fields of EXAONE 4: norms after each branch, windows in three of four blocks."""
    fields = llama({"max_position_embeddings": 2048} | config)
    fields |= {"norm_placement": "after", "qk_norm": "head"}
    if config.get("sliding_window") is None:
        return fields
    pattern = config.get("sliding_window_pattern", 4)
    every = {"LLLG": 4}.get(str(pattern), pattern)
    if not isinstance(every, int):
        raise ScenarioError(
            f"model.hf_config: sliding_window_pattern: {shown(pattern)} is not modelled, only a "
            "number or LLLG"
        )
    return fields | alternating(config, every)


DECODERS = {
    "granite": _granite,
    "starcoder2": _starcoder2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "glm": _glm,
    "glm4": _glm4,
    "nemotron": _nemotron,
    "arcee": _squared,
    "smollm3": _smollm3,
    "ministral": _ministral3,
    "ministral3": _ministral3,
    "bloom": _bloom,
    "gpt_bigcode": _gpt_bigcode,
    "gptj": _gptj,
    "codegen": _codegen,
    "hunyuan_v1_dense": _hunyuan,
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "helium": _helium,
    "apertus": _apertus,
    "stablelm": _stablelm,
    "internlm": _internlm,
    "internlm2": _internlm,
    "internlm3": _internlm3,
    "baichuan": _baichuan,
    "minicpm": _minicpm,
    "phi-msft": _phi_msft,
    "qwen": _first_qwen,
    "exaone": _exaone,
    "exaone4": _exaone4,
}
"""Readers by `model_type`."""
