"""CUDA graphs of Megatron-LM: host time of captured parts, and what they exclude."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from zsim.api.forecast import forecast
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.cluster.profile.graph_launch import GRAPH_PS, NODE_PS, GraphedWork
from zsim.cluster.profile.host_launch import EAGER
from zsim.config_error import ConfigError
from zsim.files.source import resolved
from zsim.mistake import MistakeError
from zsim.proof import check
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.lookup import config_text
from zsim.scenario import trainer_files
from zsim.scenario.changes import changed
from zsim.scenario.tables import Scenario, ScenarioError, from_tables
from zsim.scenario.toml import parse
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import Action, Allocate, Compute
from zsim.schedule.schedule import Program
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

LAYERS, TENSOR, MICRO_BATCHES = 2, 2, 3
SCOPES: dict[str, dict[str, object]] = {
    "none": {},
    "attention": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},
    "mlp": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp"]},
    "halves": {"cuda_graph_impl": "local", "cuda_graph_scope": "attn,mlp"},
    "blocks": {"cuda_graph_impl": "local", "cuda_graph_scope": "full"},
    "iteration": {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
}


def tables(options: dict[str, object]) -> dict[str, Any]:
    """Return a model whose kernels are much shorter than their launches."""
    return {
        "title": "small",
        "model": {
            "architecture": "llama",
            "layers": LAYERS,
            "hidden_size": 128,
            "attention_heads": 4,
            "sequence_length": 128,
            "vocab_size": 1024,
            "attention": "cudnn",
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": 1},
        "parallel": {"tensor": TENSOR, "data": 4},
        "zero": {
            "stage": 1,
            "emulate": "megatron",
            "megatron": {
                "sequence_parallel": True,
                "async_tensor_model_parallel_allreduce": True,
                **options,
            },
        },
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
        },
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
    }


@cache
def step_s(scope: str) -> float:
    found = forecast(tables(SCOPES[scope]))
    assert isinstance(found, RunForecast)
    return found.step_time_s


def test_the_more_a_graph_captures_the_less_the_host_delays_a_step() -> None:
    order = ("iteration", "blocks", "halves", "attention", "none")
    times = [step_s(scope) for scope in order]
    assert times == sorted(times)
    assert step_s("halves") < step_s("mlp") < step_s("none")
    unit_s = 0.94e-3  # of Megatron-LM's Python, for a pass over a block
    passes = 2 * LAYERS * MICRO_BATCHES
    assert step_s("none") - step_s("blocks") > passes * unit_s / 2


def test_a_pass_over_a_block_is_one_launch_and_its_nodes_are_almost_free() -> None:
    job = resolved("small", from_tables(tables(SCOPES["blocks"]))).job()
    costs = job.cluster.gpu.launch_costs
    passes: dict[tuple[Action, str, int], int] = {}
    nodes: dict[tuple[Action, str, int], int] = {}
    for operation in job.schedule.programs[0].step:
        if isinstance(operation, Compute) and operation.unit.startswith("block"):
            key = (operation.action, operation.unit, operation.micro_batch)
            passes[key] = passes.get(key, 0) + costs.issue_ps(operation)
            nodes[key] = nodes.get(key, 0) + max(1, len(operation.kernels))
    assert len(passes) == 2 * LAYERS * MICRO_BATCHES
    for key, taken_ps in passes.items():
        assert taken_ps == GRAPH_PS + costs.operation_ps + NODE_PS * nodes[key]


def test_an_iteration_in_a_graph_is_one_launch_and_the_optimizer_is_outside() -> None:
    job = resolved("small", from_tables(tables(SCOPES["iteration"]))).job()
    plain = resolved("small", from_tables(tables({}))).job()
    assert job.schedule.programs[0].step == plain.schedule.programs[0].step
    costs, before = job.cluster.gpu.launch_costs, plain.cluster.gpu.launch_costs
    launches = 0
    for operation in job.schedule.programs[0].step:
        taken = costs.issue_ps(operation)
        if operation.id.startswith("step/update/"):
            assert taken == before.issue_ps(operation)
        elif operation.id.startswith(("step/forward/", "step/backward/")):
            launches += taken >= GRAPH_PS
    assert launches == 1


@pytest.mark.parametrize("scope", ["attention", "mlp"])
def test_a_block_of_one_segment_leaves_half_of_its_launches_to_the_host(scope: str) -> None:
    alone = tables(SCOPES[scope])
    alone["parallel"] = {"tensor": 1, "data": 8}
    del alone["zero"]["megatron"]["sequence_parallel"]
    del alone["zero"]["megatron"]["async_tensor_model_parallel_allreduce"]
    job = resolved("small", from_tables(alone)).job()
    costs = job.cluster.gpu.launch_costs
    plain = replace(costs, graphs=None)
    for operation in job.schedule.programs[0].step:
        if isinstance(operation, Compute) and operation.unit.startswith("block"):
            launch_ps = GRAPH_PS + costs.operation_ps + NODE_PS * len(operation.kernels)
            assert costs.issue_ps(operation) == launch_ps + plain.issue_ps(operation) // 2


@cache
def reserved_bytes(scope: str) -> int:
    larger = tables(SCOPES[scope])
    larger["model"] |= {"hidden_size": 512, "vocab_size": 32_768, "sequence_length": 2048}
    found = forecast(larger, Quantity.MEMORY)
    assert isinstance(found, RunForecast)
    return found.peak_reserved_bytes


def test_memory_of_an_iteration_in_a_graph_does_not_serve_the_optimizer() -> None:
    assert reserved_bytes("iteration") > reserved_bytes("none")
    assert reserved_bytes("blocks") == reserved_bytes("none")
    job = resolved("small", from_tables(tables(SCOPES["iteration"]))).job()
    assert check(job.schedule, job.model) == ()
    (program,) = job.schedule.programs
    inside = {each.name for each in program.buffers if each.captured}
    for operation in program.step:
        if isinstance(operation, Allocate):
            outside = operation.id.startswith("step/update/")
            assert (operation.buffer in inside) is not outside
    assert not inside & set(program.persistent)
    assert decode_value(encode_value(program, Program), Program) == program


def test_without_graphs_every_operation_is_issued_alone() -> None:
    kernel = Compute(id="step/update/x", stream="compute", action=Action.UPDATE, operands=())
    assert GraphedWork().issue_ps(kernel, alone_ps=7, call_ps=EAGER.operation_ps) == 7
    assert EAGER.issue_ps(kernel) == EAGER.operation_ps


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full_iteration"},
            'cuda_graph_scope: full_iteration needs cuda_graph_impl = "local"',
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration,attn"},
            "cuda_graph_scope: full_iteration allows no other scope",
        ),
        (
            {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": "mlp"},
            'cuda_graph_scope: must be empty with cuda_graph_impl = "full_iteration"',
        ),
        (
            {"cuda_graph_scope": "mlp"},
            "cuda_graph_scope: needs cuda_graph_impl",
        ),
        (
            {"cuda_graph_impl": "local", "cpu_offloading_num_layers": 1},
            "cuda_graph_impl: graphs of blocks exclude cpu_offloading_num_layers; capture "
            "full_iteration",
        ),
    ],
)
def test_what_a_graph_excludes_is_refused_by_name(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match="graph") as caught:
        Megatron.of(options)
    assert str(caught.value) == why


def test_blocks_in_graphs_are_not_recomputed_and_a_whole_iteration_may_be() -> None:
    def strategy(impl: str) -> Strategy:
        return Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=1, emulate=Megatron.of({"cuda_graph_impl": impl})),
            train=Train(),
        ).but({"activations.checkpointing": "full"})

    assert strategy("full_iteration").zero.emulate is not None
    with pytest.raises(ConfigError, match="needs a CUDA graph of the whole iteration"):
        strategy("transformer_engine")


def of_fsdp2(**train: object) -> dict[str, Any]:
    """Return the same model under FSDP2, in blocks of CUDA graphs."""
    found = tables({})
    found["parallel"] = {"data": 8}
    found["zero"] = {"emulate": "fsdp2", "fsdp2": {"compile_mode": "reduce-overhead"}}
    found["train"] |= {"compile": True, **train}
    return found


def test_reduce_overhead_launches_a_block_at_once_and_not_its_collectives() -> None:
    job = resolved("small", from_tables(of_fsdp2())).job()
    costs = job.cluster.gpu.launch_costs
    for operation in job.schedule.programs[0].step:
        if isinstance(operation, Compute) and operation.unit.startswith("block"):
            if operation.action in (Action.FORWARD, Action.BACKWARD):
                own = costs.issue_ps(operation) - NODE_PS * max(1, len(operation.kernels))
                assert own in (0, GRAPH_PS + costs.operation_ps)
        elif "gather" in operation.id and type(operation).__name__ in ("AllGather", "Together"):
            assert costs.issue_ps(operation) >= costs.collective_ps


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train.compile": False}, "reduce-overhead needs train.compile = true"),
        ({"parallel.tensor": 2, "parallel.data": 4}, "reduce-overhead excludes parallel.tensor"),
        ({"zero.fsdp2.offload_wrapper": True}, "reduce-overhead excludes offload_wrapper"),
    ],
)
def test_what_reduce_overhead_excludes_is_refused_by_name(
    changes: dict[str, object], why: str
) -> None:
    with pytest.raises((ConfigError, ScenarioError, MistakeError), match="compile_mode") as caught:
        resolved("small", from_tables(changed(of_fsdp2(), changes))).job()
    assert why in str(caught.value)


TEXT = """
title = "from a command line"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
megatron_arguments = "arguments.txt"
[train]
"""
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 1000"
    " --use-distributed-optimizer --micro-batch-size 1 "
)
configured = partial(trainer_files.configured, key="megatron_arguments")


def options_of(words: str) -> Megatron:
    read: Scenario = configured(parse(TEXT), words)[0]
    return Megatron.of(read.zero.model_dump()["megatron"])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--enable-cuda-graph --te-rng-tracker", {"cuda_graph_impl": "local"}),
        ("--external-cuda-graph", {"cuda_graph_impl": "transformer_engine"}),
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 3",
            {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp",
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"},
        ),
        ("--cuda-graph-impl none --cuda-graph-scope attn", {}),
    ],
)
def test_arguments_of_every_version_are_read(words: str, options: dict[str, object]) -> None:
    found = options_of(SHAPE + words)
    expected = Megatron.of(options)
    assert found.cuda_graph_impl == expected.cuda_graph_impl
    assert found.cuda_graph_scope == expected.cuda_graph_scope


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--cuda-graph-impl local --cuda-graph-scope moe_router", "'moe_router' is not modelled"),
        ("--enable-cuda-graph --cuda-graph-impl local", "allowed is one of the two"),
        ("--cuda-graph-impl graphs", "must be none or local"),
    ],
)
def test_arguments_of_graphs_that_are_not_modelled_are_refused(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match="graph") as caught:
        options_of(SHAPE + words)
    assert why in str(caught.value)


@pytest.mark.parametrize("scope", ["none", "halves", "iteration"])
def test_options_of_graphs_are_written_as_arguments_that_read_back(scope: str) -> None:
    changes: dict[str, object] = {
        "zero.emulate": "megatron",
        "zero.stage": 1,
        **{f"zero.megatron.{name}": value for name, value in SCOPES[scope].items()},
        "train.micro_batch_size": 1,
        "activations.checkpointing": "none",
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.context": 1,
    }
    asked = ConfigQuestion(changes=changes, precision="bf16", sequences=8, sequence_length=16)
    words = config_text(asked).replace("\\\n", " ")
    shape = SHAPE.replace("--seq-length 16", "").replace("--use-distributed-optimizer", "")
    found = options_of(shape.replace("--micro-batch-size 1", "") + words)
    assert found.cuda_graphs == Megatron.of(SCOPES[scope]).cuda_graphs
