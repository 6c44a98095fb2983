"""Values in a `config.json`, checks of unsupported ones, and the fields that most models share."""

from zsim.config_error import bare, shown
from zsim.scenario.tables import ScenarioError

Config = dict[str, object]
Fields = dict[str, object]


def number(config: Config, name: str, default: int | None = None) -> int:
    """Return a positive whole number, or the default if it is not given."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ScenarioError(f"model.hf_config: {name}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        why = f"{shown(value)} must be a positive whole number"
        raise ScenarioError(f"model.hf_config: {name}: {why}")
    return value


def flag(config: Config, name: str, *, default: bool) -> bool:
    """Return a flag, or the default if it is not given."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ScenarioError(f"model.hf_config: {name}: {shown(value)} must be true or false")
    return value


def must(config: Config, name: str, allowed: tuple[object, ...]) -> None:
    """Raise ScenarioError unless a value is in `allowed`, whose first is the default.

    Raises:
        ScenarioError: the value is not modelled.
    """
    value = config.get(name, allowed[0])
    if value not in allowed:
        known = " or ".join(bare(each) for each in allowed)
        raise ScenarioError(
            f"model.hf_config: {name}: {shown(value)} is not modelled, only {known}"
        )


def decoder(config: Config) -> Fields:
    """Return the fields that most configurations since Llama's give under the same names."""
    heads = number(config, "num_attention_heads")
    fields: Fields = {
        "architecture": "llama",
        "layers": number(config, "num_hidden_layers"),
        "hidden_size": number(config, "hidden_size"),
        "attention_heads": heads,
        "key_value_heads": number(config, "num_key_value_heads", heads),
        "intermediate_size": number(config, "intermediate_size"),
        "sequence_length": number(config, "max_position_embeddings"),
        "vocab_size": number(config, "vocab_size"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default=False),
    }
    if config.get("head_dim") is not None:
        fields["head_size"] = number(config, "head_dim")
    return fields


def windows(config: Config) -> Fields:
    """Return the window of all blocks, if there is one."""
    if config.get("sliding_window") is None:
        return {}
    return {"window": number(config, "sliding_window")}


def alternating(config: Config, every: int) -> Fields:
    """Return windows of all blocks but every n-th one; `layer_types` must match if given."""
    listed, layers = config.get("layer_types"), number(config, "num_hidden_layers")
    expected = [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    if listed is not None and listed != expected:
        raise ScenarioError(
            f"model.hf_config: layer_types: only full_attention in one of {every} layers, the "
            "last, and sliding_attention in the others is modelled"
        )
    return {"window": number(config, "sliding_window", 4096), "global_every": every}


def llama(config: Config) -> Fields:
    """Return the fields of a decoder with a gated SiLU and without biases."""
    must(config, "hidden_act", ("silu",))
    for name in ("attention_bias", "mlp_bias"):
        must(config, name, (False,))
    return decoder(config)


def biased_llama(config: Config) -> Fields:
    """Return Llama's fields; `attention_bias` gives all four layers of attention a bias."""
    fields = llama(config | {"attention_bias": False})
    if flag(config, "attention_bias", default=False):
        fields |= {"qkv_bias": True, "output_bias": True}
    return fields
