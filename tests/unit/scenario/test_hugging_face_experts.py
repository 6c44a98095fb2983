"""Mixtures of experts have as many parameters as the modules of transformers, or the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from published_experts import PUBLISHED
from transformers_counts import SIZES, counted, counted_by_transformers

import zsim
from zsim.files.installed import model_catalogue
from zsim.model.architecture import Llama
from zsim.model.experts import Experts, Latent
from zsim.scenario.hugging_face import shape_fields
from zsim.scenario.hugging_face_experts import EXPERTS
from zsim.scenario.model_catalogue import ActiveCount, CatalogueModel
from zsim.scenario.tables import ModelTable, ScenarioError

Config = dict[str, object]
SMALL: Config = SIZES | {"num_experts_per_tok": 2}
LATENT: Config = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
}
QWEN2: Config = {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
QWEN3: Config = {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
GLM: Config = {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
OSS: Config = {"num_local_experts": 4, "head_dim": 16}
LLAMA4: Config = {"num_local_experts": 4, "intermediate_size_mlp": 80, "head_dim": 16}
FOUR: Config = {"num_local_experts": 4}
CASES: list[tuple[str, Config]] = [
    ("mixtral", FOUR),
    ("mixtral", FOUR | {"tie_word_embeddings": True}),
    ("qwen2_moe", QWEN2),
    ("qwen2_moe", QWEN2 | {"decoder_sparse_step": 2}),
    ("qwen2_moe", QWEN2 | {"mlp_only_layers": [0, 1], "qkv_bias": False}),
    ("qwen3_moe", QWEN3),
    ("qwen3_moe", QWEN3 | {"attention_bias": True, "decoder_sparse_step": 2}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", LATENT | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2}),
    ("deepseek_v3", LATENT | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}),
    ("gpt_oss", OSS),
    ("gpt_oss", OSS | {"attention_bias": False}),
    ("olmoe", {"num_experts": 4}),
    ("glm4_moe", GLM | {"use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", GLM | {"n_shared_experts": 2, "first_k_dense_replace": 2}),
    ("phimoe", FOUR | {"attention_bias": True, "lm_head_bias": True}),
    ("phimoe", FOUR),
    ("granitemoe", FOUR | {"tie_word_embeddings": True}),
    ("granitemoeshared", FOUR | {"shared_intermediate_size": 48}),
    ("granitemoeshared", FOUR),
    ("llama4_text", LLAMA4 | {"num_experts_per_tok": 1}),
    ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2, "attention_bias": True}),
]


@pytest.mark.parametrize(
    ("kind", "changes"), CASES, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(CASES)]
)
def test_a_mixture_has_the_parameters_of_its_module_in_transformers(
    kind: str, changes: Config, tmp_path: Path
) -> None:
    config = {"model_type": kind, **SMALL, **changes}
    of_module = counted_by_transformers(config | {"pad_token_id": 0, "eos_token_id": 0})
    assert counted(config, tmp_path) == of_module


def test_every_type_with_experts_is_compared_with_its_module() -> None:
    """Kimi K2 is built like DeepSeek 3, by code that is published with its weights."""
    assert {kind for kind, _ in CASES} == EXPERTS.keys() - {"kimi_k2"}


SHIPPED: dict[str, CatalogueModel] = {
    each.name: each for each in model_catalogue().models if each.shape.experts is not None
}


def test_at_least_twelve_mixtures_ship_by_name() -> None:
    assert len(SHIPPED) >= 12
    assert SHIPPED.keys() == PUBLISHED.keys()


def shape_from(table: ModelTable) -> Llama:
    """Return the shape in a table, with a short sequence."""
    given: dict[str, Any] = table.model_dump(exclude={"architecture"}, exclude_none=True)
    given["sequence_length"] = 1024
    if "experts" in given:
        given["experts"] = Experts(**given["experts"])
    if "latent" in given:
        given["latent"] = Latent(**given["latent"])
    return Llama(**given)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_gives_the_shape_that_ships(name: str) -> None:
    """Except the sequence: the shipped one is that of the training."""
    read = ModelTable.model_validate(shape_fields(json.dumps(PUBLISHED[name])))
    assert shape_from(read) == shape_from(SHIPPED[name].shape)


def active_by(name: str) -> int:
    """Active parameters of a model by the convention of its card."""
    model = zsim.load("tiny", {"model.name": name, "model.sequence_length": 128}).model
    shape = model.architecture
    assert shape is not None
    embedding = shape.vocab_size * shape.hidden_size
    tied = shape.tied_embeddings
    left_out = {
        ActiveCount.ALL: 0,
        ActiveCount.WITHOUT_INPUT: 0 if tied else embedding,
        ActiveCount.WITHOUT_EMBEDDINGS: embedding if tied else 2 * embedding,
    }
    return model.active_count - left_out[SHIPPED[name].active_counts]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", SHIPPED)
def test_active_parameters_are_those_of_the_card_to_its_last_digit(name: str) -> None:
    """Rounded, or cut off: Qwen states 3.3 of 3.353 billion, DeepSeek 2.4 of 2.451."""
    card, counted_ = SHIPPED[name].active_parameters, active_by(name)
    assert card is not None
    digits = str(card).rstrip("0")
    unit = 10 ** (len(str(card)) - len(digits))
    if len(digits) == 1:  # "400M" of Granite, "22B" has two digits
        unit //= 10
        assert abs(counted_ - card) <= 3 * unit
        return
    assert card in (counted_ // unit * unit, (counted_ + unit // 2) // unit * unit)


def test_the_stored_weights_of_glm_hold_a_block_more_and_two_matrices_twice() -> None:
    """110,468,824,832 elements on Hugging Face, with the block that predicts a second token.

    Its file repeats the embedding and the head. A bias of scores for each expert is stored, too.
    """
    further = zsim.load("tiny", {"model.name": "glm-4.5-air", "model.mtp_layers": 1}).model
    shape = further.architecture
    assert shape is not None
    assert shape.experts is not None
    routed = sum(map(shape.has_experts, range(shape.layers)))
    biases = (routed + 1) * shape.experts.count
    twice = 2 * shape.vocab_size * shape.hidden_size
    assert further.parameter_count + twice + biases == 110_468_824_832


def fields_of(kind: str, **changes: object) -> dict[str, Any]:
    found = shape_fields(json.dumps({"model_type": kind, **SMALL, **changes}))
    return ModelTable.model_validate(found).model_dump(exclude_unset=True)


def test_the_routing_of_deepseek_3_is_read() -> None:
    fields = fields_of("deepseek_v3", **LATENT, n_group=4, topk_group=2, routed_scaling_factor=1.5)
    routing = fields["experts"]
    assert routing["scores"] == "sigmoid"
    assert (routing["groups"], routing["top_groups"], routing["scaling"]) == (4, 2, 1.5)
    assert routing["score_bias"]
    assert routing["normalised"]
    assert routing["router_format"] == "fp32"
    assert fields["latent"]["query_rank"] == 24
    assert "mtp_layers" not in fields_of("deepseek_v3", **LATENT, num_nextn_predict_layers=1)


def test_every_second_block_of_gpt_oss_has_a_window_and_all_have_sinks() -> None:
    fields = fields_of("gpt_oss", **OSS)
    assert (fields["window"], fields["global_every"], fields["sinks"]) == (128, 2, True)
    assert fields["experts"]["scores"] == "softmax_of_chosen"
    assert fields["experts"]["bias"]


def test_an_auxiliary_loss_is_read_if_the_file_names_its_switch() -> None:
    assert "auxiliary_loss" not in fields_of("mixtral", **FOUR)["experts"]
    for given in (True, False):
        fields = fields_of("mixtral", **FOUR, output_router_logits=given)
        assert fields["experts"]["auxiliary_loss"] is given
        none = fields_of("mixtral", **FOUR, output_router_logits=given, router_aux_loss_coef=0.0)
        assert none["experts"]["auxiliary_loss"] is False


def test_the_factor_of_an_auxiliary_loss_is_that_of_the_file() -> None:
    added = fields_of("mixtral", **FOUR, output_router_logits=True, router_aux_loss_coef=0.02)
    assert added["experts"]["auxiliary_coefficient"] == 0.02
    alone = fields_of("mixtral", **FOUR, router_aux_loss_coef=0.02)
    assert alone["experts"]["auxiliary_coefficient"] == 0.02
    off = fields_of("mixtral", **FOUR, output_router_logits=False, router_aux_loss_coef=0.02)
    assert "auxiliary_coefficient" not in off["experts"]
    with pytest.raises(ScenarioError, match="router_aux_loss_coef: 'small' must be a number"):
        fields_of("mixtral", **FOUR, router_aux_loss_coef="small")


WRONG: list[tuple[Config, str]] = [
    (
        {"model_type": "qwen2_moe", **QWEN2, "mlp_only_layers": [3]},
        "mlp_only_layers: [3] is not modelled, only the first layers",
    ),
    (
        {"model_type": "llama4_text", **LLAMA4, "moe_layers": [0]},
        "moe_layers: [0] is not modelled, only every 1-th layer, as interleave_moe_layer_step says",
    ),
    (
        {"model_type": "deepseek_v3", **LATENT, "scoring_func": "softmax"},
        'scoring_func: "softmax" is not modelled, only sigmoid',
    ),
    (
        {"model_type": "olmoe", "num_experts": 4, "clip_qkv": 8.0},
        "clip_qkv: 8.0 is not modelled, only null",
    ),
]


@pytest.mark.parametrize(("config", "line"), WRONG, ids=[line[:12] for _, line in WRONG])
def test_experts_that_are_not_modelled_are_one_line(config: Config, line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        shape_fields(json.dumps({**SMALL, **config}))
    assert line.partition(":")[0] in str(caught.value)
    assert "is not modelled" in str(caught.value)


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_next", "granitemoehybrid", "jamba"])
def test_hybrids_are_refused_by_name_with_the_reason(kind: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        shape_fields(json.dumps({"model_type": kind}))
    assert str(caught.value) == (
        f"model.hf_config: model_type '{kind}' is recurrent, or a hybrid with recurrent or state "
        "space layers; only attention is modelled"
    )


@pytest.mark.parametrize("name", ["nvidia/Nemotron-H-8B-Base-8K", "Qwen/Qwen3-Next-80B-A3B-Base"])
def test_names_of_hybrids_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ScenarioError, match="a hybrid with recurrent or state space layers"):
        model_catalogue().find(name)
