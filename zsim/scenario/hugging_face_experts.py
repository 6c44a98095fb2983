"""Readers of `config.json`: decoders with routed experts, by `model_type`.

An optional key has the default of the configuration class in transformers (5.23). The number of MTP
layers (`num_nextn_predict_layers`) is ignored: transformers builds none of them. An auxiliary loss
is read from `output_router_logits`, which adds it in training.
"""

from zsim.config_error import shown
from zsim.scenario.hugging_face_values import (
    Config,
    Fields,
    alternating,
    biased_llama,
    flag,
    llama,
    must,
    number,
    windows,
)
from zsim.scenario.tables import ScenarioError


def _whole(config: Config, name: str, default: int | None = None) -> int:
    """Return a whole number that may be 0, or the default if it is not given."""
    value = config.get(name)
    if value is None:
        value = default
    if value is not None and value == 0 and not isinstance(value, bool):
        return 0
    return number(config, name, default)


def _first_dense(config: Config) -> int:
    """Return the number of first blocks without experts in `mlp_only_layers`, which lists blocks.

    Raises:
        ScenarioError: it lists others.
    """
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or listed != [*range(len(listed))]:
        raise ScenarioError(
            f"model.hf_config: mlp_only_layers: {shown(listed)} is not modelled, only the first "
            "layers"
        )
    return len(listed)


def _experts(config: Config, count: str, width: str, **fields: object) -> Fields:
    """Return the fields of experts: their number and width under these names, and `fields`."""
    other = "num_local_experts" if count != "num_local_experts" else "num_experts"
    named = count if config.get(count) is not None else other
    return {
        "count": number(config, named),
        "top_k": number(config, "num_experts_per_tok"),
        "intermediate_size": number(config, width),
        **fields,
        **_auxiliary_loss(config),
    }


def _auxiliary_loss(config: Config) -> Fields:
    """Return the fields of the auxiliary loss of routers that the file has."""
    key, found = "router_aux_loss_coef", dict[str, object]()
    factor = config.get(key)
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float)):
        raise ScenarioError(f"model.hf_config: {key}: {shown(factor)} must be a number")
    if "output_router_logits" in config:
        is_added = flag(config, "output_router_logits", default=False)
        found["auxiliary_loss"] = is_added and factor != 0
    if factor and found.get("auxiliary_loss", True):
        found["auxiliary_coefficient"] = factor
    return found


def _mixtral(config: Config) -> Fields:
    merged: Config = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "max_position_embeddings": 131_072,
    } | config
    experts = _experts(merged, "num_local_experts", "intermediate_size")
    return llama(merged) | windows(merged) | {"experts": experts}


def _qwen2_moe(config: Config) -> Fields:
    """Return the fields of Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate."""
    must(config, "use_sliding_window", (False,))
    merged: Config = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "intermediate_size": 5632,
        "shared_expert_intermediate_size": 5632,
        "max_position_embeddings": 32_768,
    } | config
    experts = _experts(
        merged,
        "num_experts",
        "moe_intermediate_size",
        shared_intermediate_size=number(merged, "shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=_first_dense(merged),
        every=number(merged, "decoder_sparse_step", 1),
        normalised=flag(merged, "norm_topk_prob", default=False),
    )
    biased = flag(merged, "qkv_bias", default=True)
    return llama(merged) | {"qkv_bias": biased, "experts": experts}


def _qwen3_moe(config: Config) -> Fields:
    must(config, "use_sliding_window", (False,))
    merged: Config = {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "max_position_embeddings": 32_768,
    } | config
    experts = _experts(
        merged,
        "num_experts",
        "moe_intermediate_size",
        dense_layers=_first_dense(merged),
        every=number(merged, "decoder_sparse_step", 1),
        normalised=flag(merged, "norm_topk_prob", default=False),
    )
    return biased_llama(merged) | {"qk_norm": "head", "experts": experts}


def _latent(config: Config) -> Fields:
    """Return the fields of latent attention."""
    rank = config.get("q_lora_rank", 1536)
    return {
        "key_value_rank": number(config, "kv_lora_rank", 512),
        **({} if rank is None else {"query_rank": number(config, "q_lora_rank", 1536)}),
        "nope_size": number(config, "qk_nope_head_dim", 128),
        "rope_size": number(config, "qk_rope_head_dim", 64),
        "value_size": number(config, "v_head_dim", 128),
        "bias": flag(config, "attention_bias", default=False),
    }


def _deepseek(config: Config, **routing: object) -> Fields:
    """Return the fields of DeepSeek 2 and 3: latent attention, shared experts, first dense blocks.

    Several shared experts are one MLP with the sum of their widths (`DeepseekV3MoE`).
    """
    must(config, "moe_layer_freq", (1,))
    biased = flag(config, "attention_bias", default=False)
    changed: Config = {"attention_bias": False, "num_key_value_heads": None, "head_dim": None}
    width = number(config, "moe_intermediate_size")
    shared = width * _whole(config, "n_shared_experts", 0)
    groups = _whole(config, "n_group", 1) or 1
    fields = llama(config | changed)
    del fields["key_value_heads"]
    experts = _experts(
        config,
        "n_routed_experts",
        "moe_intermediate_size",
        shared_intermediate_size=shared,
        dense_layers=_whole(config, "first_k_dense_replace", 0),
        groups=groups,
        top_groups=_whole(config, "topk_group", groups) or groups,
        scaling=config.get("routed_scaling_factor") or 1.0,
        router_format="fp32",
        **routing,
    )
    if biased:
        fields |= {"output_bias": True}
    return fields | {"latent": _latent(config), "experts": experts}


def _deepseek_v2(config: Config) -> Fields:
    must(config, "topk_method", ("greedy", "group_limited_greedy"))
    merged: Config = {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
    } | config
    if merged.get("topk_method") == "greedy" or merged.get("n_group") is None:
        merged |= {"n_group": 1, "topk_group": 1}
    return _deepseek(merged, normalised=flag(merged, "norm_topk_prob", default=False))


def _deepseek_v3(config: Config) -> Fields:
    """Return the fields of DeepSeek 3, and of Moonlight and Kimi K2, which are built like it."""
    must(config, "topk_method", ("noaux_tc",))
    must(config, "scoring_func", ("sigmoid",))
    merged: Config = {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18_432,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    } | config
    normalised = flag(merged, "norm_topk_prob", default=True)
    return _deepseek(merged, scores="sigmoid", score_bias=True, normalised=normalised)


def _glm4_moe(config: Config) -> Fields:
    merged: Config = {
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "intermediate_size": 10_944,
        "max_position_embeddings": 131_072,
    } | config
    width = number(merged, "moe_intermediate_size")
    groups = number(merged, "n_group", 1)
    experts = _experts(
        merged,
        "n_routed_experts",
        "moe_intermediate_size",
        shared_intermediate_size=width * _whole(merged, "n_shared_experts", 1),
        dense_layers=_whole(merged, "first_k_dense_replace", 1),
        scores="sigmoid",
        score_bias=True,
        normalised=flag(merged, "norm_topk_prob", default=True),
        scaling=merged.get("routed_scaling_factor") or 1.0,
        groups=groups,
        top_groups=number(merged, "topk_group", groups),
        router_format="fp32",
    )
    fields = llama(merged | {"attention_bias": False}) | {
        "qkv_bias": flag(merged, "attention_bias", default=False),
        "experts": experts,
    }
    return fields | ({"qk_norm": "head"} if flag(merged, "use_qk_norm", default=False) else {})


def _gpt_oss(config: Config) -> Fields:
    """Return the fields of GPT-OSS: sinks, windows in every other block, biases of experts."""
    merged: Config = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
    } | config
    biased = flag(merged, "attention_bias", default=True)
    experts = _experts(
        merged,
        "num_local_experts",
        "intermediate_size",
        scores="softmax_of_chosen",
        normalised=False,
        router_bias=True,
        bias=True,
    )
    return (
        llama(merged | {"attention_bias": False})
        | alternating(merged, 2)
        | {"qkv_bias": biased, "output_bias": biased, "sinks": True, "experts": experts}
    )


def _olmoe(config: Config) -> Fields:
    must(config, "clip_qkv", (None,))
    merged: Config = {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
    } | config
    normalised = flag(merged, "norm_topk_prob", default=False)
    experts = _experts(merged, "num_experts", "intermediate_size", normalised=normalised)
    return biased_llama(merged) | {"qk_norm": "width", "experts": experts}


def _phimoe(config: Config) -> Fields:
    """Return the fields of Phi-3.5-MoE: layer norms, biases of attention and of the head."""
    must(config, "hidden_act", ("silu",))
    merged: Config = {
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "intermediate_size": 6400,
        "max_position_embeddings": 131_072,
    } | config
    experts = _experts(merged, "num_local_experts", "intermediate_size", normalised=False)
    return (
        biased_llama(merged)
        | windows(merged)
        | {
            "norm": "layer",
            "norm_bias": True,
            "head_bias": flag(merged, "lm_head_bias", default=False),
            "experts": experts,
        }
    )


def _granitemoe(config: Config) -> Fields:
    merged: Config = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
    } | config
    experts = _experts(
        merged,
        "num_local_experts",
        "intermediate_size",
        scores="softmax_of_chosen",
        normalised=False,
        shared_intermediate_size=_whole(merged, "shared_intermediate_size", 0),
    )
    return biased_llama(merged) | {"experts": experts}


def _llama4(config: Config) -> Fields:
    """Return the fields of the text model of Llama 4: some blocks have experts and a shared one.

    Attention in chunks counts as a window of their length, which all but every n-th block has.

    Raises:
        ScenarioError: other blocks have experts, or see all tokens.
    """
    merged: Config = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 131_072,
    } | config
    layers, every = (
        number(merged, "num_hidden_layers"),
        number(merged, "interleave_moe_layer_step", 1),
    )
    listed, expected = merged.get("moe_layers"), [*range(every - 1, layers, every)]
    if listed is not None and listed != expected:
        raise ScenarioError(
            f"model.hf_config: moe_layers: {shown(listed)} is not modelled, only every "
            f"{every}-th layer, as interleave_moe_layer_step says"
        )
    width = number(merged, "intermediate_size")
    experts = _experts(
        merged,
        "num_local_experts",
        "intermediate_size",
        shared_intermediate_size=width,
        every=every,
        scores="sigmoid",
        normalised=False,
    )
    dense: Config = {"intermediate_size": number(merged, "intermediate_size_mlp")}
    fields = biased_llama(merged | dense) | {"experts": experts}
    if flag(merged, "use_qk_norm", default=True):
        fields |= {"qk_norm": "unscaled"}
    if merged.get("attention_chunk_size", 8192) is None:
        return fields
    apart = number(merged, "no_rope_layer_interval", 4)
    usual = [int((layer + 1) % apart != 0) for layer in range(layers)]
    if merged.get("no_rope_layers") not in (None, [], usual):
        raise ScenarioError(
            f"model.hf_config: no_rope_layers: only every {apart}-th layer without positions is "
            "modelled, as no_rope_layer_interval says"
        )
    return fields | {
        "window": number(merged, "attention_chunk_size", 8192),
        "global_every": apart,
    }


EXPERTS = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "llama4_text": _llama4,
}
"""Readers by `model_type`."""
