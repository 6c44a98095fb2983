"""Formats of GEMMs in a scenario: short names, and GPUs that do not have them."""

import pytest

from zsim.files.installed import topology
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import ScenarioError
from zsim.scenario.toml import parse
from zsim.strategy.precision import Precision
from zsim_lab.fit.constants import START

TEXT = """
title = "one layer"
[model]
architecture = "llama"
layers = 1
hidden_size = 128
attention_heads = 2
sequence_length = 128
vocab_size = 256
[cluster]
node = "hgx_b200"
fabric = "single_switch"
nodes = 1
[zero]
emulate = "megatron"
stage = 1
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "bf16"
"""


def resolved(*settings: str) -> ResolvedScenario:
    return resolve(parse(TEXT, settings), topology, lambda _: START)


@pytest.mark.parametrize(("name", "key"), [("mxfp8", "train.float8"), ("nvfp4", "train.float4")])
def test_a_format_of_products_is_short_for_bf16_with_it(name: str, key: str) -> None:
    short, long = resolved(f"train.precision={name}"), resolved(f"{key}={name}")
    assert short.strategy == long.strategy
    assert short.strategy.train.precision is Precision.BF16
    assert short.strategy.train.recipe == name


def test_a_short_name_and_another_scaling_contradict_each_other() -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved("train.precision=mxfp8", "train.float8=delayed")
    assert str(caught.value).startswith("train.precision: 'mxfp8' must be 'fp16', 'bf16'")


@pytest.mark.parametrize(
    ("node", "setting", "lacks"),
    [
        ("dgx_a100", "train.float8=delayed", "train.float8: delayed: gpu A100-SXM4-80GB: no rate"),
        ("dgx_h100", "train.float8=mxfp8", "train.float8: mxfp8: gpu H100-SXM5-80GB: no rate for"),
        ("dgx_h100", "train.precision=nvfp4", "train.float4: nvfp4: gpu H100-SXM5-80GB: no rate"),
        ("mi355x_platform", "train.float4=nvfp4", "train.float4: nvfp4: gpu MI355X-288GB: no rate"),
        ("server_8x5090", "train.float8=mxfp8", "train.float8: mxfp8: gpu RTX-5090-32GB: no rate"),
    ],
)
def test_a_gpu_without_a_format_refuses_it_in_one_line(node: str, setting: str, lacks: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved(f"cluster.node={node}", setting)
    assert str(caught.value).startswith(lacks)
    assert str(caught.value).endswith("; remove it or take another GPU")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("node", "setting"),
    [
        ("dgx_h100", "train.float8=blockwise"),
        ("mi355x_platform", "train.float8=mxfp8"),
        ("server_8x5090", "train.float4=nvfp4"),
        ("gb200_nvl72", "train.precision=nvfp4"),
        ("hgx_b300", "train.precision=mxfp8"),
    ],
)
def test_a_gpu_with_a_format_takes_it(node: str, setting: str) -> None:
    assert resolved(f"cluster.node={node}", setting).strategy.train.recipe is not None


@pytest.mark.parametrize(("node", "any_layout"), [("dgx_h100", False), ("hgx_b200", True)])
def test_the_gpu_decides_on_transposed_copies(node: str, any_layout: bool) -> None:
    architecture = (
        resolved(f"cluster.node={node}", "train.float8=delayed").make_model().architecture
    )
    assert architecture is not None
    assert architecture.execution.any_layout is any_layout
