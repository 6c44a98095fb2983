"""A configuration of nanotron is read as a scenario; anything else is refused in one line."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.runtimes.config import ConfigQuestion
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse
from zsim_runtimes.nanotron.config_writer import write

configured = partial(trainer_files.configured, key="nanotron_config")

TEXT = """
title = "from nanotron"
[model]
[cluster]
topology = "dgx_h100_infiniband"
[zero]
nanotron_config = "config.yaml"
[train]
"""
LLAMA = """
checkpoints: {checkpoint_interval: 10}
data_stages:
- {name: Stable, start_training_step: 1, data: {seed: 42}}
general: {project: debug, seed: 42}
model:
  ddp_bucket_cap_mb: 50
  dtype: bfloat16
  init_method: {std: 0.025}
  make_vocab_size_divisible_by: 8
  model_config:
    hidden_act: silu
    hidden_size: 64
    intermediate_size: 96
    is_llama_config: true
    max_position_embeddings: 4096
    num_attention_heads: 8
    num_hidden_layers: 3
    num_key_value_heads: 2
    tie_word_embeddings: true
    vocab_size: 1000
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 0.5
  learning_rate_scheduler: {learning_rate: 0.0003, lr_decay_steps: 13}
  optimizer_factory: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08, name: adamW}
  weight_decay: 0.01
  zero_stage: 1
parallelism:
  dp: 4
  expert_parallel_size: 1
  pp: 1
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: false
  tp_mode: REDUCE_SCATTER
  tp_recompute_allgather: false
tokens:
  batch_accumulation_per_replica: 3
  micro_batch_size: 2
  sequence_length: 128
  train_steps: 15
"""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text)[0]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_model_axes_batches_and_optimizer_are_read() -> None:
    found = read(LLAMA)
    assert found.model.model_dump(exclude_unset=True) == {
        "architecture": "llama",
        "layers": 3,
        "hidden_size": 64,
        "attention_heads": 8,
        "intermediate_size": 96,
        "key_value_heads": 2,
        "tied_embeddings": True,
        "vocab_size": 1008,  # a multiple of 8 on each of 2 tensor ranks
        "attention": "flash2",
        "sequence_length": 128,
    }
    parallel = found.parallel
    assert (parallel.data, parallel.tensor, parallel.pipeline) == (4, 2, 1)
    assert (found.zero.emulate, found.zero.stage) == ("nanotron", 1)
    assert found.zero.model_dump()["nanotron"] == {
        "tp_mode": "reduce_scatter",
        "tp_recompute_allgather": False,
        "ddp_bucket_cap_mb": 50,
    }
    train = found.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (2, 3)
    assert (train.precision, train.clip_norm, train.learning_rate) == ("bf16", 0.5, 3e-4)
    assert found.activations.checkpointing == "none"
    assert configured(parse(TEXT), LLAMA).ignored == ()


@settings(deadline=None, max_examples=20)
@given(
    axes=st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    stage=st.sampled_from([0, 1]),
    mode=st.sampled_from(["all_reduce", "reduce_scatter"]),
    full=st.booleans(),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_a_configuration_that_zsim_writes_is_read_back(
    axes: tuple[int, int, int], stage: int, mode: str, sizes: tuple[int, int], *, full: bool
) -> None:
    data, tensor, pipeline = axes
    changes: dict[str, object] = {
        "zero.emulate": "nanotron",
        "zero.stage": stage,
        "zero.nanotron.tp_mode": mode,
        "parallel.data": data,
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "activations.checkpointing": "full" if full else "none",
        "train.micro_batch_size": sizes[0],
        "train.gradient_accumulation_steps": sizes[1],
    }
    asked = ConfigQuestion(changes=changes, precision="bf16", sequences=8, sequence_length=64)
    found = read(write(asked))
    parallel = found.parallel
    assert (parallel.data, parallel.tensor, parallel.pipeline) == axes
    assert (found.zero.stage, found.model.sequence_length) == (stage, 64)
    assert (found.train.micro_batch_size, found.train.gradient_accumulation_steps) == sizes
    assert (found.activations.checkpointing == "full") is full
    options = found.zero.model_dump()["nanotron"]
    assert options.get("tp_mode", mode) == mode


def test_adam_of_2024_is_read() -> None:
    old = LLAMA.replace("optimizer_factory: {", "").replace("name: adamW}", "name: adamW")
    flat = old.replace("  adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08, name: adamW", "")
    lines = "optimizer:\n  adam_beta1: 0.9\n  adam_beta2: 0.95\n  adam_eps: 1.0e-08\n"
    assert read(flat.replace("optimizer:\n", lines)) == read(LLAMA)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("is_llama_config", "is_qwen2_config", "is_qwen2_config: true is not modelled, only is_"),
        ("std: 0.025", "use_mup: true", "model.init_method.use_mup: true is not modelled"),
        ("async_communication: false", "async_communication: true", "collectives wait; set it"),
        ("pp_engine: 1f1b", "pp_engine: afab", "afab runs all forwards before all backwards"),
        ("  pp_engine: 1f1b\n", "", "pp_engine: missing, which is afab: it runs all forwards"),
        ("expert_parallel_size: 1", "expert_parallel_size: 2", "expert_parallel_size: 2 is not"),
        ("in_fp32: true", "in_fp32: false", "accumulate_grad_in_fp32: false is not modelled"),
        ("bfloat16", "float8", '"float8" must be bfloat16 or float32'),
        ("hidden_act: silu", "hidden_act: gelu", 'hidden_act: "gelu" is not modelled'),
        ("zero_stage: 1", "zero_stage: two", 'optimizer.zero_stage: "two" must be a number'),
        ("data: {seed: 42}", "sequence_length: 7, data: {}", "data_stages.sequence_length: 7 mu"),
        ("tokens:", "doremi: {domain_names: a}\ntokens:", 'doremi.domain_names: "a" is not mod'),
        ("  dp: 4\n", "", "parallelism.dp: missing; it is in every file of nanotron"),
        ("  sequence_length: 128\n", "", "tokens.sequence_length: missing; it is in every file"),
    ],
)
def test_an_option_that_changes_the_step_and_is_not_modelled_is_refused(
    old: str, new: str, why: str
) -> None:
    said = refusal(LLAMA.replace(old, new))
    assert said.startswith("zero.nanotron_config: ")
    assert why in said
    assert "\n" not in said


def test_all_forwards_first_is_the_same_order_with_one_micro_batch() -> None:
    one = LLAMA.replace("per_replica: 3", "per_replica: 1")
    assert read(one.replace("pp_engine: 1f1b", "pp_engine: afab")) == read(one)


def test_a_scenario_that_gives_another_value_is_a_contradiction() -> None:
    assert refusal(LLAMA, "parallel.tensor=4") == (
        "parallel.tensor: 4 contradicts nanotron_config, whose parallelism.tp means 2"
    )
