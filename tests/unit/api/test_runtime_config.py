"""Settings as the configuration of their runtime, read back where zsim reads it."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.scenario import load
from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.lookup import config_text, runtimes
from zsim.scenario.changes import changed
from zsim_plan.search.fleet import Fleet
from zsim_plan.search.space import RuntimeSpace, SettingGroup, SettingSpace

SEQUENCES, LENGTH = 64, 16_384


def settings_of(runtime: str) -> list[dict[str, object]]:
    """Return settings of a runtime on two nodes: each knob of each stage at least once."""
    options = runtimes()[runtime].options
    space = SettingSpace(
        runtimes=[
            RuntimeSpace(
                name=runtime,
                stages=options.stages,
                has_replicas=options.has_replicas,
                has_pipeline=options.has_pipeline,
                has_context=options.has_context,
            )
        ],
        fleets=[Fleet(gpus=16, gpus_per_node=8)],
        sequences=SEQUENCES,
        sequence_length=LENGTH,
        layers=12,
        fixed={"train.micro_batch_size": 2, "activations.checkpointing": "full"},
    )
    groups = [each for each in space.groups() if isinstance(each, SettingGroup)]
    return [group.setting(number) for group in groups for number in (0, len(group.knobs) - 1)]


def asked(changes: dict[str, object]) -> ConfigQuestion:
    return ConfigQuestion(
        changes=changes, precision="bf16", sequences=SEQUENCES, sequence_length=LENGTH
    )


TABLES = {
    "title": "read back",
    "model": {"name": "gpt2", "sequence_length": LENGTH},
    **gpu_fleet("16xh100").tables,
    "train": {"precision": "bf16", "weight_decay": 0.01},
}


@pytest.mark.one_commit_in(24)
def test_arguments_of_megatron_are_read_back_as_the_same_strategy(tmp_path: Path) -> None:
    path = tmp_path / "arguments.txt"
    settings = settings_of("megatron")
    assert len(settings) > 10
    assert any(each.get("parallel.context") == 4 for each in settings)
    for changes in settings:
        path.write_text(config_text(asked(changes)), "utf-8")
        degrees = {
            key: changes[key]
            for key in ("parallel.data", "parallel.replicate", "parallel.pipeline")
        }
        arguments = {"megatron_arguments": str(path)}
        read = changed({**TABLES, "train": {}, "zero": arguments}, degrees)
        # The arguments say what else is the default of the runtime.
        said = {"parallel.context_exchange": "ring"} if "parallel.context" in changes else {}
        assert load(read).strategy == load(changed(TABLES, {**changes, **said})).strategy


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_layers_in_first_pipeline_stage": 3}, "--decoder-first-pipeline-num-layers 3"),
        ({"num_layers_in_last_pipeline_stage": 6}, "--decoder-last-pipeline-num-layers 6"),
        (
            {
                "num_virtual_stages_per_pipeline_rank": 2,
                "num_layers_in_last_pipeline_stage": 6,
                "overlap_p2p_comm": False,
            },
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            {"account_for_embedding_in_pipeline_split": True},
            "--account-for-embedding-in-pipeline-split",
        ),
        (
            {"pipeline_model_parallel_layout": "Et*3|(t*3|)*3,L"},
            "--pipeline-model-parallel-layout 'Et*3|(t*3|)*3,L'",
        ),
    ],
)
def test_how_megatron_splits_layers_is_read_back(
    options: dict[str, object], argument: str, tmp_path: Path
) -> None:
    changes = {
        "parallel.pipeline": 4,
        "parallel.data": 4,
        "parallel.replicate": 1,
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "train.micro_batch_size": 2,
        "train.gradient_accumulation_steps": SEQUENCES // 8,
        "activations.checkpointing": "none",
        **{f"zero.megatron.{name}": value for name, value in options.items()},
    }
    path = tmp_path / "arguments.txt"
    path.write_text(config_text(asked(changes)), "utf-8")
    assert argument in path.read_text("utf-8")
    degrees = {key: value for key, value in changes.items() if key.startswith("parallel.")}
    read = changed({**TABLES, "train": {}, "zero": {"megatron_arguments": str(path)}}, degrees)
    model = changed(TABLES, changes)
    assert load(read).strategy.zero == load(model).strategy.zero


@pytest.mark.parametrize("modules", [None, "core_attn", "mlp,core_attn"])
def test_selective_recomputation_of_megatron_is_read_back(
    modules: str | None, tmp_path: Path
) -> None:
    changes: dict[str, object] = {
        "parallel.data": 16,
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "train.micro_batch_size": 1,
        "train.gradient_accumulation_steps": SEQUENCES // 16,
        "activations.checkpointing": "selective",
    }
    if modules is not None:
        changes["zero.megatron.recompute_modules"] = modules
    path, degrees = tmp_path / "arguments.txt", {"parallel.data": 16}
    path.write_text(config_text(asked(changes)), "utf-8")
    read = load(
        changed({**TABLES, "train": {}, "zero": {"megatron_arguments": str(path)}}, degrees)
    )
    wanted = load(changed(TABLES, changes))
    assert read.strategy.activations == wanted.strategy.activations
    assert read.strategy.recomputes == wanted.strategy.recomputes


@pytest.mark.one_commit_in(6)
def test_a_deepspeed_configuration_is_read_back_as_the_same_strategy(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    same = 0
    for changes in settings_of("deepspeed"):
        if changes["parallel.tensor"] != 1:  # its degree is the model's
            continue
        try:
            wanted = load(changed(TABLES, changes)).strategy
        except MistakeError:  # knobs that do not go together
            continue
        path.write_text(config_text(asked(changes)), "utf-8")
        others = {
            key: value for key, value in changes.items() if not key.startswith(("zero.", "train."))
        }
        read = changed(
            {**TABLES, "train": {"weight_decay": 0.01}, "zero": {"deepspeed_config": str(path)}},
            others,
        )
        assert load(read).strategy == wanted
        same += 1
    assert same > 10


def test_states_in_bf16_are_two_flags_of_deepspeed() -> None:
    found = json.loads(
        config_text(replace(asked(settings_of("deepspeed")[0]), precision="pure_bf16"))
    )
    assert found["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_checkpoints_on_the_host_are_wrapped_before_fsdp_is(runtime: str) -> None:
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    key = f"zero.{runtime}.offload_wrapper"
    text = config_text(asked(next(each for each in settings_of(runtime) if key in each)))
    ast.parse(text)
    wrapped = "offload_wrapper(checkpoints.checkpoint_wrapper(block))"
    sharded = "    fully_shard(block" if runtime == "fsdp2" else "FullyShardedDataParallel(\n"
    assert text.index(wrapped) < text.index(sharded)
    assert hasattr(wrappers, "offload_wrapper")
    assert hasattr(wrappers, "checkpoint_wrapper")


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_code_for_fsdp_is_python_whose_names_torch_has(runtime: str) -> None:
    torch = pytest.importorskip("torch.distributed.fsdp")
    for changes in settings_of(runtime):
        tree = ast.parse(config_text(asked(changes)))
        taken = [
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed.fsdp"
            for name in node.names
        ]
        assert taken
        assert all(hasattr(torch, name) for name in taken)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ("PipelineStage(model, place, 4, device", '("1F1B")(stage, n_microbatches=8')),
        (
            {"pipeline_schedule": "Interleaved1F1B"},
            ("[place + 4 * number for number in range(2)]", '("Interleaved1F1B")(stages, n_micro'),
        ),
        (
            {"pipeline_schedule": "ZBVZeroBubble"},
            ("[place, 7 - place]", "PipelineStage(chunk, number, 8, device"),
        ),
    ],
)
def test_code_for_stages_of_fsdp2_is_python_with_their_schedule(
    options: dict[str, object], words: tuple[str, ...]
) -> None:
    first = next(each for each in settings_of("fsdp2") if each["parallel.pipeline"] == 4)
    text = config_text(
        asked(
            {
                **first,
                "train.gradient_accumulation_steps": 8,
                **{f"zero.fsdp2.{name}": value for name, value in options.items()},
            }
        )
    )
    ast.parse(text)
    assert 'init_device_mesh("cuda", (4, ' in text
    assert all(each in text for each in words)


def test_code_for_fsdp_has_a_mesh_of_the_ranks_that_share_a_sequence() -> None:
    meshes = [
        {
            node.targets[0].id: ast.unparse(node.value)
            for node in ast.parse(config_text(asked(changes))).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for changes in settings_of("fsdp2")
        if changes.get("parallel.context") == 4 and changes["parallel.tensor"] == 2
    ]
    assert meshes
    assert {each["context"] for each in meshes} >= {
        "init_device_mesh('cuda', (2, 4, 2), "
        "mesh_dim_names=('shard', 'context', 'tensor'))['context']"
    }
    assert "init_device_mesh('cuda', (8, 2), mesh_dim_names=('shard', 'tensor'))" in {
        each["world"] for each in meshes
    }


def test_options_of_megatron_are_flags() -> None:
    for changes in settings_of("megatron"):
        text = config_text(asked(changes))
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            wanted = changes.get(f"zero.megatron.{name}") is True
            assert (f"--{name.replace('_', '-')}" in text) is wanted
        assert f"--global-batch-size {SEQUENCES}" in text


def test_products_beside_collectives_are_a_flag_and_gradients_apart_another() -> None:
    changes = next(each for each in settings_of("megatron") if each["parallel.tensor"] != 1)
    beside = {
        **changes,
        "zero.megatron.sequence_parallel": True,
        "zero.megatron.tp_comm_overlap": True,
    }
    text = config_text(asked(beside))
    assert "--tp-comm-overlap" in text
    assert "overlap-rs" not in text
    behind = config_text(asked({**beside, "zero.megatron.tp_comm_overlap_rs": False}))
    assert "--disable-tp-comm-overlap-rs" in behind
    assert "--no-gradient-accumulation-fusion" in text
    fused = config_text(asked({**beside, "zero.megatron.gradient_accumulation_fusion": True}))
    assert "gradient-accumulation-fusion" not in fused


def test_sums_that_megatron_has_no_argument_for_are_refused() -> None:
    changes = settings_of("megatron")[0] | {"zero.megatron.allreduce_in_float32": True}
    with pytest.raises(MistakeError, match="no argument for allreduce_in_float32"):
        config_text(asked(changes))


def test_sums_between_products_are_a_flag() -> None:
    changes = next(each for each in settings_of("megatron") if each["parallel.tensor"] != 1)
    beside = "zero.megatron.async_tensor_model_parallel_allreduce"
    for value in (True, False):
        text = config_text(asked({**changes, beside: value}))
        assert ("--no-async-tensor-model-parallel-allreduce" in text) is not value


def test_what_deepspeed_leaves_at_its_defaults_is_not_written() -> None:
    found = json.loads(config_text(asked(settings_of("deepspeed")[0])))
    assert found == {
        "train_batch_size": SEQUENCES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }


def test_code_of_ddp_wraps_a_module_of_one_rank(tmp_path: Path) -> None:
    store = vars(dist)["FileStore"](str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for changes in settings_of("ddp"):
            text = config_text(asked(changes)).replace("    device_ids=[local_rank],\n", "")
            text = text.replace("bf16_compress", "fp16_compress")  # Gloo has the latter alone
            names = {"model": torch.nn.Linear(2, 2)}
            exec(compile(text, "ddp.py", "exec"), names)
            hook = changes.get("zero.ddp.comm_hook", "none")
            assert type(names["model"]).__name__ == "DistributedDataParallel"
            assert ("register_comm_hook" in text) is (hook != "none")
    finally:
        dist.destroy_process_group()


def test_code_of_powersgd_registers_its_state() -> None:
    changes = settings_of("ddp")[0] | {
        "zero.ddp.comm_hook": "powersgd",
        "zero.ddp.matrix_approximation_rank": 4,
        "zero.ddp.use_error_feedback": False,
    }
    text = config_text(asked(changes))
    compile(text, "ddp.py", "exec")
    states: list[dict[str, object]] = []
    head, _, call = text.partition("state = ")
    assert "import PowerSGDState, powerSGD_hook" in head
    exec(
        f"state = {call.partition('model.register')[0]}",
        {"PowerSGDState": lambda **it: states.append(it)},
    )
    assert states == [
        {"process_group": None, "matrix_approximation_rank": 4, "use_error_feedback": False}
    ]
    assert "model.register_comm_hook(state, powerSGD_hook)" in text
