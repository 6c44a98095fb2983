"""A configuration of LLM Foundry is read as a scenario; anything else is refused in one line."""

from functools import partial

import pytest

from zsim.files.installed import model_catalogue
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="foundry_config")

TEXT = """
title = "from LLM Foundry"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
foundry_config = "mpt.yaml"
[train]
"""
MPT = """
variables: {max_seq_len: 256, seed: 17}
max_seq_len: ${variables.max_seq_len}
run_name:
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 64
  n_heads: 4
  n_layers: 3
  expansion_ratio: 3
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 512
  attn_config: {attn_impl: torch, alibi: true}
tokenizer: {name: gpt2}
train_loader: {name: text, dataset: {max_seq_len: 256}}
scheduler: {name: cosine_with_warmup}
optimizer: {name: decoupled_adamw, lr: 1.2e-4, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.0}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
max_duration: 512ba
global_train_batch_size: 64
device_train_microbatch_size: 4
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: true
  activation_checkpointing_reentrant: false
  activation_cpu_offload: false
  limit_all_gathers: true
callbacks: {lr_monitor: {}}
"""
LLAMA = MPT[: MPT.index("model:")] + (
    "model:\n  name: hf_causal_lm\n  pretrained: true\n"
    "  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B\n  use_flash_attention_2: true\n"
    "tokenizer:" + MPT.partition("tokenizer:")[2]
)


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text, model_catalogue())[0]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_mpt_is_read_with_its_batches_and_fsdp() -> None:
    found = read(MPT)
    assert found.model.model_dump(exclude_unset=True) == {
        "architecture": "gpt",
        "layers": 3,
        "hidden_size": 64,
        "attention_heads": 4,
        "vocab_size": 512,
        "intermediate_size": 192,
        "bias": True,
        "tied_embeddings": True,
        "norm": "layer",
        "activation": "gelu",
        "attention": "plain",
        "positions": "alibi",
        "sequence_length": 256,
    }
    assert (found.zero.emulate, found.zero.stage) == ("fsdp1", 3)
    assert found.zero.model_dump()["fsdp1"] == {
        "sharding_strategy": "full_shard",
        "backward_prefetch": "backward_post",
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "no_sync": False,
    }
    train = found.train
    assert (train.micro_batch_size, train.global_batch_size) == (4, 64)
    assert (train.precision, train.loss, train.clip_norm) == ("bf16", "fused", 1.0)
    assert train.model_dump()["beta2"] == 0.95
    assert found.activations.checkpointing == "full"


def test_a_model_of_hugging_face_is_read_by_its_name() -> None:
    found = read(LLAMA)
    assert (found.model.layers, found.model.hidden_size) == (32, 4096)
    assert (found.model.sequence_length, found.model.attention) == (256, "flash2")
    own = LLAMA.replace("meta-llama/Meta-Llama-3-8B", "me/mine")
    assert "me/mine" in refusal(own)
    shape = ["layers=2", "hidden_size=64", "attention_heads=4", "vocab_size=512"]
    assert read(own, *(f"model.{each}" for each in shape)).model.layers == 2


def test_a_file_of_mcli_has_its_sections_inside_and_the_number_of_gpus() -> None:
    inner = "".join(f"  {line}\n" for line in MPT.strip().splitlines())
    scenario = parse(TEXT.replace("nodes = 1\n", ""))
    found = configured(scenario, f"name: a\ncompute: {{gpus: 16}}\nparameters:\n{inner}")[0]
    assert found.parallel.data == 16
    assert found.model == read(MPT).model


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("alibi: true", "rope: true", "positions", "rotary"),
        ("alibi: true", "alibi: false", "positions", "learned"),
        ("alibi: true", "qk_ln: true", "qk_norm", "width"),
        ("alibi: true", "attn_type: multiquery_attention", "key_value_heads", 1),
        ("alibi: true", "attn_type: grouped_query_attention, kv_n_heads: 2", "key_value_heads", 2),
        ("alibi: true", "sliding_window_size: 64", "window", 64),
        ("attn_impl: torch", "attn_impl: flash", "attention", "flash2"),
        ("vocab_size: 512", "vocab_size: 512\n  no_bias: true", "bias", False),
        ("vocab_size: 512", "vocab_size: 512\n  norm_type: rmsnorm", "norm", "rms"),
        (
            "vocab_size: 512",
            "vocab_size: 512\n  ffn_config: {ffn_type: mptglu}",
            *("activation", "geglu"),
        ),
    ],
)
def test_parts_of_mpt_are_read(old: str, new: str, field: str, value: object) -> None:
    assert read(MPT.replace(old, new)).model.model_dump()[field] == value


def test_offloaded_inputs_of_checkpointed_blocks_are_followed() -> None:
    found = read(MPT.replace("cpu_offload: false", "cpu_offload: true"))
    assert found.zero.model_dump()["fsdp1"]["offload_wrapper"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("PURE", "DEFAULT", '"DEFAULT" gathers parameters in fp32, which is not modelled, only'),
        ("  mixed_precision: PURE\n", "", '"DEFAULT" gathers parameters in fp32'),
        ("FULL_SHARD", "NO_SHARD", '"NO_SHARD" must be FULL_SHARD or SHARD_GRAD_OP'),
        ("microbatch_size: 4", "microbatch_size: auto", "give train.micro_batch_size"),
        ("decoupled_adamw", "decoupled_lionw", '"decoupled_lionw" must be decoupled_adamw or'),
        ("amp_bf16", "amp_fp8", '"amp_fp8" must be amp_bf16 or amp_fp16 or fp32'),
        ("clipping_type: norm", "clipping_type: value", '"value" must be norm'),
        ("mpt_causal_lm", "hf_t5", '"hf_t5" is not modelled, only mpt_causal_lm and hf_causal_lm'),
        ("alibi: true", "attn_uses_sequence_id: true", "attn_uses_sequence_id: true is not mod"),
        ("alibi: true", "clip_qkv: 8", "clip_qkv: 8 is not modelled"),
        ("activation_checkpointing: true", "activation_checkpointing_target: a", 'target: "a" is'),
        ("run_name:", "tp_config: {strategy: ffn}\nrun_name:", 'tp_config.strategy: "ffn" is not'),
        ("  name: mpt_causal_lm\n", "", "model.name: missing; it is in every file of LLM Foundry"),
        ("expansion_ratio: 3", "expansion_ratio: 0.001", "must make a whole number of 64"),
        ("vocab_size: 512", "vocab_size: 512\n  resid_pdrop: 0.1", "resid_pdrop: 0.1 must be that"),
    ],
)
def test_an_option_that_changes_the_step_and_is_not_modelled_is_refused(
    old: str, new: str, why: str
) -> None:
    said = refusal(MPT.replace(old, new))
    assert said.startswith("zero.foundry_config: ")
    assert why in said
    assert "\n" not in said


def test_a_run_without_fsdp_is_ddp() -> None:
    found = read(MPT[: MPT.index("fsdp_config:")])
    assert (found.zero.emulate, found.zero.stage) == ("ddp", 0)


def test_adapters_are_refused() -> None:
    text = LLAMA.replace("  pretrained: true", "  pretrained: true\n  peft_config: {r: 64}")
    assert "model.peft_config.r: 64 is not modelled" in refusal(text)
