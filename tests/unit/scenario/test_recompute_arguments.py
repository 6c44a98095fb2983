"""`--recompute-modules` of Megatron-LM's arguments."""

from functools import partial

import pytest

from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

TEXT = """
title = "arguments"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 2
[zero]
megatron_arguments = "arguments.txt"
[train]
"""
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 1000"
    " --use-distributed-optimizer --micro-batch-size 1"
)
configured = partial(trainer_files.configured, key="megatron_arguments")


def read(words: str) -> Scenario:
    return configured(parse(TEXT), words)[0]


def refusal(words: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(words)
    return str(caught.value)


def test_recomputed_modules_are_read_with_selective_recomputation_alone() -> None:
    words = f"{SHAPE} --recompute-granularity selective --recompute-modules"
    found = read(f"{words} mlp core_attn").zero.model_dump()["megatron"]
    assert list(found["recompute_modules"]) == ["mlp", "core_attn"]
    plain = read(f"{SHAPE} --recompute-granularity selective")
    assert read(f"{words} core_attn") == plain
    full = f"{SHAPE} --recompute-granularity full --recompute-method uniform"
    assert read(f"{full} --recompute-modules mlp") == read(full)


def test_a_recomputed_module_that_is_not_modelled_is_refused_by_name() -> None:
    words = f"{SHAPE} --recompute-granularity selective --recompute-modules gdn_norm_out moe_act"
    assert "recompute_modules.0: 'gdn_norm_out' must be 'core_attn', " in refusal(words)
