"""Checkpoints and formats of states in a ds_config.json: read, or refused in one line."""

import pytest
from read_deepspeed_config import Config, named, read

from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import ScenarioError
from zsim_runtimes.deepspeed.options import DeepSpeed


def zero(stage: int) -> Config:
    return {"zero_optimization": {"stage": stage}}


def test_checkpoints_are_partitioned_where_there_are_some() -> None:
    config = zero(1) | {"activation_checkpointing": {"partition_activations": True}}
    assert not read(config).activations.partition
    assert read(config, "activations.checkpointing=full").activations.partition
    assert not named(config)


def test_checkpoints_go_to_the_host_where_there_are_some() -> None:
    config = zero(1) | {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert emulated(read(config).zero) == DeepSpeed()
    found = read(config, "activations.checkpointing=full")
    assert emulated(found.zero) == DeepSpeed(cpu_checkpointing=True)
    assert not named(config)


NARROW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def test_masters_and_moments_in_bf16_are_a_precision() -> None:
    config = zero(1) | {"bf16": {"enabled": True, **NARROW}}
    assert read(config).train.precision == "pure_bf16"
    assert not named(config)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"bf16_optimizer_states": True},
            "bf16.bf16_optimizer_states: true needs bf16.bf16_master_weights_and_grads = true",
        ),
        (
            {"bf16_master_weights_and_grads": True},
            "bf16.bf16_master_weights_and_grads: true is modelled with "
            "bf16.bf16_optimizer_states = true alone",
        ),
    ],
)
def test_one_of_both_flags_is_refused_in_one_line(flags: dict[str, bool], why: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read(zero(1) | {"bf16": {"enabled": True, **flags}})
    assert str(caught.value) == f"zero.deepspeed_config: {why}"
