"""A configuration of Axolotl is read as a scenario; anything else is refused in one line."""

import json
from functools import partial
from pathlib import Path

import pytest

from zsim.api.scenario import load
from zsim.files.installed import model_catalogue
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="axolotl_config")

TEXT = """
title = "from Axolotl"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
axolotl_config = "axolotl.yml"
[train]
"""
FINE_TUNING = """
base_model: meta-llama/Llama-3.2-1B
datasets: [{path: a, type: alpaca}]
val_set_size: 0.1
output_dir: ./out
sequence_len: 1024
pad_to_sequence_len: true
adapter:
lora_r:
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
adam_beta2: 0.95
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
attn_implementation: flash_attention_2
warmup_ratio: 0.1
weight_decay: 0.0
"""
FSDP2 = f"""{FINE_TUNING}
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
"""
FSDP1 = f"""{FINE_TUNING}
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
"""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text, model_catalogue())[0]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_a_fine_tuning_with_fsdp_of_version_2_is_read() -> None:
    found = read(FSDP2)
    assert (found.model.layers, found.model.sequence_length) == (16, 1024)
    assert (found.zero.emulate, found.zero.stage) == ("fsdp2", 3)
    assert found.zero.model_dump()["fsdp2"] == {
        "reshard_after_forward": True,
        "offload_policy": "none",
        "shard_placement_fn": "first",
        "gradient_sync": "last",
    }
    train = found.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert (train.precision, train.clip_norm, train.learning_rate) == ("bf16", 1.0, 2e-5)
    assert train.model_dump()["beta2"] == 0.95
    assert found.activations.checkpointing == "full"
    told = configured(parse(TEXT), FSDP2, model_catalogue())
    assert (told.ignored, told.assumed) == ((), ())


PACKED = FSDP2.replace(
    "pad_to_sequence_len: true", "sample_packing: true\nsample_packing_eff_est: 1"
)


def test_packed_samples_see_the_window_that_the_scenario_gives() -> None:
    why = refusal(PACKED)
    assert why.startswith(
        "zero.axolotl_config: sample_packing: true needs model.window in the scenario: half the "
        "mean tokens of a sample, or sequence_len"
    )
    assert read(PACKED, "model.window=128").model.window == 128
    own = PACKED.replace("meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1")
    assert read(own, "model.window=128").model.window == 128
    assert read(own.replace("sample_packing: true", "pad_to_sequence_len: true")).model.window


def test_samples_that_are_not_padded_count_as_whole_sequences() -> None:
    loose = FSDP2.replace("pad_to_sequence_len: true", "")
    assert configured(parse(TEXT), loose, model_catalogue()).assumed == (
        "pad_to_sequence_len: true (every sequence counts as sequence_len tokens)",
    )
    assert "group_by_length: true sequences of different lengths" in refusal(
        f"{loose}\ngroup_by_length: true"
    )
    assert read(f"{FSDP2}\ngroup_by_length: true").model.sequence_length == 1024


def test_fsdp_of_version_1_is_read_as_accelerate_reads_it() -> None:
    found = read(FSDP1)
    assert found.zero.emulate == "fsdp1"
    options = found.zero.model_dump()["fsdp1"]
    assert options["sharding_strategy"] == "shard_grad_op"
    assert options["backward_prefetch"] == "backward_pre"
    plain = FSDP1.replace("gradient_checkpointing: true", "gradient_checkpointing: false")
    assert read(plain).activations.checkpointing == "none"
    of_fsdp = plain.replace("fsdp_offload", "fsdp_activation_checkpointing: true\n  fsdp_offload")
    assert read(of_fsdp).activations.checkpointing == "full"


def test_a_deepspeed_file_is_read_after_it_with_its_batches(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "axolotl.yml").write_text(f"{FINE_TUNING}deepspeed: ds.json\n", "utf-8")
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    strategy = load(tmp_path / "scenario.toml").strategy
    assert strategy.zero.stage == 3
    assert strategy.train.precision == "bf16"
    assert strategy.train.gradient_accumulation_steps == 4


def test_axes_of_fsdp_2_are_read() -> None:
    mesh = "dp_shard_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2\n"
    found = read(FSDP2 + mesh).parallel
    assert (found.data, found.tensor, found.context) == (4, 2, 2)


def test_an_adapter_has_the_layers_of_the_scenario() -> None:
    lora = FSDP2.replace("adapter:\nlora_r:", "adapter: lora\nlora_r: 16\nlora_alpha: 32")
    assert "needs lora_target_linear, lora_target_modules or model.lora" in refusal(lora)
    targets = 'model.lora.targets=["q", "v"]'
    found = read(lora, "model.lora.rank=16", targets).model.lora
    assert found is not None
    assert (found.rank, found.targets) == (16, ("q", "v"))
    said = refusal(lora, "model.lora.rank=8", targets)
    assert said == "model.lora.rank: 8 contradicts axolotl_config, whose lora_r means 16"
    every = lora.replace("lora_alpha: 32", "lora_target_linear: true\nlora_dropout: 0.05")
    found = read(every).model.lora
    assert found is not None
    assert (found.rank, found.dropout, found.quantization) == (16, 0.05, None)
    assert set(found.targets or ()) == {"q", "k", "v", "proj", "gate", "up", "down"}
    some = lora.replace("lora_alpha: 32", "lora_target_modules: [q_proj, o_proj]")
    assert (read(some).model.lora or found).targets == ("q", "proj")
    assert '"c_attn" is not read, only q_proj' in refusal(some.replace("o_proj", "c_attn"))


def test_qlora_without_fsdp_is_ddp_with_weights_in_4_bits() -> None:
    qlora = FINE_TUNING.replace(
        "adapter:\nlora_r:",
        "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true",
    ).replace("adamw_torch_fused", "paged_adamw_8bit")
    found = read(qlora)
    assert found.model.lora is not None
    assert found.model.lora.quantization == "nf4_double"
    assert (found.zero.emulate, found.zero.stage) == ("ddp", 0)
    assert (found.train.optimizer, found.train.precision) == ("paged_adamw_8bit", "bf16")
    assert found.zero.model_dump()["ddp"] == {
        "no_sync": True,
        "find_unused_parameters": False,
    }


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("adapter:\n", "adapter: llama-adapter\n", "is not modelled, only lora and qlora"),
        ("adapter:\n", "load_in_4bit: true\n", "load_in_4bit: true needs adapter: qlora"),
        ("adapter:\n", "load_in_8bit: true\n", "load_in_8bit: true is not modelled: weights are"),
        ("adamw_torch_fused", "lion_8bit", '"lion_8bit" is not modelled, only adamw_torch'),
        ("bf16: auto", "bf16: full", 'bf16: "full" is not modelled, only auto, true and false'),
        ("checkpointing: true", "checkpointing: offload", '"offload" is not modelled, only true'),
        ("tf32: false", "liger_rms_norm: true", "liger_rms_norm: true is not modelled; remove it"),
        ("tf32: false", "rl: dpo", 'rl: "dpo" is not modelled; remove it'),
        ("flash_attention_2", "eager", 'attn_implementation: "eager" is not modelled'),
        ("meta-llama/Llama-3.2-1B", "me/mine", '"me/mine" does not ship with zsim; give its shap'),
        ("micro_batch_size: 2\n", "", "micro_batch_size: missing; it is in every file of Axolotl"),
        ("tf32: false", "deepspeed: a.json\ntensor_parallel_size: 2", "with deepspeed, only 1"),
    ],
)
def test_an_option_that_changes_the_step_and_is_not_modelled_is_refused(
    old: str, new: str, why: str
) -> None:
    said = refusal(FSDP2.replace(old, new))
    assert said.startswith("zero.axolotl_config: ")
    assert why in said
    assert "\n" not in said


def test_hybrid_sharding_needs_replicas() -> None:
    hybrid = FSDP1.replace("SHARD_GRAD_OP", "HYBRID_SHARD")
    assert "needs parallel.replicate" in refusal(hybrid)
    assert read(hybrid, "parallel.replicate=2").zero.emulate == "fsdp1"


def test_a_run_without_fsdp_or_deepspeed_is_ddp_of_a_bf16_model() -> None:
    found = read(f"{FINE_TUNING}ddp_bucket_cap_mb: 50\nddp_find_unused_parameters: true\n")
    assert (found.zero.emulate, found.zero.stage) == ("ddp", 0)
    assert found.zero.model_dump()["ddp"] == {
        "no_sync": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 50.0,
    }
    assert found.train.precision == "pure_bf16"
