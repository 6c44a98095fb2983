"""What a ds_config.json says is what the scenario means; what it cannot say is one line."""

import json
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_deepspeed_config import TEXT, Config, named, read

from zsim.dtype import DType
from zsim.scenario import trainer_files
from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import ScenarioError
from zsim.scenario.toml import parse
from zsim.strategy.train import LossScale
from zsim_runtimes.deepspeed.config_reader import PLAIN
from zsim_runtimes.deepspeed.ignored_options import BEFORE_STAGE_3, DEFAULTS, NAMED, WITHOUT_EFFECT
from zsim_runtimes.deepspeed.options import DeepSpeed

configured = partial(trainer_files.configured, key="deepspeed_config")


def set_at(config: Config, name: str, value: object) -> None:
    """Set the option of the dotted `name`, unless a section on the way is none."""
    *path, last = name.split(".")
    for section in path:
        found = config.setdefault(section, {})
        config = cast("Config", found) if isinstance(found, dict) else {}
    config[last] = value


def wrong(config: Config, *settings: str) -> str:
    """Return why `config` is refused."""
    with pytest.raises(ScenarioError) as error:
        read(config, *settings)
    return str(error.value)


def zero(stage: int, **options: object) -> Config:
    return {"zero_optimization": {"stage": stage, **options}}


def test_the_options_of_zero_are_those_of_the_runtime() -> None:
    options = {
        "reduce_bucket_size": "2e8",
        "overlap_comm": False,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 3e7,
        "stage3_max_reuse_distance": 7,
        "stage3_param_persistence_threshold": 5,
        "zero_hpz_partition_size": 2,
    }
    table = read(zero(3, **options) | {"communication_data_type": "FP32"}).zero
    assert table.stage == 3
    assert emulated(table) == DeepSpeed(
        reduce_bucket_size=200_000_000,
        overlap_comm=False,
        communication_data_type=DType.FP32,
        sub_group_size=1_000_000_000,
        stage3_prefetch_bucket_size=0,
        stage3_max_live_parameters=30_000_000,
        stage3_max_reuse_distance=7,
        stage3_param_persistence_threshold=5,
        zero_hpz_partition_size=2,
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_options_of_stage_3_have_no_effect_before_it(stage: int) -> None:
    options = {"zero_hpz_partition_size": 8, "stage3_max_reuse_distance": 5, "sub_group_size": 9}
    assert emulated(read(zero(stage, **options)).zero) == DeepSpeed()
    assert not named(zero(stage, stage3_use_all_reduce_for_fetch_params=True))
    assert "params: true is not modelled" in wrong(
        zero(3, stage3_use_all_reduce_for_fetch_params=True)
    )


def test_where_deepspeed_does_the_same_at_0_as_at_1_it_is_1() -> None:
    options = {"sub_group_size": 0, "zero_hpz_partition_size": 0}
    assert emulated(read(zero(3, **options)).zero) == DeepSpeed(sub_group_size=1)


def test_the_largest_number_that_python_indexes_with_is_read() -> None:
    found = emulated(read(zero(3, stage3_max_reuse_distance=2**63 - 1)).zero)
    assert found == DeepSpeed(stage3_max_reuse_distance=2**63 - 1)


def test_optimizer_clipping_and_bf16_are_those_of_training() -> None:
    params = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": "1e-6", "weight_decay": 0.1}
    train = read(
        zero(2)
        | {
            "bf16": {"enabled": True},
            "fp16": {"enabled": "auto", "loss_scale_window": 7, "hysteresis": 2},
            "gradient_clipping": 1,
            "optimizer": {"type": "AdamW", "params": params},
        }
    ).train
    assert (train.precision, train.clip_norm, train.optimizer) == ("bf16", 1.0, "adam")
    assert train.learning_rate == 3e-4
    found = train.model_dump()
    assert [found[name] for name in ("beta1", "beta2", "epsilon", "weight_decay")] == [
        0.9,
        0.95,
        1e-6,
        0.1,
    ]
    assert train.loss_scale == LossScale()  # of fp16 alone


def test_sgd_has_momentum_and_decay_and_its_dampening_is_refused() -> None:
    params = {"lr": 0.5, "weight_decay": 1, "momentum": 0.9, "nesterov": True}
    config: Config = {"optimizer": {"type": "SGD", "params": params}}
    train = read(zero(1) | config).train
    assert (train.optimizer, train.learning_rate) == ("sgd", 0.5)
    found = train.model_dump()
    assert [found[name] for name in ("weight_decay", "momentum", "nesterov")] == [1.0, 0.9, True]
    config = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.1}}}
    assert "optimizer.params.dampening: 0.1 is not modelled" in wrong(zero(1) | config)


def test_the_loss_scale_is_dynamic_at_0_and_else_constant() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 20, "min_loss_scale": 1e-5, "hysteresis": 2}
    found, ignored, *_ = configured(parse(TEXT), json.dumps(zero(1) | {"fp16": fp16}))
    assert found.train.precision == "fp16"
    assert found.train.loss_scale == LossScale(initial=2.0**20, interval=1000, minimum=1e-5)
    assert ignored == ("fp16.hysteresis (the loss scale falls at the first overflow)",)
    found, ignored, *_ = configured(
        parse(TEXT), json.dumps(zero(1) | {"fp16": fp16 | {"loss_scale": 128}})
    )
    scale = found.train.loss_scale
    assert (scale.initial, scale.growth, scale.backoff, scale.minimum) == (128, 1, 1, 128)
    assert ignored == ()


@pytest.mark.parametrize(
    ("config", "micro", "steps", "total"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 4, 1, None),
        ({"train_batch_size": 64}, None, 1, 64),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, None, 64),
        ({"train_batch_size": 64, "gradient_accumulation_steps": "auto"}, None, 1, 64),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, 2, None),
        ({}, None, None, None),
    ],
)
def test_accumulation_is_1_where_one_batch_size_is_given(
    config: Config, micro: int | None, steps: int | None, total: int | None
) -> None:
    train = read(config, "zero.stage=1").train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (micro, steps)
    assert train.global_batch_size == total


def test_what_the_file_leaves_open_is_the_scenarios() -> None:
    config: Config = {
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }
    settings = (
        "zero.stage=2",
        "zero.deepspeed.reduce_bucket_size=77",
        "train.precision=bf16",
        "train.gradient_accumulation_steps=3",
        "train.learning_rate=0.25",
    )
    found = read(config, *settings)
    assert emulated(found.zero) == DeepSpeed(reduce_bucket_size=77)
    assert (found.zero.stage, found.train.precision) == (2, "bf16")
    assert (found.train.gradient_accumulation_steps, found.train.learning_rate) == (3, 0.25)


def test_what_changes_no_step_is_silent_or_named_with_what_differs() -> None:
    config: Config = {
        "scheduler": {"type": "WarmupLR"},
        "flops_profiler": {"enabled": False, "module_depth": -1},
        "steps_per_print": 10,
        "a.b": 1,
        "activation_checkpointing": {"contiguous_memory_optimization": True},
        "fp16": {"fp16_master_weights_and_grads": True},
        "bf16": {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True},
        "zero_optimization": {
            "stage": 3,
            "round_robin_gradients": True,
            "allgather_bucket_size": 5,
            "offload_optimizer": {"device": "none", "ratio": 0.5},
        },
    }
    assert named(config) == (
        "scheduler (the learning rate is train.learning_rate in every step)",
        '"a.b" (no option of DeepSpeed, which ignores it)',
    )


def test_timers_that_stop_the_host_are_refused() -> None:
    for is_on in (False, True):
        for name, value in (("wall_clock_breakdown", is_on), ("comms_logger", {"enabled": is_on})):
            config: Config = {**zero(2), name: value}
            if not is_on:
                assert named(config) == ()
                continue
            with pytest.raises(ScenarioError, match=f"zero.deepspeed_config: {name}: .*remove it"):
                read(config)


def test_every_default_is_silent_and_any_other_value_is_not() -> None:
    for name, default in DEFAULTS.items():
        for value, silent in ((default, True), ("other", False)):
            section = "bf16" if name.startswith("bf16.") else "fp16"
            config: Config = {section: {"enabled": True}, **zero(2)}
            set_at(config, name, value)
            if name.startswith("optimizer."):
                set_at(config, "optimizer.type", "SGD")
            if "offload_optimizer." in name:
                set_at(config, "zero_optimization.offload_optimizer.device", "cpu")
            never = name.startswith("zero_optimization.stage3_")
            if silent or never:
                assert named(config) == ()
            elif name in NAMED:
                assert named(config) == (f"{name} ({NAMED[name]})",)
            else:
                assert f"{name}: " in wrong(config)


WRONG: dict[str, tuple[str, str]] = {
    "no JSON": ("stage = 3", "not JSON: Expecting value"),
    "too deep": ("[" * 100_000, "not JSON: nested too deeply"),
    "a list": ("[]", "must be an object, as ds_config.json is"),
    "twice": ('{"fp16": {}, "fp16": {}}', 'not JSON: "fp16" is repeated'),
    "a section that is none": ('{"fp16": true}', "fp16: true must be an object"),
    "parameters that are none": (
        '{"optimizer": {"params": 3}}',
        "optimizer.params: 3 must be an object",
    ),
    "no stage": (json.dumps(zero(4)), "zero_optimization.stage: 4 must be 0, 1, 2 or 3"),
    "a fraction": (
        json.dumps(zero(1, reduce_bucket_size=0.5)),
        "zero_optimization.reduce_bucket_size: 0.5 must be a whole number from 1 to",
    ),
    "not finite": ('{"train_batch_size": 1e999}', "train_batch_size: Infinity must be a number"),
    "a flag": (
        json.dumps(zero(1, overlap_comm=1)),
        "zero_optimization.overlap_comm: 1 must be true or false",
    ),
    "a device": (
        json.dumps(zero(3, offload_param={"device": "disk"})),
        'zero_optimization.offload_param.device: "disk" must be "none", "cpu" or "nvme"',
    ),
    "a format": (
        '{"communication_data_type": "int8"}',
        'communication_data_type: "int8" must be "fp16", "bf16" or "fp32"',
    ),
    "betas": (
        '{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}',
        "optimizer.params.betas: a list must be two numbers",
    ),
    "a beta": (
        json.dumps(zero(1) | {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}),
        "optimizer.params.betas: 1 must be less than 1",
    ),
    "no batch": (
        json.dumps(zero(1) | {"train_micro_batch_size_per_gpu": 0}),
        "train_micro_batch_size_per_gpu: 0 must be at least 1",
    ),
    "a scale": (
        json.dumps(zero(1) | {"fp16": {"enabled": True, "loss_scale": -1}}),
        "fp16.loss_scale: -1 must be more than 0",
    ),
    "both formats": (
        '{"fp16": {"enabled": true}, "bf16": {"enabled": "True"}}',
        "bf16.enabled: true contradicts fp16.enabled",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_one_line(name: str) -> None:
    text, line = WRONG[name]
    with pytest.raises(ScenarioError) as error:
        configured(parse(TEXT), text)
    assert str(error.value).startswith(f"zero.deepspeed_config: {line}")


@pytest.mark.parametrize(
    "found",
    [{}, zero(0), {"zero_optimization": {"overlap_comm": True, "round_robin_gradients": 1}}],
)
def test_a_file_without_zero_is_stage_0(found: dict[str, object]) -> None:
    text = json.dumps(found | {"train_batch_size": 32, "fp16": {"enabled": True}})
    read = configured(parse(TEXT), text)[0]
    assert (read.zero.emulate, read.zero.stage) == ("deepspeed", 0)
    assert read.zero.model_dump()["deepspeed"] is None


CONFIG = zero(3, reduce_bucket_size=5e8) | {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "gradient_clipping": 0,
    "train_batch_size": 64,
}


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("zero.emulate=fsdp2", 'zero.emulate: "fsdp2" contradicts deepspeed_config'),
        ("zero.stage=2", "whose zero_optimization.stage means 3"),
        (
            "zero.deepspeed.reduce_bucket_size=7",
            "zero.deepspeed.reduce_bucket_size: 7 contradicts deepspeed_config, "
            "whose zero_optimization.reduce_bucket_size means 500000000",
        ),
        ("train.precision=fp16", 'train.precision: "fp16" contradicts deepspeed_config'),
        ("train.clip_norm=1", "whose gradient_clipping means null"),
        ("train.global_batch_size=32", "whose train_batch_size means 64"),
    ],
)
def test_what_contradicts_the_scenario_is_one_line(setting: str, line: str) -> None:
    with pytest.raises(ScenarioError) as error:
        read(CONFIG, setting)
    assert line in str(error.value)


def test_a_format_that_is_disabled_is_not_the_scenarios() -> None:
    with pytest.raises(ScenarioError) as error:
        read(zero(1) | {"fp16": {"enabled": False}}, "train.precision=fp16")
    assert str(error.value) == (
        'train.precision: "fp16" contradicts deepspeed_config, whose fp16.enabled is false'
    )


def test_what_both_say_alike_is_no_contradiction() -> None:
    settings = ("zero.stage=3", "zero.emulate=deepspeed", "zero.deepspeed.reduce_bucket_size=5e8")
    found = read(CONFIG, *settings, "train.precision=bf16", "train.global_batch_size=64")
    assert found == read(CONFIG)


NAMES = [
    *sorted({*PLAIN, *DEFAULTS, *WITHOUT_EFFECT, *BEFORE_STAGE_3}),
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.min_loss_scale",
    "bf16.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "bfloat16",
    "optimizer",
    "optimizer.type",
    "optimizer.params",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "zero_optimization",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, 3, 10**400, 0.5]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["auto", "2e8", "nan", "1e999", "true", "AdamW", "sgd", "bf16"]),
    st.lists(st.one_of(st.floats(), st.text(max_size=1)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2),
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Options that DeepSpeed has, and others, at any values, some in sections that are none."""
    config: Config = {}
    names = st.sampled_from(NAMES) | st.text(max_size=3)
    for name, value in draw(st.lists(st.tuples(names, VALUES), max_size=8)):
        set_at(config, name, value)
    return config


@given(configs(), st.sampled_from(["zero.stage=2", "train.precision=fp16", "train.steps=1"]))
def test_any_configuration_is_read_or_refused_in_one_line(config: Config, setting: str) -> None:
    try:
        scenario, ignored, *_ = configured(parse(TEXT, [setting]), json.dumps(config))
    except ScenarioError as error:
        assert "\n" not in str(error)  # noqa: PT017  (either is right)
        return
    assert scenario.zero.emulate == "deepspeed"
    assert isinstance(emulated(scenario.zero), DeepSpeed)
    assert len(set(ignored)) == len(ignored)


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"^zero\.deepspeed_config: [^\n]*\Z"):
        configured(parse(TEXT), f"[{text}")


def test_comments_and_last_commas_are_read_as_in_hjson() -> None:
    text = """{
  // a comment, with "quotes" and a comma,
  "zero_optimization": {"stage": 2,},  # "stage": 3
  "train_micro_batch_size_per_gpu": 3, "monitor // not # one": [1,],
}"""
    found = configured(parse(TEXT), text)
    assert (found.scenario.zero.stage, found.scenario.train.micro_batch_size) == (2, 3)
    assert "monitor // not # one" in found.ignored[0]


def test_a_name_of_a_template_is_named() -> None:
    with pytest.raises(ScenarioError, match=r'not JSON: line 2: "BATCH_SIZE" must be replaced by'):
        configured(parse(TEXT), '{"zero_optimization": {"stage": 2},\n"a": BATCH_SIZE}')


def test_quotes_and_commas_without_end_are_refused_in_linear_time() -> None:
    for text in ('"\\' * 100_000, "," * 300_000, "{" + ", " * 300_000, "#" * 300_000):
        with pytest.raises(ScenarioError, match="not JSON"):
            configured(parse(TEXT), text)
