"""Readers of `config.json` by `model_type`: the fields of `[model]` for each architecture.

An optional key has the default of the configuration class in transformers (4.46; for qwen3,
gemma3_text and olmo3 the version that introduced them), from memory.
"""

from collections.abc import Callable
from typing import cast

from zsim.scenario.hugging_face_decoders import DECODERS
from zsim.scenario.hugging_face_experts import EXPERTS
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

GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Variants of GELU, which cost the same."""


def _gpt2(config: Config) -> Fields:
    must(config, "activation_function", ("gelu_new", *GELUS))
    must(config, "add_cross_attention", (False,))
    hidden = number(config, "n_embd")
    positions = number(config, "n_positions")
    return {
        "layers": number(config, "n_layer"),
        "hidden_size": hidden,
        "attention_heads": number(config, "n_head"),
        "intermediate_size": number(config, "n_inner", 4 * hidden),
        "sequence_length": positions,
        "position_embeddings": positions,
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
    }


def _gpt_neox(config: Config) -> Fields:
    must(config, "hidden_act", GELUS)
    return {
        "layers": number(config, "num_hidden_layers"),
        "hidden_size": number(config, "hidden_size"),
        "attention_heads": number(config, "num_attention_heads"),
        "intermediate_size": number(config, "intermediate_size"),
        "sequence_length": number(config, "max_position_embeddings"),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
        "positions": "rotary",
        "parallel_residual": flag(config, "use_parallel_residual", default=True),
        "qkv_bias": flag(config, "attention_bias", default=True),
    }


def _mpt(config: Config) -> Fields:
    """Return the fields of MosaicML's MPT: ALiBi, or learned positions if that is off."""
    inner = config.get("attn_config") or {}
    if not isinstance(inner, dict):
        raise ScenarioError("model.hf_config: attn_config: must be an object")
    attention = cast("Config", inner)
    must(attention, "qk_ln", (False,))
    hidden, heads = number(config, "d_model"), number(config, "n_heads")
    shared = {"multiquery_attention": 1, "grouped_query_attention": None}.get(
        str(attention.get("attn_type")), heads
    )
    fields: Fields = {
        "layers": number(config, "n_layers"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": number(attention, "kv_n_heads", shared),
        "intermediate_size": hidden * number(config, "expansion_ratio", 4),
        "sequence_length": number(config, "max_seq_len"),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
        "bias": not flag(config, "no_bias", default=True),
        "positions": "alibi" if flag(attention, "alibi", default=True) else "learned",
        "norm": "rms" if "rms" in str(config.get("norm_type")) else "layer",
    }
    if fields["positions"] == "learned":
        fields["position_embeddings"] = fields["sequence_length"]
    return fields


def _mistral(config: Config) -> Fields:
    return llama(config) | windows({"sliding_window": 4096} | config)


def _qwen(config: Config) -> Fields:
    """Return the fields of Qwen since version 2, whose window is off by default."""
    fields = llama(config)
    if not flag(config, "use_sliding_window", default=False):
        return fields
    first, layers = config.get("max_window_layers", 28), number(config, "num_hidden_layers")
    if isinstance(first, int) and first >= layers:  # earlier blocks have no window
        return fields
    must(config, "max_window_layers", (0,))
    return fields | windows({"sliding_window": 4096} | config)


def _qwen2(config: Config) -> Fields:
    return _qwen(config) | {"qkv_bias": True}


def _qwen3(config: Config) -> Fields:
    return _qwen({"head_dim": 128} | config) | {"qk_norm": "head"}


def _gemma(config: Config) -> Fields:
    """Return the fields of Gemma; if both activation keys are given, `hidden_activation` counts."""
    must(config, "attention_bias", (False,))
    act = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    must(config, act, ("gelu_pytorch_tanh", *GELUS))
    fields = decoder({"head_dim": 256, "tie_word_embeddings": True} | config)
    return fields | {"activation": "geglu"}


def _gemma2(config: Config) -> Fields:
    return _gemma(config) | alternating(config, 2) | {"norm_placement": "both"}


def _gemma3(config: Config) -> Fields:
    every = number(config, "sliding_window_pattern", 6)
    return (
        _gemma(config) | alternating(config, every) | {"norm_placement": "both", "qk_norm": "head"}
    )


def _phi(config: Config) -> Fields:
    """Return the fields of Phi 1 to 2: attention and MLP share a norm; biases everywhere."""
    must(config, "hidden_act", ("gelu_new", *GELUS))
    must(config, "qk_layernorm", (False,))
    return decoder(config) | {
        "architecture": "gpt",
        "positions": "rotary",
        "joined_qkv": False,
        "parallel_residual": True,
        "shared_norm": True,
        "head_bias": True,
    }


def _phi3(config: Config) -> Fields:
    return llama(config) | windows(config) | {"joined_qkv": True}


def _olmo(config: Config) -> Fields:
    """Return the fields of the first OLMo, whose layer norms have no parameters."""
    must(config, "clip_qkv", (None,))
    norms = {"norm": "layer", "norm_weight": False, "norm_bias": False}
    return llama(config) | norms


def _olmo2(config: Config) -> Fields:
    return llama(config) | {"norm_placement": "after", "qk_norm": "width"}


def _olmo3(config: Config) -> Fields:
    return _olmo2(config) | alternating(config, 4)


def _opt(config: Config) -> Fields:
    """Return the fields of OPT; its learned positions start with two that no token uses.

    These are in `OPTLearnedPositionalEmbedding` of transformers. The 350M alone has norms after
    sublayers and a narrower embedding, which are refused.
    """
    must(config, "activation_function", ("relu",))
    must(config, "do_layer_norm_before", (True,))
    must(config, "enable_bias", (True,))
    must(config, "_remove_final_layer_norm", (False,))
    hidden, length = number(config, "hidden_size"), number(config, "max_position_embeddings")
    must(config, "word_embed_proj_dim", (hidden,))
    return {
        "layers": number(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "attention_heads": number(config, "num_attention_heads"),
        "intermediate_size": number(config, "ffn_dim"),
        "sequence_length": length,
        "position_embeddings": length + 2,
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
        "activation": "relu",
        "joined_qkv": False,
    }


def _falcon(config: Config) -> Fields:
    """Return the fields of Falcon: parallel attention and MLP share a norm, or have two."""
    must(config, "activation", GELUS)
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    newer = flag(config, "new_decoder_architecture", default=False)
    parallel = newer or flag(config, "parallel_attn", default=True)
    many = not newer and not flag(config, "multi_query", default=True)
    shared = number(config, "num_kv_heads", heads) if newer else heads if many else 1
    norms = number(config, "num_ln_in_parallel_attn", 2) if newer else 1
    return {
        "layers": number(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": shared,
        "intermediate_size": number(config, "ffn_hidden_size", 4 * hidden),
        "sequence_length": number(config, "max_position_embeddings", 2048),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=True),
        "positions": "alibi" if flag(config, "alibi", default=False) else "rotary",
        "bias": flag(config, "bias", default=False),
        "norm_bias": True,
        "parallel_residual": parallel,
        "shared_norm": parallel and norms == 1,
    }


READERS: dict[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mpt": _mpt,
    "llama": biased_llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "opt": _opt,
    "falcon": _falcon,
    **DECODERS,
    **EXPERTS,
}
"""Readers by `model_type`."""

REFUSED: dict[str, tuple[str, ...]] = {
    "an encoder and a decoder, only decoders are modelled": (
        "t5",
        "mt5",
        "umt5",
        "longt5",
        "bart",
        "whisper",
        "pegasus",
        "marian",
        "mbart",
        "m2m_100",
        "blenderbot",
        "t5gemma",
    ),
    "an encoder, only decoders are modelled": (
        "bert",
        "roberta",
        "distilbert",
        "albert",
        "electra",
        "deberta",
        "deberta-v2",
        "xlm-roberta",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "esm",
    ),
    "of images or sound, only decoders of text are modelled": (
        "vit",
        "clip",
        "siglip",
        "dinov2",
        "swin",
        "convnext",
        "wav2vec2",
        "hubert",
    ),
    "a decoder with an encoder of images or sound; save its text_config as config.json": (
        "gemma3",
        "gemma3n",
        "mistral3",
        "mllama",
        "llava",
        "llava_next",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "idefics3",
        "smolvlm",
        "internvl",
        "internvl_chat",
        "paligemma",
        "phi4_multimodal",
        "glm4v",
        "kimi_vl",
        "llama4",
        "qwen3_vl_moe",
    ),
    "recurrent, or a hybrid with recurrent or state space layers; only attention is modelled": (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "recurrent_gemma",
        "xlstm",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "nemotron_h",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "qwen3_next",
        "qwen3_5_moe",
        "minimax",
        "kimi_linear",
    ),
    "with blocks that are not modelled": (
        "minicpm3",
        "longcat_flash",
    ),
    "with layers of different shapes, which are not modelled": ("openelm", "nemotron-nas"),
    "a mixture of experts whose blocks are not modelled": (
        "dbrx",
        "switch_transformers",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "minimax_m2",
        "dots1",
        "jetmoe",
        "grok-1",
        "arctic",
        "flex_olmo",
        "deepseek_v32",
        "glm_moe_dsa",
    ),
}
"""Reasons why common architectures cannot be read, each with its `model_type` values."""
