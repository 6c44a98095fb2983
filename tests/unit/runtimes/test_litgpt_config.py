"""A configuration of LitGPT is read as a scenario; anything else is refused in one line."""

from functools import partial
from pathlib import Path

import pytest

from zsim.api.scenario import load
from zsim.files.installed import model_catalogue
from zsim.runtimes.lookup import kind_of_file
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="litgpt_config")

TEXT = """
title = "from LitGPT"
[model]
[cluster]
topology = "dgx_h100_infiniband"
[zero]
litgpt_config = "lora.yaml"
[train]
"""
FULL = """
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
out_dir: out/finetune/full
precision: bf16-true
devices: 4
num_nodes: 1
data:
  class_path: litgpt.data.Alpaca2k
  init_args: {mask_prompt: false, num_workers: 4}
train:
  save_interval: 200
  global_batch_size: 64
  micro_batch_size: 4
  lr_warmup_steps: 25
  epochs: 1
  max_tokens:
  max_seq_length: 512
  tie_embeddings:
  max_norm:
eval: {interval: 25, final_validation: true}
logger_name: csv
seed: 1337
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.0002, weight_decay: 0.1, betas: [0.9, 0.95]}
"""
LORA = FULL.replace("devices: 4", "devices: 1\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.1")
QLORA = f"{LORA}quantize: bnb.nf4\n"
PRETRAIN = """
model_name: mine
model_config:
  name: mine
  hf_config: {}
  block_size: 256
  vocab_size: 32000
  padding_multiple: 64
  n_layer: 6
  n_head: 6
  n_query_groups: 3
  n_embd: 288
  rotary_percentage: 1.0
  parallel_residual: false
  bias: false
  norm_class_name: RMSNorm
  mlp_class_name: LLaMAMLP
  intermediate_size: 768
precision: bf16-mixed
data: TinyStories
train: {global_batch_size: 512, micro_batch_size: 16, max_tokens: 9700000000, tie_embeddings: true}
optimizer: AdamW
devices: auto
num_nodes: 2
tokenizer_dir: checkpoints/meta-llama/Llama-2-7b-hf
"""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text, model_catalogue())[0]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_a_full_fine_tuning_on_several_devices_is_fsdp1_of_a_bf16_model() -> None:
    told = configured(parse(TEXT), FULL, model_catalogue())
    found = told.scenario
    assert (found.zero.emulate, found.zero.stage, found.parallel.data) == ("fsdp1", 3, 4)
    assert found.zero.model_dump()["fsdp1"] == {"repeat_kv": True, "no_sync": True}
    assert found.activations.checkpointing == "full"
    train = found.train
    assert (train.precision, train.loss, train.holds_logits) == ("pure_bf16", "torch", True)
    assert (train.micro_batch_size, train.global_batch_size) == (4, 64)
    assert (train.norms, train.clip_norm, train.learning_rate) == ("composed", None, 0.0002)
    assert (found.model.layers, found.model.sequence_length) == (16, 512)
    assert (found.model.joined_qkv, found.model.tied_embeddings) == (True, False)
    assert told.ignored == ()
    assert told.assumed == (
        "train.max_seq_length (every sample counts as that long)",
        "command: finetune_full (a file does not name its command)",
    )


def test_adapters_on_one_device_have_no_wrapper_and_parts_of_the_joined_layer() -> None:
    found = read(LORA)
    assert (found.zero.emulate, found.zero.stage, found.parallel.data) == ("ddp", 0, 1)
    assert found.zero.model_dump()["ddp"] == {
        "repeat_kv": True,
        "gradient_as_bucket_view": True,
    }
    assert found.train.loss == "cast_chunked"
    lora = found.model.lora
    assert lora is not None
    assert (lora.rank, lora.dropout, lora.quantization) == (16, 0.1, None)
    assert lora.targets == ("q", "v")
    every = f"{LORA}lora_key: true\nlora_projection: true\nlora_mlp: true\nlora_head: true\n"
    lora = read(every).model.lora
    assert lora is not None
    assert lora.targets == ("q", "k", "v", "proj", "gate", "up", "down", "head")
    lora = read(every.replace("meta-llama/Llama-3.2-1B", "microsoft/phi-2")).model.lora
    assert lora is not None
    assert "gate" not in (lora.targets or ())


def test_adapters_on_several_devices_are_fsdp2_with_checkpoints() -> None:
    found = read(LORA.replace("devices: 1", "devices: 2"))
    assert (found.zero.emulate, found.parallel.data) == ("fsdp2", 2)
    assert found.activations.checkpointing == "full"
    assert found.zero.model_dump()["fsdp2"] == {"repeat_kv": True, "gradient_sync": "last"}


@pytest.mark.parametrize(("word", "kind"), [("bnb.nf4", "nf4"), ("bnb.nf4-dq", "nf4_double")])
def test_weights_in_4_bits_follow_the_only_bitsandbytes_that_litgpt_supports(
    word: str, kind: str
) -> None:
    told = configured(parse(TEXT), QLORA.replace("bnb.nf4", word), model_catalogue())
    lora = told.scenario.model.lora
    assert lora is not None
    assert lora.quantization == kind
    assert (lora.quantizes_head, lora.casts_weights, lora.keeps_inputs) == (True, True, True)
    assert any("bitsandbytes 0.42.0" in each for each in told.assumed)
    assert [each.partition(" ")[0] for each in told.ignored] == ["optimizer", "quantize"]


def test_pretraining_shards_in_a_machine_and_replicates_over_machines() -> None:
    found = read(PRETRAIN, "cluster.nodes=2")
    assert (found.zero.emulate, found.parallel.replicate) == ("fsdp1", 2)
    assert found.activations.checkpointing == "none"
    train = found.train
    assert (train.precision, train.compile, train.clip_norm) == ("bf16", True, 1.0)
    assert (train.loss, train.norms) == ("torch", "fused")
    model = found.model
    assert (model.layers, model.hidden_size, model.attention_heads) == (6, 288, 6)
    assert (model.key_value_heads, model.intermediate_size, model.vocab_size) == (3, 768, 32000)
    assert (model.norm, model.activation, model.bias) == ("rms", "swiglu", False)
    assert (model.sequence_length, model.tied_embeddings) == (256, True)
    plain = PRETRAIN.replace("tie_embeddings: true", "max_norm: 0.5, max_seq_length: 128")
    assert read(plain, "cluster.nodes=2").train.clip_norm == 0.5
    assert read(plain, "cluster.nodes=2").model.sequence_length == 128


def test_the_defaults_of_a_shape_are_those_of_litgpt() -> None:
    some = PRETRAIN.replace("  parallel_residual: false\n  bias: false\n", "")
    bare = some.replace("norm_class_name: RMSNorm", "norm_class_name: LayerNorm")
    bare = bare.replace("  mlp_class_name: LLaMAMLP\n  intermediate_size: 768\n", "")
    model = read(bare.replace("  padding_multiple: 64\n", ""), "cluster.nodes=2").model
    assert (model.parallel_residual, model.bias, model.norm) == (True, True, "layer")
    assert (model.activation, model.intermediate_size, model.vocab_size) == ("gelu", 1152, 32256)
    why = refusal(PRETRAIN.replace("  intermediate_size: 768\n", ""), "cluster.nodes=2")
    assert why.endswith("model_config.intermediate_size: missing; LLaMAMLP needs it")


@pytest.mark.parametrize(
    ("text", "old", "new", "why"),
    [
        (FULL, "checkpoint_dir:", "other:", "model_name or checkpoint_dir: missing"),
        (FULL, "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "capped scores or a mask"),
        (FULL, "meta-llama/Llama-3.2-1B", "me/mine", "does not ship with zsim; give its shape"),
        (FULL, "devices: 4", "devices: 0", "must be a whole number from 1"),
        (FULL, "max_norm:", "max_norm: 1.0", "train.max_norm: 1.0 is refused by finetune_full"),
        (FULL, "seed: 1337", "quantize:", "finetune_adapter is not modelled"),
        (FULL, "seed: 1337", "quantize: bnb.nf4", "finetune_adapter is not modelled"),
        (PRETRAIN, "tie_embeddings: true", "max_norm: null", "max_norm: null is refused by pretr"),
        (PRETRAIN, "tie_embeddings: true", "max_norm: 0", "max_norm: 0 is refused by pretrain"),
        (FULL, "tie_embeddings:", "tie_embeddings: true", "is refused by finetune_full of LitGPT"),
        (FULL, "max_seq_length: 512", "max_seq_length:", "train.max_seq_length: missing; give it"),
        (FULL, "bf16-true", "16-true", "is not modelled, only bf16-true, bf16-mixed"),
        (FULL, "torch.optim.AdamW", "galore_torch.GaLoreAdamW", "optimizer:"),
        (FULL, "weight_decay: 0.1", "amsgrad: true", "init_args.amsgrad: true is not modelled"),
        (FULL, "seed: 1337", "pipeline: 2", "pipeline: 2 is not modelled"),
        (LORA, "lora_alpha: 32", "lora_query: false\nlora_value: false", "no layer with an adapt"),
        (QLORA, "bnb.nf4", "bnb.int8-training", "is not modelled, only bnb.nf4 and bnb.nf4-dq"),
        (QLORA, "bnb.nf4", "bnb.fp4", "is not modelled, only bnb.nf4 and bnb.nf4-dq"),
        (QLORA, "bf16-true", "32-true", "is not modelled with quantize, only bf16-true"),
        (QLORA, "devices: 1", "devices: 2", "is refused by LitGPT with more than one device"),
        (QLORA, "torch.optim.AdamW", "torch.optim.SGD", "is refused by LitGPT with quantize"),
        (PRETRAIN, "n_layer: 6", "n_layer: 6\n  n_expert: 8", "model_config.n_expert: 8 is not"),
        (PRETRAIN, "LLaMAMLP", "LLaMAMoE", "must be GptNeoxMLP or LLaMAMLP or GemmaMLP"),
        (PRETRAIN, "n_head: 6", "n_head: 6\n  sliding_window_size: 64", "sliding_window_size: 64"),
    ],
)
def test_an_option_that_changes_the_step_is_followed_or_refused(
    text: str, old: str, new: str, why: str
) -> None:
    assert old in text
    assert why in refusal(text.replace(old, new), "cluster.nodes=2")


def test_mixed_precision_of_adapters_on_several_devices_is_refused() -> None:
    text = LORA.replace("devices: 1", "devices: 2").replace("bf16-true", "bf16-mixed")
    assert "is not modelled for adapters on several devices" in refusal(text)


@pytest.mark.parametrize("text", [FULL, LORA, QLORA, PRETRAIN])
def test_files_are_recognized_and_run(text: str, tmp_path: Path) -> None:
    assert kind_of_file(text) == "litgpt_config"
    (tmp_path / "lora.yaml").write_text(text, "utf-8")
    sized = TEXT.replace("[zero]", "nodes = 2\n[zero]") if text == PRETRAIN else TEXT
    path = tmp_path / "scenario.toml"
    path.write_text(sized, "utf-8")
    ranks = load(path).schedule.mesh.size
    assert ranks == (16 if text == PRETRAIN else 4 if text == FULL else 1)
