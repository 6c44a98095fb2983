"""A configuration of Accelerate is what the scenario means; what it cannot say is one line."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.scenario import load
from zsim.cli.main import answer
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="accelerate_config")

TEXT = """
title = "from Accelerate"
[model]
name = "gpt2"
[cluster]
topology = "dgx_h100_infiniband"
[zero]
accelerate_config = "accelerate.yaml"
[train]
micro_batch_size = 1
gradient_accumulation_steps = 2
"""
FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""
"""As `accelerate config` writes it."""

FSDP2 = """
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_offload_params: true
num_processes: 8
"""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text)[0]


def left(text: str) -> tuple[str, ...]:
    return configured(parse(TEXT), text)[1]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_fsdp_of_version_1_is_read() -> None:
    found = read(FSDP1)
    assert found.zero.emulate == "fsdp1"
    assert found.zero.model_dump()["fsdp1"] == {
        "sharding_strategy": "full_shard",
        "backward_prefetch": "backward_pre",
        "forward_prefetch": False,
        "no_sync": True,
    }
    assert found.activations.checkpointing == "full"
    assert found.train.precision == "bf16"
    assert found.parallel.data == 16
    assert left(FSDP1) == ()


def test_fsdp_of_version_2_is_read_and_runs(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "accelerate.yaml").write_text(FSDP2, "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    assert loaded.strategy.parallel.data == 8
    options = loaded.strategy.zero.emulate
    assert options is not None
    assert options.model_dump(exclude_unset=True) == {
        "reshard_after_forward": True,
        "offload_policy": "cpu",
        "shard_placement_fn": "first",
        "gradient_sync": "last",
    }


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["FULL_SHARD", "1", 1, "SHARD_GRAD_OP", 2, "HYBRID_SHARD", 4, 5]),
    st.sampled_from([("fsdp_backward_prefetch: 2", "backward_post"), ("", "none")]),
    st.sampled_from(["fsdp_sharding_strategy", "fsdp_reshard_after_forward"]),
)
def test_words_of_version_1_may_be_numbers(
    strategy: str | int, prefetch: tuple[str, str], key: str
) -> None:
    text = FSDP1.replace("fsdp_sharding_strategy: FULL_SHARD", f"{key}: {strategy!r}")
    text = text.replace("num_machines: 2\n", "")
    text = text.replace("fsdp_backward_prefetch: BACKWARD_PRE", prefetch[0])
    hybrid = strategy in ("HYBRID_SHARD", 4, 5)
    found = read(text, "parallel.replicate=2") if hybrid else read(text)
    options = found.zero.model_dump()["fsdp1"]
    grad_op = strategy in ("SHARD_GRAD_OP", 2, 5)
    assert options["sharding_strategy"] == ("shard_grad_op" if grad_op else "full_shard")
    assert options["backward_prefetch"] == prefetch[1]
    assert found.parallel.data == (8 if hybrid else 16)
    if hybrid:
        assert "needs parallel.replicate" in refusal(text)


def test_how_many_gpus_there_are_is_the_scenarios_where_it_says_so() -> None:
    assert read(FSDP1, "cluster.nodes=4").parallel.data is None
    assert read(FSDP1, "parallel.data=4").parallel.data == 4


def test_a_mesh_is_read() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}
    lines = "".join(f"  parallelism_config_{name}_size: {n}\n" for name, n in sizes.items())
    whole = FSDP2.replace("processes: 8", "processes: 16")
    found = read(f"{whole}parallelism_config:\n{lines}").parallel
    assert (found.replicate, found.data, found.tensor, found.context) == (2, 4, 2, 2)
    assert found.context_exchange == "all_gather"
    around = "  parallelism_config_cp_comm_strategy: alltoall\n"
    found = read(f"{whole}parallelism_config:\n{lines}{around}").parallel
    assert found.context_exchange == "ring"


DEEPSPEED = """
distributed_type: DEEPSPEED
mixed_precision: fp16
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  zero3_init_flag: true
  zero3_save_16bit_model: true
num_processes: 8
"""


def test_options_of_deepspeed_are_read() -> None:
    found = read(DEEPSPEED)
    assert (found.zero.emulate, found.zero.stage) == ("deepspeed", 3)
    assert found.zero.model_dump()["deepspeed"]["offload_optimizer"] == {"device": "cpu"}
    assert (found.train.precision, found.train.clip_norm) == ("fp16", 0.5)
    assert left(DEEPSPEED) == ()


def test_without_a_norm_deepspeed_clips_at_1_by_accelerate() -> None:
    for norm, found in (("", 1.0), ("auto", 1.0), ("0.0", None), ("0.5", 0.5)):
        line = f"  gradient_clipping: {norm}\n" if norm else ""
        text = DEEPSPEED.replace("  gradient_clipping: 0.5\n", line)
        assert read(text).train.clip_norm == found
    text = DEEPSPEED.replace("  gradient_clipping: 0.5\n", "")
    assert read(text, "train.clip_norm=2").train.clip_norm == 2.0


def test_the_file_of_deepspeed_is_read_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    text = (
        "{distributed_type: DEEPSPEED, num_processes: 8, "
        "deepspeed_config: {deepspeed_config_file: ds.json}}"
    )
    (tmp_path / "accelerate.yaml").write_text(text, "utf-8")
    config = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}
    (tmp_path / "ds.json").write_text(json.dumps(config), "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    assert loaded.strategy.zero.stage == 2
    assert loaded.model.units
    said = capsys.readouterr().err
    assert said == (
        "zsim: ds.json: not modelled: "
        "scheduler (the learning rate is train.learning_rate in every step)\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("num_processes: 8", "distributed_type: missing; must be FSDP, DEEPSPEED or M"),
        ("distributed_type: NO", '"NO" is one GPU; write parallel.data = 1'),
        (
            "distributed_type: MEGATRON_LM",
            '"MEGATRON_LM" is not read, only FSDP, DEEPSPEED, MULTI_',
        ),
        ("distributed_type: XLA", 'distributed_type: "XLA" must be FSDP, DEEPSPEED or MULT'),
        ("distributed_type: {a: 1}", "distributed_type: missing; must be FSDP, DEEPSPEED or M"),
        (FSDP1.replace("BASED_WRAP", "WRAP"), '"TRANSFORMER_WRAP" must be TRANSFORMER_BASED_WRAP'),
        (FSDP1.replace("TRANSFORMER_BASED", "NO"), '"NO_WRAP" is not modelled, only TRANSFORMER'),
        (FSDP1.replace("params: false", "params: true"), "with fsdp_version 1, only with 2"),
        (FSDP1.replace("bf16\n", "fp8\n"), '"fp8" is not modelled'),
        (FSDP1.replace(": 16", ": 0"), "num_processes: 0 must be a whole number from 1"),
        (FSDP2.replace("version: 2", "version: 3"), "fsdp_version: 3 must be 1 or 2"),
        (FSDP2.replace("forward: true", "forward: FULL_SHARD"), "must be true or false"),
        (DEEPSPEED.replace("stage: 3", "stage: 4"), "4 must be 0, 1, 2 or 3"),
        (DEEPSPEED.replace("device: cpu", "device: disk"), 'must be "none", "cpu" or "nvme"'),
        (FSDP1 + "num_processes: 8\n", '"num_processes" is repeated (line 26, column 1)'),
        ("[1, 2]", "must have keys with values"),
        ("a: [1", "not YAML: "),
        ("[" * 500, "not YAML: nested too deeply"),
        ("a: !!python/object:os.system x", "not YAML: could not determine a constructor"),
        ("a: &a {b: *a}", "a value must not hold itself"),
        ("a: " + "x" * 300_000, "must have at most 262144 characters, has 300003"),
        ("a: 2020-99-99", "not YAML: month must be in 1..12"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_option(text: str, why: str) -> None:
    said = refusal(text)
    assert said.startswith("zero.accelerate_config: ")
    assert why in said
    assert "\n" not in said


def test_several_gpus_without_shards_are_ddp() -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
    found = configured(parse(TEXT), text)
    assert (found[0].zero.emulate, found[0].zero.stage) == ("ddp", 0)
    assert (found[0].train.precision, found.assumed) == ("bf16", ())
    whole = configured(parse(TEXT), FSDP1.replace("FULL_SHARD", "NO_SHARD"))
    assert whole[0].zero.emulate == "ddp"
    assert whole[0].zero.model_dump()["ddp"]["comm_hook"] == "bf16_compress"
    assert whole.assumed == (
        "fsdp_sharding_strategy NO_SHARD is DDP with buckets of 25 MiB (zero.ddp)",
    )
    none = configured(parse(TEXT), DEEPSPEED.replace("stage: 3", "stage: 0"))[0]
    assert (none.zero.emulate, none.zero.stage) == ("deepspeed", 0)


def test_a_scenario_that_says_otherwise_is_a_contradiction() -> None:
    assert refusal(FSDP1, "train.precision=fp16") == (
        'train.precision: "fp16" contradicts accelerate_config, whose mixed_precision means "bf16"'
    )


def test_references_that_would_grow_without_end_are_refused() -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, 18)]
    assert "must have at most 20,000 values" in refusal("\n".join(lines))


def test_without_pyyaml_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "accelerate.yaml").write_text(FSDP2, "utf-8")
    monkeypatch.setitem(sys.modules, "yaml", None)
    readers = ("zsim_runtimes.fsdp2.accelerate_reader", "zsim_runtimes.megatron.nemo_reader")
    for module in ("zsim.runtimes.trainer_files.yaml_text", *readers):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(module, raising=False)
    assert answer(["plan", str(tmp_path / "scenario.toml")]) == 2
    said = capsys.readouterr().err
    assert "zero.accelerate_config: needs yaml" in said
    assert "pip install 'zsim[yaml]'" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("my_key: 3", "my_key: 3 is not modelled; remove it"),
        ("use_cpu: true", "use_cpu: true is not modelled, only GPUs"),
        ("dynamo_config: {backend: CUDAGRAPHS}", '"CUDAGRAPHS" must be NO or INDUCTOR'),
        ("dynamo_config: {dynamo_backend: INDUCTOR, mode: max-autotune}", "only default"),
    ],
)
def test_an_option_that_nobody_follows_is_refused(more: str, why: str) -> None:
    assert why in refusal(f"{FSDP2}{more}\n")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("activation_checkpointing_offload: true", "needs fsdp_version 2 and fsdp_activation_c"),
        ("ignored_modules: lm_head", 'fsdp_ignored_modules: "lm_head" is not modelled'),
    ],
)
def test_an_option_of_fsdp_that_nobody_follows_is_refused(option: str, why: str) -> None:
    assert why in refusal(FSDP2.replace("  fsdp_version", f"  {option}\n  fsdp_version"))


def test_what_has_no_effect_is_silent() -> None:
    text = FSDP2 + "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    assert read(text).train.compile
    assert left(f"{text}fp8_config:\n  backend: TE\n") == ()


def test_options_of_fsdp_are_read_without_their_prefix_and_under_an_old_name() -> None:
    short = FSDP1.replace("  fsdp_", "  ")
    assert read(short) == read(FSDP1)
    old = FSDP1.replace("prefetch: BACKWARD_PRE", "prefetch_policy: NO_PREFETCH")
    assert read(old).zero.model_dump()["fsdp1"]["backward_prefetch"] == "none"
    assert left(old) == ()


HYBRID = FSDP1.replace("FULL_SHARD", "HYBRID_SHARD")


def test_hybrid_sharding_has_a_replica_on_each_machine() -> None:
    found = read(HYBRID).parallel
    assert (found.replicate, found.data) == (2, 8)
    assert read(HYBRID, "parallel.replicate=4").parallel.data == 4
    assert read(HYBRID, "cluster.nodes=2").parallel.replicate == 2
    for size in ("cluster.nodes=3", "parallel.data=8"):  # then not the machines of the file
        assert "needs parallel.replicate" in refusal(HYBRID, size)


@pytest.mark.parametrize(
    ("machines", "processes", "fits"),
    [(2, 16, True), (1, 8, True), (1, 4, True), (2, 8, False), (1, 16, False), (2, 12, False)],
)
def test_machines_are_nodes_of_the_cluster(
    machines: int, processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, fits: bool
) -> None:
    text = FSDP1.replace("machines: 2", f"machines: {machines}")
    text = text.replace("processes: 16", f"processes: {processes}")
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "accelerate.yaml").write_text(text, "utf-8")
    assert answer(["plan", str(tmp_path / "scenario.toml")]) == (0 if fits else 2)
    said = capsys.readouterr().err
    assert ("do not fit nodes of 8 GPUs" in said) is not fits
    if not fits:
        assert answer(["plan", str(tmp_path / "scenario.toml"), "--set", "cluster.nodes=2"]) == 0


def test_a_mesh_of_another_number_of_ranks_is_refused() -> None:
    mesh = "parallelism_config:\n  dp_shard_size: 4\n".replace("dp_", "parallelism_config_dp_")
    assert "num_processes: 8 must be 4, the ranks of its mesh" in refusal(FSDP2 + mesh)


def test_old_keys_of_precision_and_compilation_are_converted() -> None:
    old = FSDP1.replace("mixed_precision: bf16", "fp16: true\ndynamo_backend: INDUCTOR")
    assert read(old).train.precision == "fp16"
    assert read(old).train.compile
    off = FSDP1.replace("mixed_precision: bf16", "fp16: false\ndynamo_backend: NO")
    assert read(off).train.precision == "fp32"
    assert not read(off).train.compile


def test_offloaded_inputs_of_checkpointed_blocks_are_followed() -> None:
    more = "  fsdp_activation_checkpointing: true\n  activation_checkpointing_offload: true\n"
    found = read(FSDP2.replace("  fsdp_version", f"{more}  fsdp_version"))
    assert found.zero.model_dump()["fsdp2"]["offload_wrapper"]
    assert found.activations.checkpointing == "full"


def test_mixed_precision_decides_what_a_deepspeed_file_leaves_open(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    text += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "accelerate.yaml").write_text(text, "utf-8")
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config), "utf-8")
    assert load(tmp_path / "scenario.toml").strategy.train.precision == "bf16"


def test_a_mesh_with_deepspeed_is_refused_unless_it_has_one_rank() -> None:
    mesh = "parallelism_config:\n  parallelism_config_dp_replicate_size: 1\n"
    assert read(DEEPSPEED + mesh).zero.stage == 3
    said = refusal(f"{DEEPSPEED}{mesh}  parallelism_config_sp_size: 2\n")
    assert "parallelism_config_sp_size: 2 is not modelled with DEEPSPEED, only 1" in said
