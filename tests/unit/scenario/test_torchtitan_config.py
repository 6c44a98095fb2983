"""A configuration of torchtitan is what the scenario means; what it cannot say is one line."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.scenario import load
from zsim.files.installed import model_catalogue
from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.torchtitan_reader import FLAVORS

configured = partial(trainer_files.configured, key="torchtitan_config")

TEXT = """
title = "from torchtitan"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 2
[zero]
torchtitan_config = "run.toml"
[train]
"""
LLAMA3_8B = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
"""What torchtitan's own `llama3_8b.toml` says, but for data and logs."""


def read(text: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), text, model_catalogue())[0]


def left(text: str) -> tuple[str, ...]:
    return configured(parse(TEXT), text, model_catalogue())[1]


def refusal(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(text, *changes)
    return str(caught.value)


def test_llama_3_8b_is_read_beside_the_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "run.toml").write_text(LLAMA3_8B, "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    assert sum(each.elements for each in loaded.model.parameters) == 8_030_261_248
    assert loaded.strategy.parallel.data == 16
    assert loaded.strategy.train.gradient_accumulation_steps == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "flavor"), [(name, flavor) for name in FLAVORS for flavor in FLAVORS[name]]
)
def test_every_flavor_is_a_shape_that_ships(name: str, flavor: str) -> None:
    found = read(f'[model]\nname = "{name}"\nflavor = "{flavor}"').model
    _, shipped = model_catalogue().find(FLAVORS[name][flavor])
    assert found.layers == shipped.shape.layers
    assert found.sequence_length == 2048  # torchtitan's default, not the model's


def test_what_is_not_said_is_torchtitans_default() -> None:
    found = read('model.flavor = "8B"')
    train = found.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (8, 1)
    constants = train.model_dump()
    assert train.learning_rate == 8e-4
    assert (constants["beta2"], constants["weight_decay"]) == (0.95, 0.1)
    assert (train.precision, train.clip_norm, train.loss) == ("bf16", 1.0, "torch")
    assert (found.activations.checkpointing, found.activations.every_nth) == ("full", 2)
    options = found.zero.model_dump()["fsdp2"]
    assert options["reduce_dtype"] == "fp32"
    assert options["reshard_after_forward"] is True


def test_a_model_in_bfloat16_has_its_states_in_it() -> None:
    found = read('model.flavor = "8B"\ntraining.dtype = "bfloat16"')
    assert found.train.precision == "pure_bf16"
    assert found.zero.model_dump()["fsdp2"]["reduce_dtype"] == "fp32"


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4),
    st.sampled_from([-1, 1, 2, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["default", "always", "never"]),
    st.booleans(),
)
def test_degrees_are_those_of_the_mesh(
    replicate: int, shard: int, context: int, tensor: int, reshard: str, offloads: bool
) -> None:
    text = f"""
    [model]
    flavor = "8B"
    [training]
    enable_cpu_offload = {str(offloads).lower()}
    [parallelism]
    data_parallel_replicate_degree = {replicate}
    data_parallel_shard_degree = {shard}
    context_parallel_degree = {context}
    tensor_parallel_degree = {tensor}
    fsdp_reshard_after_forward = "{reshard}"
    """
    if shard * context == 1 and replicate > 1:
        assert "is DDP, which is not modelled" in refusal(text)
        return
    found = read(text)
    assert found.parallel.replicate == replicate
    assert found.parallel.tensor == tensor
    assert found.parallel.context == context
    assert found.parallel.context_exchange == ("all_gather" if context > 1 else None)
    assert found.parallel.data == (None if shard < 0 else shard * context)
    options = found.zero.model_dump()["fsdp2"]
    assert options["reshard_after_forward"] is (reshard != "never")
    assert options["offload_policy"] == ("cpu" if offloads else "none")


@pytest.mark.parametrize(
    ("text", "kind", "nth"),
    [
        ('mode = "none"', "none", 1),
        ('mode = "full"\nselective_ac_option = "op"', "full", 1),
        ('selective_ac_option = "op"', "operations", 1),
        ('selective_ac_option = "3"', "full", 3),
        ('selective_ac_option = "0"', "full", 1),
    ],
)
def test_checkpoints_are_those_that_torchtitan_wraps(text: str, kind: str, nth: int) -> None:
    found = read(f'model.flavor = "8B"\n[activation_checkpoint]\n{text}').activations
    assert (found.checkpointing, found.every_nth) == (kind, nth)


def test_what_is_compiled_and_8_bits_are_read_under_old_names_too() -> None:
    new = """
    [model]
    flavor = "8B"
    converters = ["float8"]
    [compile]
    enable = true
    [quantize.linear.float8]
    recipe_name = "rowwise"
    filter_fqns = ["output"]
    """
    old = """
    [model]
    flavor = "8B"
    converters = ["float8"]
    [training]
    compile = true
    [float8]
    recipe_name = "rowwise"
    filter_fqns = ["output"]
    force_recompute_fp8_weight_in_bwd = false
    """
    assert read(new) == read(old)
    train = read(new).train
    assert (train.compile, train.loss, train.float8) == (True, "fused", "rowwise")
    assert left(new) == left(old) == ()
    with_output = new.replace('["output"]', "[]")
    assert "quantize.linear.float8.filter_fqns: a list is not modelled" in refusal(with_output)


def test_weights_may_be_gathered_in_8_bits() -> None:
    text = """
    model = {flavor = "8B", converters = ["float8"]}
    [float8]
    enable_fsdp_float8_all_gather = true
    precompute_float8_dynamic_scale_for_fsdp = true
    filter_fqns = ["output"]
    """
    assert left(text) == ()
    found = read(text)
    assert found.train.float8 == "tensorwise"
    assert fsdp2_of(text).enable_fsdp_float8_all_gather
    for other, why in (
        ("precompute_float8_dynamic_scale_for_fsdp = false", "is not modelled without precompute_"),
        ('recipe_name = "tensorwise"', "goes with no recipe_name"),
    ):
        line = "precompute_float8_dynamic_scale_for_fsdp = true"
        changed = text.replace(line, other if "false" in other else f"{line}\n{other}")
        assert why in refusal(changed)


def test_products_of_tensor_ranks_may_be_fused_with_gathers() -> None:
    text = """
    model = {flavor = "8B"}
    [parallelism]
    tensor_parallel_degree = 8
    enable_async_tensor_parallel = true
    [compile]
    enable = true
    """
    name = "parallelism.enable_async_tensor_parallel"
    assert left(text) == ()
    assert fsdp2_of(text).enable_async_tensor_parallel
    assert not fsdp2_of(text.replace("parallel = true", "parallel = false")).fuses_tokens
    assert f"{name}: true needs compile.enable" in refusal(text.replace("enable = true", ""))
    alone = text.replace("degree = 8", "degree = 1")
    assert left(alone) == ()
    assert not fsdp2_of(alone).enable_async_tensor_parallel
    by_row = text.replace("}", ', converters = ["float8"]}') + (
        '[quantize.linear.float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["output"]'
    )
    assert f"{name}: true is not modelled; remove it" in refusal(by_row)
    assert left(by_row.replace("rowwise", "tensorwise")) == ()


def test_what_would_change_the_step_and_is_not_modelled_is_refused_at_once() -> None:
    text = """
    [model]
    flavor = "70B"
    [parallelism]
    tensor_parallel_degree = 8
    enable_compiled_autograd = true
    [optimizer]
    implementation = "foreach"
    [metrics]
    log_freq = 1
    [mine]
    own = 3
    """
    said = refusal(text)
    for option in (
        "parallelism.enable_compiled_autograd: true",
        'optimizer.implementation: "foreach"',
        "mine.own: 3",
    ):
        assert f"zero.torchtitan_config: {option} is not modelled; remove it" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '[model]\nflavor = "1B"\n',
            'model.flavor: "1B" of llama3 is not known, only 8B, 70B, 405B; give',
        ),
        ('model.name = "llama4"', 'model.name: "llama4" is not modelled, only llama3'),
        ("parallelism.data_parallel_shard_degree = 0", "0 must be at least 1, or -1"),
        ("training.local_batch_size = 0", "0 must be a whole number from 1 to"),
        ('training.dtype = "float16"', '"float16" must be float32 or bfloat16'),
        (
            'training = {dtype = "bfloat16", mixed_precision_param = "float32"}',
            '"float32" must be bfloat16',
        ),
        ('training.seq_len = "long"', 'training.seq_len: "long" must be a number'),
        ("training.batch_size = 2", "is of torchtitan before 0.1.0, which is not read"),
        ('optimizer.name = "Muon"', '"Muon" must be AdamW'),
        ('activation_checkpoint.mode = "memory_budget"', "only selective, full and none"),
        ('activation_checkpoint.selective_ac_option = "all"', 'must be "op" or a whole number'),
        ('model = {flavor = "8B", converters = ["nf4"]}', '"nf4" is not modelled, only float8'),
        ("training.max_norm = 0", "training.max_norm: 0 must be more than 0"),
        ("fault_tolerance.enable = true", "is not modelled"),
        ("[model", "not TOML: "),
        (
            "from torchtitan.trainer import Trainer",
            "is Python, as torchtitan's configurations since 0.2.2 are",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_the_option(text: str, why: str) -> None:
    known = 'model.flavor = "8B"\n' if text and "model" not in text and "=" in text else ""
    said = refusal(known + text)
    assert said.startswith("zero.torchtitan_config: ")
    assert why in said
    assert "\n" not in said


def test_a_scenario_that_says_otherwise_is_a_contradiction() -> None:
    assert refusal('model.flavor = "8B"', "model.layers=3") == (
        "model.layers: 3 contradicts torchtitan_config, whose model.flavor means 32"
    )


def test_a_flavor_of_ones_own_has_the_shape_of_the_scenario() -> None:
    shape = ("layers=2", "hidden_size=64", "attention_heads=4", "vocab_size=100")
    found = read('model.flavor = "mine"', *(f"model.{each}" for each in shape))
    assert found.model.layers == 2


STAGED = LLAMA3_8B.replace("local_batch_size = 1", "local_batch_size = 8").replace(
    "[parallelism]", "[parallelism]\npipeline_parallel_degree = 4"
)


def with_options(*options: str) -> str:
    return STAGED.replace("[parallelism]", "\n".join(["[parallelism]", *options]))


def fsdp2_of(text: str) -> FSDP2:
    return FSDP2.model_validate(read(text).zero.model_dump()["fsdp2"])


def test_a_pipeline_cuts_the_batch_and_keeps_parameters() -> None:
    found = read(with_options("pipeline_parallel_microbatch_size = 2"))
    assert found.parallel.pipeline == 4
    assert found.train.micro_batch_size == 2
    assert found.train.gradient_accumulation_steps == 4
    assert found.train.holds_logits
    runtime = fsdp2_of(STAGED)
    assert runtime.reshard_after_forward is False
    assert runtime.chunks_of_stage == 1
    freed = fsdp2_of(with_options('fsdp_reshard_after_forward = "always"'))
    assert freed.reshard_after_forward is True


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ((), 2),
        # 32 layers and one each for the ends are 12 stages of 3 or less, 20 of 2 without the ends
        (("pipeline_parallel_layers_per_stage = 3",), 3),
        (
            (
                "pipeline_parallel_layers_per_stage = 2",
                "pipeline_parallel_first_stage_less_layers = 0",
                "pipeline_parallel_last_stage_less_layers = 0",
            ),
            4,
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "InterleavedZeroBubble"])
def test_virtual_stages_are_counted_as_torchtitan_does(
    options: tuple[str, ...], chunks: int, schedule: str
) -> None:
    name = f'pipeline_parallel_schedule = "{schedule}"'
    found = fsdp2_of(with_options(name, *options))
    assert found.chunks_of_stage == chunks
    assert found.pipeline_schedule.lower() == schedule.lower()


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (
            'pipeline_parallel_schedule = "DualPipeV"',
            '"DualPipeV" is not modelled, only 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBV',
        ),
        ('pipeline_parallel_schedule_csv = "a.csv"', 'schedule_csv: "a.csv" is not modelled'),
        ('module_fqns_per_model_part = [["norm"]]', "module_fqns_per_model_part: "),
        ("pipeline_parallel_layers_per_stage = 5", "5 makes 7 stages, which must be a multiple"),
        ("pipeline_parallel_microbatch_size = 3", "3 must divide training.local_batch_size = 8"),
        (
            "pipeline_parallel_layers_per_stage = 3",
            "pipeline_parallel_layers_per_stage: 3 makes 3 on each rank, which 1F1B has not",
        ),
    ],
)
def test_pipelines_that_are_not_modelled_are_one_line(option: str, why: str) -> None:
    found = refusal(with_options(option))
    assert why in found
    assert "\n" not in found


def test_the_default_flavor_of_llama_is_its_debugging_model() -> None:
    found = read("[training]\nseq_len = 256\n").model
    assert (found.layers, found.hidden_size, found.vocab_size) == (6, 256, 2048)
    assert found.sequence_length == 256


@pytest.mark.parametrize("section", ["mx", "quantize.linear.mx"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_cublas"])
def test_the_converter_mx_multiplies_in_mxfp8(section: str, recipe: str) -> None:
    text = f"""
    model = {{flavor = "8B", converters = ["mx"]}}
    [{section}]
    recipe_name = "{recipe}"
    mxfp8_dim1_cast_kernel_choice = "cuda"
    """
    assert left(text) == ()
    assert read(text).train.float8 == "mxfp8"
    with_output = f"{text}filter_fqns = []"
    assert "quantize.linear.mx.filter_fqns: a list is not modelled" in refusal(with_output)
    other = text.replace(recipe, "mxfp4_cutlass")
    assert '"mxfp4_cutlass" must be mxfp8_cublas or mxfp8' in refusal(other)


QWEN3_30B = """
[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
expert_parallel_degree = 8
"""


def test_expert_ranks_of_torchtitan_are_read() -> None:
    assert read(QWEN3_30B).parallel.expert == 8
    assert left(QWEN3_30B) == ()
    parts = f"{QWEN3_30B}tensor_parallel_degree = 2\nexpert_tensor_parallel_degree = 1\n"
    assert read(parts).parallel.tensor == 2


def test_expert_ranks_have_no_effect_without_experts() -> None:
    text = LLAMA3_8B.replace("[parallelism]", "[parallelism]\nexpert_parallel_degree = 8")
    assert read(text) == read(LLAMA3_8B)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "expert_tensor_parallel_degree = 2",
            "parallelism.expert_tensor_parallel_degree: 2 must be 1: torchtitan removed it in ",
        ),
        (
            'expert_parallel_comm_backend = "deepep"',
            'parallelism.expert_parallel_comm_backend: "deepep" is not modelled, only standard',
        ),
    ],
)
def test_options_of_experts_that_are_not_modelled_are_refused(line: str, why: str) -> None:
    assert why in refusal(f"{QWEN3_30B}{line}\n")


@pytest.mark.parametrize("converter", ["float8", "mx"])
def test_experts_in_8_bits_are_refused_and_have_no_effect_without_a_converter(
    converter: str,
) -> None:
    section = f'\n[{converter}]\nmoe_fqns_prototype = ["experts"]\n'
    assert read(QWEN3_30B + section) == read(QWEN3_30B)
    converted = QWEN3_30B.replace("[model]", f'[model]\nconverters = ["{converter}"]')
    assert converted != QWEN3_30B
    assert f"{converter}.moe_fqns_prototype" in refusal(converted + section)
