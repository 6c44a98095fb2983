"""The shape of a model from the `config.json` that Hugging Face's transformers writes beside it.

What parameters, FLOPs and bytes depend on is read. Not read are dropout, the epsilons of norms,
initialization, and the base, the scaling and the share of rotary positions. A key that may be left
out has the default of the configuration class in transformers (4.46, as recalled).
"""

import json
from collections.abc import Callable
from typing import cast

from pydantic import ValidationError

from zsim.config_error import line
from zsim.scenario.tables import ModelTable, Scenario, ScenarioError

Config = dict[str, object]
Fields = dict[str, object]


def configured(scenario: Scenario, text: str) -> Scenario:
    """Return `scenario` with the shape in `text`, a config.json; what `[model]` says itself stays.

    Raises:
        ScenarioError: it is no configuration, or of an architecture that zsim does not know.
    """
    table = scenario.model
    given = {name: getattr(table, name) for name in table.model_fields_set - {"hf_config"}}
    fields = {"architecture": "gpt", **shape_fields(text), **given}
    try:
        read = ModelTable.model_validate(fields)
    except ValidationError as error:
        why = line(error.errors(include_url=False), ModelTable)
        raise ScenarioError(f"model.hf_config: {why}") from None
    return scenario.model_copy(update={"model": read})


def shape_fields(text: str) -> Fields:
    """Return the fields of `[model]` that a config.json gives.

    Raises:
        ScenarioError: it is no configuration, or of an architecture that zsim does not know.
    """
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise ScenarioError(f"model.hf_config: not JSON: {error}") from None
    except RecursionError:
        raise ScenarioError("model.hf_config: not JSON: nested too deeply") from None
    if not isinstance(found, dict):
        raise ScenarioError("model.hf_config: must be an object, as config.json is")
    config = cast("Config", found)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        known = ", ".join(READERS)
        raise ScenarioError(f"model.hf_config: model_type {kind!r} must be one of {known}")
    return READERS[kind](config)


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ScenarioError(f"model.hf_config: {name}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScenarioError(f"model.hf_config: {name}: {value!r} must be a positive whole number")
    return value


def _flag(config: Config, name: str, *, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ScenarioError(f"model.hf_config: {name}: {value!r} must be true or false")
    return value


def _must(config: Config, name: str, allowed: tuple[object, ...]) -> None:
    """Refuse what is not modelled; the first of `allowed` is what a missing key means."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        shown = " or ".join(str(each) for each in allowed)
        raise ScenarioError(f"model.hf_config: {name}: {value!r} is not modelled, only {shown}")


GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Forms of GELU, which cost the same."""


def _gpt2(config: Config) -> Fields:
    _must(config, "activation_function", ("gelu_new", *GELUS))
    _must(config, "add_cross_attention", (False,))
    hidden = _number(config, "n_embd")
    positions = _number(config, "n_positions")
    return {
        "layers": _number(config, "n_layer"),
        "hidden_size": hidden,
        "attention_heads": _number(config, "n_head"),
        "intermediate_size": _number(config, "n_inner", 4 * hidden),
        "sequence_length": positions,
        "position_embeddings": positions,
        "vocab_size": _number(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=True),
    }


def _gpt_neox(config: Config) -> Fields:
    _must(config, "hidden_act", GELUS)
    return {
        "layers": _number(config, "num_hidden_layers"),
        "hidden_size": _number(config, "hidden_size"),
        "attention_heads": _number(config, "num_attention_heads"),
        "intermediate_size": _number(config, "intermediate_size"),
        "sequence_length": _number(config, "max_position_embeddings"),
        "vocab_size": _number(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=False),
        "positions": "rotary",
        "parallel_residual": _flag(config, "use_parallel_residual", default=True),
        "qkv_bias": _flag(config, "attention_bias", default=True),
    }


def _mpt(config: Config) -> Fields:
    """MosaicML's MPT: ALiBi, or learned positions where it is off."""
    inner = config.get("attn_config") or {}
    if not isinstance(inner, dict):
        raise ScenarioError("model.hf_config: attn_config: must be an object")
    attention = cast("Config", inner)
    _must(attention, "qk_ln", (False,))
    hidden, heads = _number(config, "d_model"), _number(config, "n_heads")
    shared = {"multiquery_attention": 1, "grouped_query_attention": None}.get(
        str(attention.get("attn_type")), heads
    )
    fields: Fields = {
        "layers": _number(config, "n_layers"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": _number(attention, "kv_n_heads", shared),
        "intermediate_size": hidden * _number(config, "expansion_ratio", 4),
        "sequence_length": _number(config, "max_seq_len"),
        "vocab_size": _number(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=True),
        "bias": not _flag(config, "no_bias", default=True),
        "positions": "alibi" if _flag(attention, "alibi", default=True) else "learned",
        "norm": "rms" if "rms" in str(config.get("norm_type")) else "layer",
    }
    if fields["positions"] == "learned":
        fields["position_embeddings"] = fields["sequence_length"]
    return fields


def _llama(config: Config) -> Fields:
    _must(config, "hidden_act", ("silu",))
    for name in ("attention_bias", "mlp_bias"):
        _must(config, name, (False,))
    heads, length = _number(config, "num_attention_heads"), _length(config)
    fields: Fields = {
        "architecture": "llama",
        "layers": _number(config, "num_hidden_layers"),
        "hidden_size": _number(config, "hidden_size"),
        "attention_heads": heads,
        "key_value_heads": _number(config, "num_key_value_heads", heads),
        "intermediate_size": _number(config, "intermediate_size"),
        "sequence_length": length,
        "vocab_size": _number(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", default=False),
    }
    if config.get("head_dim") is not None:
        fields["head_size"] = _number(config, "head_dim")
    return fields


def _length(config: Config) -> int:
    """Return the longest sequence, of tokens that all see each other."""
    length = _number(config, "max_position_embeddings")
    window = config.get("sliding_window")
    if window is None or not _flag(config, "use_sliding_window", default=True):
        return length
    return min(length, _number(config, "sliding_window"))


def _qwen2(config: Config) -> Fields:
    """As Llama, with biases of queries, keys and values; its window is off if it is not named."""
    window = {"use_sliding_window": False} | config
    return {**_llama(window), "qkv_bias": True}


READERS: dict[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mpt": _mpt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
}
"""By `model_type`, what reads its configuration."""
