"""Options of a ds_config.json that Hugging Face fills, have two names, or are not modelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_deepspeed_config import Config, assumed, named, read

from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import ScenarioError
from zsim_runtimes.deepspeed.options import DeepSpeed

STAGE3 = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def zero(stage: int, **options: object) -> Config:
    return {"zero_optimization": {"stage": stage, **options}}


def wrong(config: Config, *settings: str) -> str:
    """Return why `config` is refused."""
    with pytest.raises(ScenarioError) as error:
        read(config, *settings)
    return str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"amp": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"prescale_gradients": True},
        {"sparse_gradients": True},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"compile": {"deepcompile": True}},
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"optimizer": {"type": "Lamb"}},
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
        {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        zero(3, contiguous_gradients=False),
        zero(3, zero_quantized_weights=True),
        zero(3, zero_quantized_gradients=True),
        zero(3, mics_shard_size=8),
        zero(3, memory_efficient_linear=1),
        zero(3, module_granularity_threshold=5),
        zero(3, use_all_reduce_for_fetch_params=True),
        zero(3, offload_param={"device": "nvme", "tiles": 2}),
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
        zero(3, no_such_option=3),
    ],
)
def test_an_option_that_changes_the_step_and_is_not_modelled_is_refused(config: Config) -> None:
    said = wrong(zero(1) | config, "activations.checkpointing=full")
    assert said.startswith("zero.deepspeed_config: ")
    assert " is not modelled" in said
    assert "also" not in said


@given(st.integers(1, 30_000), st.sampled_from([1, 2, 3]))
def test_hugging_face_fills_auto_from_the_hidden_size(hidden: int, stage: int) -> None:
    """The formulas are those of transformers 5.23, HfTrainerDeepSpeedConfig."""
    names = ("reduce_bucket_size", *STAGE3)
    config = zero(stage, **dict.fromkeys(names, "auto")) | {"gradient_clipping": "auto"}
    found = read(config, f"model.hidden_size={hidden}")
    filled = {"reduce_bucket_size": hidden * hidden}
    if stage == 3:
        filled["stage3_prefetch_bucket_size"] = 9 * hidden * hidden // 10
        filled["stage3_param_persistence_threshold"] = 10 * hidden
    assert emulated(found.zero) == DeepSpeed.model_validate(filled)
    assert found.train.clip_norm == 1.0
    assert read(config, f"model.hidden_size={hidden}", "train.clip_norm=2").train.clip_norm == 2.0


def test_auto_without_a_hidden_size_is_refused_and_elsewhere_a_default() -> None:
    assert wrong(zero(2, reduce_bucket_size="auto")) == (
        'zero.deepspeed_config: zero_optimization.reduce_bucket_size: "auto" is made from '
        "model.hidden_size, which is missing; give a number"
    )
    without = {"sub_group_size": "auto", "stage3_max_live_parameters": "auto"}
    assert emulated(read(zero(3, **without)).zero) == DeepSpeed()
    before = dict.fromkeys(STAGE3, "auto")
    assert emulated(read(zero(2, **before)).zero) == DeepSpeed()
    assert read(zero(2) | {"optimizer": "auto", "fp16": "auto"}).zero.stage == 2


def test_options_of_stage_3_are_read_without_their_prefix() -> None:
    names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters")
    values = {name: 3 + at for at, name in enumerate((*names, "max_reuse_distance"))}
    found = emulated(read(zero(3, **values)).zero)
    assert found == DeepSpeed.model_validate({f"stage3_{name}": n for name, n in values.items()})
    both = zero(3, max_reuse_distance=7, stage3_max_reuse_distance=8)
    assert emulated(read(both).zero) == DeepSpeed(stage3_max_reuse_distance=8)
    assert not named(zero(3, gather_16bit_weights_on_model_save=True))


MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_batch_sizes_that_are_auto_have_the_defaults_of_training_arguments() -> None:
    """`per_device_train_batch_size` is 8 and `gradient_accumulation_steps` 1 by default."""
    config = zero(2) | {MICRO: "auto", ACCUMULATION: "auto", "train_batch_size": "auto"}
    found = read(config).train
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (8, 1)
    assert assumed(config) == (
        "train_micro_batch_size_per_gpu is 8 (train.micro_batch_size gives another)",
        "gradient_accumulation_steps is 1 (train.gradient_accumulation_steps gives another)",
    )
    whole = zero(2) | {"train_batch_size": "auto"}
    assert read(whole).train.micro_batch_size == 8
    assert assumed(zero(2) | {MICRO: 4, ACCUMULATION: 2}) == ()


@given(st.sets(st.sampled_from(["micro_batch_size", "gradient_accumulation_steps", "global"])))
def test_batch_sizes_of_the_scenario_take_precedence_over_auto(given_sizes: set[str]) -> None:
    names = {
        "micro_batch_size": "micro_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "global": "global_batch_size",
    }
    config = zero(1) | {MICRO: "auto", ACCUMULATION: "auto"}
    settings = [f"train.{names[each]}=32" for each in sorted(given_sizes)]
    found = read(config, *settings).train.model_dump(exclude_unset=True)
    assert all(found[names[each]] == 32 for each in given_sizes)
    sizes = {*names.values()} & found.keys()
    assert len(sizes) == max(2, len(given_sizes))
    assert len(assumed(config, *settings)) == len(sizes) - len(given_sizes)


def test_constants_of_the_optimizer_that_are_auto_are_those_of_training_arguments() -> None:
    names = ("lr", "betas", "eps", "weight_decay")
    params = dict.fromkeys(names, "auto")
    config = zero(1) | {"optimizer": {"type": "AdamW", "params": params}}
    found = read(config).train
    assert found.learning_rate == 5e-5
    constants = found.model_dump()
    assert constants["weight_decay"] == 0.0
    assert (constants["beta1"], constants["beta2"], constants["epsilon"]) == (0.9, 0.999, 1e-8)
    assert read(config, "train.learning_rate=0.1").train.learning_rate == 0.1


@pytest.mark.parametrize(
    ("formats", "setting", "precision", "is_assumed"),
    [
        ({"bf16": "auto", "fp16": "auto"}, "", "fp32", True),
        ({"bf16": "auto", "fp16": "auto"}, "train.precision=bf16", "bf16", False),
        ({"bf16": True, "fp16": "auto"}, "", "bf16", False),
        ({"fp16": "auto"}, "train.precision=fp16", "fp16", False),
    ],
)
def test_a_format_that_is_auto_is_that_of_the_scenario(
    formats: Config, setting: str, precision: str, *, is_assumed: bool
) -> None:
    config = zero(2) | {name: {"enabled": value} for name, value in formats.items()}
    settings = [setting] if setting else []
    assert read(config, *settings).train.precision == precision
    said = "bf16.enabled and fp16.enabled are false (train.precision gives one)"
    assert assumed(config, *settings) == ((said,) if is_assumed else ())
