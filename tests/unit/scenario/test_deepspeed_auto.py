"""Options of a ds_config.json that Hugging Face fills, have two names, or are not modelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_deepspeed_config import Config, named, read

from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import ScenarioError

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
