"""A configuration of NeMo 1 is as arguments of Megatron-LM; what it cannot say is one line."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.scenario import load
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="nemo_config")
with_arguments = partial(trainer_files.configured, key="megatron_arguments")

TEXT = """
title = "from NeMo"
[model]
vocab_size = 32000
[cluster]
topology = "dgx_h100_infiniband"
[zero]
nemo_config = "nemo.yaml"
[train]
"""
LLAMA2_7B = """
defaults:
  - _self_
name: megatron_llama
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16
  gradient_clip_val: 1.0
  max_steps: 100000
exp_manager:
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, 1}
model:
  mcore_gpt: True
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  hidden_dropout: 0.0
  attention_dropout: 0.0
  kv_channels: null
  normalization: 'rmsnorm'
  bias: False
  activation: 'fast-swiglu'
  position_embedding_type: 'rope'
  share_embeddings_and_output_weights: False
  num_query_groups: 32
  activations_checkpoint_granularity: null
  sequence_parallel: True
  transformer_engine: True
  fp8: False
  data:
    seq_length: ${model.encoder_seq_length}
  optim:
    name: mcore_distributed_optim
    lr: 2e-4
    weight_decay: 0.01
    betas: [0.9, 0.98]
    overlap_grad_sync: True
    overlap_param_sync: True
    sched:
      name: CosineAnnealing
"""
SAME = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 32 --seq-length 4096 --hidden-dropout 0"
    " --max-position-embeddings 4096 --position-embedding-type rope --attention-dropout 0 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    " --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer"
    " --tensor-model-parallel-size 2 --sequence-parallel --clip-grad 1.0 --lr 2e-4"
    " --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.98 --overlap-grad-reduce"
    " --overlap-param-gather --ddp-average-in-collective --no-gradient-accumulation-fusion"
)
"""Arguments of Megatron-LM that mean the same."""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text)[0]


def left(text: str) -> tuple[str, ...]:
    return configured(parse(TEXT), text)[1]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from nemo.collections import llm\nrecipe = llm.llama3_8b.pretrain_recipe()\n",
            "is Python",
        ),
        ("import nemo_run as run\n", "is Python, a recipe of NeMo 2, which is not read; write the"),
        ("model:\n  _target_: nemo.collections.llm.LlamaModel\n", "model._target_: is of a recipe"),
        ("_factory_: llama3_8b\ntrainer: {num_nodes: 1}\n", "_factory_: is of a recipe of NeMo 2"),
    ],
)
def test_recipes_of_nemo_2_are_refused_by_name(text: str, why: str) -> None:
    said = refusal(text)
    assert said.startswith("zero.nemo_config: ")
    assert why in said
    assert said.endswith("zero.megatron_arguments")


def test_it_is_the_scenario_of_megatrons_arguments() -> None:
    arguments = parse(TEXT.replace("nemo_config", "megatron_arguments"), ["parallel.data=8"])
    same, *_ = with_arguments(arguments, SAME)
    found = read(LLAMA2_7B)
    for table in ("model", "parallel", "zero", "activations", "train"):
        assert getattr(found, table) == getattr(same, table), table


USERBUFFERS = """
  sequence_parallel: True
  ub_tp_comm_overlap: True
  ub_tp_comm_overlap_cfg:
    qkv_dgrad: {method: bulk, num_sm: 4, cga_size: 2, set_sm_margin: 0}
    fc2_fprop: {method: pipeline, num_sm: 20, cga_size: 2, num_splits: 4, set_sm_margin: 1}
    fc2_dgrad: {method: ring_exchange, aggregate: 1, num_sm: 1, set_sm_margin: 0}
"""


def beside(change: str = "", into: str = "") -> str:
    assert change in USERBUFFERS
    cut = LLAMA2_7B.replace("  sequence_parallel: True\n", "")
    assert cut != LLAMA2_7B
    return cut.replace("\n  bias: False", f"{USERBUFFERS.replace(change, into)}  bias: False", 1)


def test_how_products_run_beside_collectives_is_read() -> None:
    options = read(beside()).zero.model_dump(exclude_unset=True)["megatron"]
    assert options["tp_comm_overlap"] is True
    assert options["tp_comm_overlap_cfg"] == {
        "qkv_dgrad": {"num_sm": 4, "set_sm_margin": False},
        "fc2_fprop": {"num_sm": 20, "set_sm_margin": True},
        "fc2_dgrad": {"aggregate": True},
    }
    assert left(beside()) == left(LLAMA2_7B)


def test_methods_of_products_without_an_overlap_change_nothing() -> None:
    assert read(beside("ub_tp_comm_overlap: True", "ub_tp_comm_overlap: False")) == read(LLAMA2_7B)


def test_other_methods_of_products_are_refused() -> None:
    splits = beside("num_splits: 4", "num_splits: 2")
    assert "fc2_fprop.num_splits: 2 is not modelled" in refusal(splits)
    said = refusal(beside("method: bulk", "method: ring_exchange"))
    assert said.startswith("zero.nemo_config: model.ub_tp_comm_overlap_cfg.qkv_dgrad.method: ")
    assert "must be bulk" in said


def test_a_pipeline_with_virtual_stages_is_that_of_megatrons_arguments() -> None:
    """Its messages do not overlap unless NeMo is told so; Megatron-LM's do."""
    stages = "pipeline_model_parallel_size: 1\n  virtual_pipeline_model_parallel_size: null"
    assert stages in LLAMA2_7B
    cut = LLAMA2_7B.replace(stages, stages.replace("null", "2").replace(": 1", ": 2"))
    arguments = parse(TEXT.replace("nemo_config", "megatron_arguments"), ["parallel.data=4"])
    pipeline = " --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    same, *_ = with_arguments(arguments, SAME + pipeline)
    apart, *_ = with_arguments(arguments, f"{SAME}{pipeline} --no-overlap-p2p-communication")
    together = read(cut.replace("  bias: False", "  bias: False\n  overlap_p2p_comm: True"))
    assert (together.parallel, together.zero) == (same.parallel, same.zero)
    found = read(cut)
    assert (found.parallel, found.zero) == (apart.parallel, apart.zero)
    assert found.zero != same.zero


def test_a_file_is_read_beside_the_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "nemo.yaml").write_text(LLAMA2_7B.replace("size: 128", "size: 8"), "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    assert loaded.model.parameter_count == 6_738_415_616  # Llama 2 7B
    assert loaded.strategy.parallel.data == 8
    assert loaded.strategy.train.gradient_accumulation_steps == 1
    assert capsys.readouterr().err == ""


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(["bf16", "bf16-mixed", 16, "16-mixed", 32]),
    st.sampled_from([None, "full", "selective"]),
    st.booleans(),
    st.sampled_from(["fp32", "bf16"]),
)
def test_words_of_nemo_are_read(
    precision: str | int, granularity: str | None, cuts: bool, reduces: str
) -> None:
    tree = yaml.safe_load(LLAMA2_7B)
    tree["trainer"]["precision"] = precision
    tree["model"]["sequence_parallel"] = cuts
    tree["model"]["activations_checkpoint_granularity"] = granularity
    tree["model"]["activations_checkpoint_method"] = "uniform" if granularity else None
    tree["model"]["activations_checkpoint_num_layers"] = 1 if granularity == "full" else None
    tree["model"]["optim"]["grad_sync_dtype"] = reduces
    found = read(yaml.safe_dump(tree))
    kind = {"b": "bf16", "1": "fp16", "3": "fp32"}[str(precision)[0]]
    assert found.train.precision == kind
    assert found.activations.checkpointing == (granularity or "none")
    options = found.zero.model_dump()["megatron"]
    assert options["sequence_parallel"] is cuts
    assert options["grad_reduce_in_fp32"] is (reduces == "fp32")


def test_every_key_that_nobody_follows_is_refused_at_once() -> None:
    text = LLAMA2_7B.replace("fp8: False", "use_emha: True")
    assert refusal(text + "  cpu_offloading: True\n") == (
        "zero.nemo_config: model.use_emha: true is not modelled; remove it to run without it; also "
        "zero.nemo_config: model.cpu_offloading: true is not modelled; remove it to run without it"
    )


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_hybrid"])
def test_fp8_in_nemo_has_delayed_scaling(kind: str) -> None:
    text = LLAMA2_7B.replace("fp8: False", f"fp8: True\n  {kind}: True\n  fp8_margin: 0")
    assert read(text).train.float8 == "delayed"
    why = "zero.nemo_config: model.fp8: true needs one of model.fp8_e4m3 and model.fp8_hybrid"
    assert refusal(LLAMA2_7B.replace("fp8: False", "fp8: True")) == why


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("num_layers: 32", "layers: 32", "not recipes"),
        ("num_layers: 32", "num_layers: many", "model.num_layers: 'many' must be a whole number"),
        ("layers: 32", "layers: ${.depth}", "'${.depth}' must be a whole number of at least 1"),
        (
            "num_layers: 32",
            "num_layers: 32\n  num_moe_experts: 8",
            "num_moe_experts: 8 experts are",
        ),
        (
            "num_layers: 32",
            "num_layers: 32\n  rampup_batch_size: [16, 16, 300]",
            "model.rampup_batch_size: a list is not modelled; remove it",
        ),
        ("num_layers: 32", "num_layers: 32\n  expert_model_parallel_size: 2", "experts are not"),
        ("mcore_distributed_optim", "fused_adam", '"fused_adam" is not modelled, only mcore_'),
        ("mcore_distributed_optim", "distributed_fused_adam", "is not modelled, only mcore_"),
        ("precision: bf16", "precision: fp8", '"fp8" must be bf16, 16 or 32'),
        ("fast-swiglu", "reglu", '"reglu" must be gelu or swiglu or fast-swiglu'),
        ("rmsnorm", "groupnorm", '"groupnorm" must be layernorm or layernorm1p or rmsnorm'),
        ("'rope'", "'alibi'", "position_embedding_type: 'alibi' must be learned_absolute or rope"),
        ("betas: [0.9, 0.98]", "betas: [0.9]", "model.optim.betas: a list must be two numbers"),
        ("num_nodes: 2\n  prec", "num_nodes: 0\n  prec", "trainer.num_nodes: 0 must be a whole"),
        ("mcore_gpt: True", "fsdp: True", "model.fsdp: true is not modelled in NeMo"),
    ],
)
def test_what_cannot_be_is_one_line_in_the_words_of_nemo(old: str, new: str, why: str) -> None:
    assert old in LLAMA2_7B
    said = refusal(LLAMA2_7B.replace(old, new))
    assert why in said
    assert "\n" not in said
    assert "--" not in said


def test_a_scenario_that_says_otherwise_is_a_contradiction() -> None:
    assert refusal(LLAMA2_7B, "model.layers=3") == (
        "model.layers: 3 contradicts nemo_config, whose model.num_layers means 32"
    )
