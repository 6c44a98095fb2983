"""A schedule in JSON has everything that changes the run of its scenario."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from zsim.api.launch import run
from zsim.api.placement import placed
from zsim.api.scenario import LoadedScenario, load, scenario_text, setting_keys
from zsim.mistake import MistakeError
from zsim.runtimes.lookup import file_keys
from zsim.scenario.tables import Scenario

SCENARIO: dict[str, Any] = {
    "title": "two nodes",
    "model": {
        "layers": 2,
        "hidden_size": 64,
        "attention_heads": 4,
        "sequence_length": 64,
        "vocab_size": 256,
    },
    "cluster": {"node": "dgx_a100", "fabric": "fat_tree_2", "nodes": 2},
    "zero": {"stage": 3},
    "train": {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "precision": "bf16",
        "steps": 1,
    },
}

FAULTS: tuple[dict[str, object], ...] = (
    {"kind": "gpu", "rank": 1, "factor": "3/2"},
    {"kind": "gpu", "rank": 2, "factor": 9, "start": "50 us", "end": "200 us"},
    {"kind": "switch_link", "rank": 3, "factor": 40},
    {"kind": "switch_link", "rank": 4, "dead": True},
    {"kind": "nic", "node": 1, "nic": 0, "factor": 20},
    {"kind": "nic", "node": 1, "nic": 1, "dead": True, "start": "50 us"},
    {"kind": "leaf", "group": 0, "factor": 20},
    {"kind": "jitter", "deviation": 0.1},
)

CIRCUMSTANCES: dict[str, Mapping[str, object]] = {
    "algorithm": {"network.algorithm": "hierarchical"},
    "faults": {"fault": FAULTS},
    "neighbour": {"neighbour": [{"nodes": [0, 1], "bandwidth_per_direction": "20 GB/s"}]},
}
"""Settings that no job has: they are options of the simulation."""

VARIANTS: tuple[dict[str, object], ...] = (
    {
        "model.architecture": "llama",
        "model.layers": 3,
        "model.hidden_size": 64,
        "model.attention_heads": 4,
        "model.sequence_length": 32,
        "model.vocab_size": 128,
        "model.hidden_groups": 1,
        "model.key_value_heads": 2,
        "model.head_size": 8,
        "model.intermediate_size": 96,
        "model.norm": "rms",
        "model.activation": "geglu",
        "model.qkv_bias": False,
        "model.output_bias": False,
        "model.embedding_norm": True,
        "model.norm_bias": False,
        "model.norm_placement": "both",
        "model.qk_norm": "head",
        "model.window": 8,
        "model.global_every": 2,
        "model.frozen": ["embedding*"],
        "zero.host_ahead_units": 2,
        "zero.prefetch_units": 2,
        "zero.gathered_elements": 10**6,
        "zero.keep_after_forward": "everything",
        "zero.reduce_once": True,
        "zero.reductions_in_flight": 2,
        "train.gradient_accumulation_steps": 2,
        "train.steps": 3,
    },
    {
        "model.positions": "learned",
        "model.position_embeddings": 128,
        "model.tied_embeddings": True,
        "model.norm_weight": False,
        "model.joined_qkv": True,
        "model.parallel_residual": True,
        "model.shared_norm": True,
        "model.attention": "plain",
        "model.dropout": 0.1,
        "model.fused": False,
        "zero.stage": 2,
        "zero.bucket_elements": 10**5,
        "zero.first_bucket_elements": 10**4,
        "zero.contiguous": True,
        "activations.checkpointing": "full",
        "activations.early_stop": False,
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
        "train.nesterov": True,
        "train.precision": "fp16",
        "train.loss_scale": {"initial": 1024.0},
        "train.global_batch_size": 32,
        "train.micro_batch_size": None,
    },
    {"model": {"parameters": 10**6}},
    {
        "model.lora": {"rank": 2, "targets": ["qkv"]},
        "train.learning_rate": 1e-3,
        "train.beta1": 0.8,
        "train.beta2": 0.9,
        "train.epsilon": 1e-6,
        "train.weight_decay": 0.1,
        "train.clip_norm": 1.0,
        "train.learning_rates": {"warmup_steps": 2, "decay_steps": 4},
        "train.group": [{"parameters": ["block0.ln1*"], "weight_decay": 0.0}],
        "zero.secondary": 8,
        "network.profile": "a100",
        "network.chunks": 2,
        "compute.profile": "a100",
        "compute.in_training": False,
        "compute.host_per_segment": "3 us",
        "compute.host_per_unit": "4 us",
        "compute.host_per_collective": "5 us",
    },
    {
        "parallel.tensor": 2,
        "parallel.context": 2,
        "parallel.context_exchange": "ring",
        "parallel.replicate": 2,
        "parallel.data": 4,
        "zero.sequence_parallel": True,
        "activations.checkpointing": "full",
        "activations.every_nth": 2,
        "cluster.gpu_memory": "1 GB",
        "cluster.allocator": "expandable",
        "cluster.nics_per_node": 4,
        "cluster.nodes_per_domain": 1,
        "cluster.nvlink": False,
        "cluster.oversubscription": 2,
        "network.profile": "a100",
        "network.algorithm": "hierarchical",
    },
    {
        "parallel.tensor": 2,
        "activations.checkpointing": "full",
        "activations.partition": True,
        "offload.optimizer": "nvme",
        "offload.gradients": "host",
        "offload.parameters": "nvme",
        "offload.checkpoints": "host",
        "offload.sub_group_elements": 10**4,
        "offload.pipeline_read": True,
        "offload.pipeline_write": True,
        "offload.buffers": 12,
        "offload.fetch_units": 2,
        "offload.read_units": 2,
        "offload.block_bytes": 2**20,
        "offload.queue_depth": 16,
        "offload.io_threads": 2,
        "cluster.host_memory": "64 GB",
        "cluster.drives": 2,
        "host.pinned": "exact",
        "host.setup": "every_rank",
    },
    {
        "offload.optimizer": "host",
        "offload.device_share": 0.5,
        "zero.stage": 2,
        "zero.bucket_elements": 10**4,
        "train.loss": "fused",
        "train.metrics": 1,
        "train.norms": "composed",
        "train.holds_logits": True,
    },
    {
        "offload.optimizer": "host",
        "offload.delayed_update": True,
        "offload.warm_up_steps": 1,
    },
    {
        "cluster.topology": "dgx_h100_infiniband",
        "cluster.node": None,
        "cluster.fabric": None,
        "cluster.nodes": 1,
        "parallel.pipeline": 2,
        "model.layers": 4,
        "zero.emulate": "fsdp2",
        "zero.fsdp2": {"reshard_after_forward": False, "pipeline_schedule": "Interleaved1F1B"},
        "train.gradient_accumulation_steps": 4,
        "train.compile": True,
        "train.float8": "tensorwise",
    },
    {"cluster.node": "dgx_h100", "cluster.gpu": "h200_sxm_141gb"},
    {"zero.emulate": "fsdp1", "zero.fsdp1": {"limit_all_gathers": False}, "zero.stage": None},
    {"zero.emulate": "deepspeed", "zero.deepspeed": {"overlap_comm": True}},
    {"zero.emulate": "megatron", "zero.megatron": {"overlap_grad_reduce": True}, "zero.stage": 1},
    {"zero.tiles": 2},
    {"zero.emulate": "nanotron", "zero.nanotron": {}, "zero.stage": 1},
    {"zero.emulate": "ddp", "zero.ddp": {}, "zero.stage": 0},
    {"model.sinks": True, "model.mtp_layers": 1},
    {
        "model.architecture": "llama",
        "model.intermediate_size": 128,
        "model.latent": {"key_value_rank": 4},
        "model.experts": {"count": 4, "top_k": 2, "intermediate_size": 8},
        "parallel.expert": 2,
        "parallel.expert_tensor": 1,
        "experts.busiest": 1.2,
        "experts.seed": 7,
        "experts.maximum": 3.0,
    },
    {
        "model.architecture": "llama",
        "model.intermediate_size": 128,
        "model.experts": {"count": 4, "top_k": 2, "intermediate_size": 8},
        "parallel.expert": 2,
        "parallel.expert_tensor": 1,
        "experts.rows": [
            [0, layer, group, source, expert, 64]
            for layer in range(2)
            for group in range(8)
            for source in range(2)
            for expert in range(2)
        ],
    },
    {
        "cluster.node": "hgx_b200",
        "zero.emulate": "megatron",
        "zero.megatron": {},
        "zero.stage": 1,
        "train.float4": "nvfp4",
        "train.num_layers_at_start_in_bf16": 1,
        "train.num_layers_at_end_in_bf16": 1,
    },
    {"model.bias": True, "model.head_bias": True, "zero.fused_buffers": "model", "zero.stage": 0},
)
"""Settings that together have every key of a scenario, but for those of READ."""


def changed(settings: Mapping[str, object]) -> LoadedScenario:
    """Return SCENARIO with `settings`; a fault or neighbour is a table of its own."""
    whole = {key: value for key, value in settings.items() if "." not in key}
    return load({**SCENARIO, **whole}, {k: v for k, v in settings.items() if k not in whole})


def read_back(loaded: LoadedScenario, folder: Path) -> LoadedScenario:
    path = folder / "schedule.json"
    loaded.write_schedule(path)
    return load(path)


def figures(loaded: LoadedScenario) -> dict[str, object]:
    found = run(loaded, check=False).to_dict()
    del found["title"], found["wall_time_s"]
    return found


FROM_FILES = {
    *("model.name", "model.hf_config", "experts.counts"),
    *(f"zero.{key}" for key in file_keys()),
}
"""Keys that stand for a file, whose content becomes the keys below before anything is made."""


@pytest.mark.one_commit_in(9)
def test_every_key_of_a_scenario_that_changes_a_run_is_in_the_file_of_its_schedule(
    tmp_path: Path,
) -> None:
    used = {"model.parameters"}
    for number, settings in enumerate((*VARIANTS, *CIRCUMSTANCES.values())):
        loaded = changed(settings)
        found = read_back(loaded, tmp_path)
        assert found.document == loaded.document, number
        resolved = loaded.source.scenario
        assert resolved is not None
        assert found.source.faults == resolved.faults
        assert found.source.neighbours == resolved.neighbours
        assert found.source.decision == resolved.decision
        used |= settings.keys()
    assert {*setting_keys(), "fault", "neighbour"} - FROM_FILES <= used
    assert Scenario.model_fields.keys() == {key.split(".")[0] for key in used} | {"title"}


@pytest.mark.parametrize("names", [("algorithm",), ("faults", "neighbour")], ids=" and ".join)
def test_a_run_of_the_file_equals_the_run_of_the_scenario(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    settings = {key: value for name in names for key, value in CIRCUMSTANCES[name].items()}
    loaded = changed(settings)
    of_file = figures(read_back(loaded, tmp_path))
    assert of_file == figures(loaded)
    assert of_file["step_time_s"] != figures(changed({}))["step_time_s"]


def test_a_schedule_on_another_cluster_has_the_faults_of_that_one(tmp_path: Path) -> None:
    path, slow = tmp_path / "schedule.json", tmp_path / "slow.toml"
    changed(CIRCUMSTANCES["neighbour"]).write_schedule(path)
    there = changed({**CIRCUMSTANCES["faults"], **CIRCUMSTANCES["algorithm"]})
    slow.write_text(scenario_text(there.to_dict()), "utf-8")
    found = placed(load(path), cluster=slow)
    assert figures(found) == figures(there)


def test_a_schedule_on_another_node_keeps_its_faults_but_not_its_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    here = {"cluster.nodes": 1, "fault": FAULTS[:1]}
    changed({**CIRCUMSTANCES["algorithm"], **here}).write_schedule(path)
    found = placed(load(path), node="dgx_h100").source
    assert found.faults == load(path).source.faults != ()
    assert found.decision is None


@pytest.mark.parametrize(
    ("key", "change", "why"),
    [
        ("faults", {"factor": "1/2"}, "faults[0]: factor: 1/2 must be at least 1, times slower"),
        ("faults", {"rank": 99}, "fault 0: rank: 99 must be 0 to 15: there are 16 ranks"),
        (
            "decision",
            {"algorithm": "rnig"},
            "decision: algorithm: 'rnig': did you mean ring? It ",
        ),
        ("decision", {"chunks": 0}, "decision: chunks: 0 must be at least 1"),
    ],
)
def test_circumstances_that_cannot_be_are_refused_in_one_line(
    key: str, change: dict[str, object], why: str, tmp_path: Path
) -> None:
    loaded = changed({**CIRCUMSTANCES["faults"], **CIRCUMSTANCES["algorithm"]})
    path = tmp_path / "schedule.json"
    loaded.write_schedule(path)
    data = json.loads(path.read_text("utf-8"))
    table = data[key][0] if key == "faults" else data[key]
    table.update(change)
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(MistakeError) as caught:
        run(path, check=False)
    assert why in str(caught.value)
