"""FSDP2 that offloads copies what PyTorch's own copies, and waits where it waits."""

import pytest
from fsdp_copies import issued, joined, recorded
from fsdp_order import SHAPE
from staged_fsdp import copies_of_stage

from zsim.config_error import ConfigError
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import HostWait, walk
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2.options import FSDP2


def strategy(micro_batches: int, precision: str = "bf16", **said: object) -> Strategy:
    """On two ranks."""
    options = FSDP2.model_validate({"offload_policy": "cpu", **said})
    return Strategy.of(
        {
            "parallel.data": 2,
            "zero.stage": 3,
            "zero.emulate": options,
            "train.precision": precision,
            "train.gradient_accumulation_steps": micro_batches,
        }
    )


def of_gpt(made: Strategy) -> Schedule:
    return make_schedule(gpt(SHAPE, micro_batch_size=1, precision=made.train.precision), made)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("micro_batches", "precision", "pin_memory"),
    [(1, "fp32", True), (2, "bf16", True), (2, "bf16", False)],
)
def test_copies_and_collectives_are_issued_as_by_fully_shard(
    micro_batches: int, precision: str, pin_memory: bool
) -> None:
    made = strategy(micro_batches, precision, pin_memory=pin_memory)
    theirs = recorded(SHAPE, made)
    assert {each.kind for each in theirs} == {
        "all_gather",
        "reduce_scatter",
        "to_host",
        "to_device",
    }
    assert joined(issued(of_gpt(made))) == theirs


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("micro_batches", "precision", "policy"),
    [(1, "fp32", "none"), (2, "bf16", "none"), (2, "bf16", "cpu")],
)
def test_checkpoints_go_to_the_host_and_come_back_where_offload_wrapper_copies_them(
    micro_batches: int, precision: str, policy: str
) -> None:
    said = {"offload_policy": policy, "offload_wrapper": True}
    made = strategy(micro_batches, precision).but(
        {
            "activations.checkpointing": "full",
            "zero.emulate": FSDP2.model_validate(said),
        }
    )
    theirs = recorded(SHAPE, made)
    copies = [each.kind for each in theirs if each.kind in {"to_host", "to_device"}]
    assert len(copies) >= 2 * SHAPE.layers * micro_batches
    assert joined(issued(of_gpt(made))) == theirs


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("said", "precision"),
    [
        ({"reshard_after_forward": False}, "bf16"),
        ({"reshard_after_forward": True}, "fp32"),
        ({"reshard_after_forward": False, "pipeline_schedule": "Interleaved1F1B"}, "bf16"),
    ],
)
def test_checkpoints_of_stages_go_and_come_back_where_offload_wrapper_copies_them(
    said: dict[str, object], precision: str
) -> None:
    made = strategy(3 if "pipeline_schedule" not in said else 2, precision).but(
        {
            "activations.checkpointing": "full",
            "parallel.pipeline": 2,
            "zero.emulate": FSDP2.model_validate({**said, "offload_wrapper": True}),
        }
    )
    for stage in range(2):
        ours, theirs = copies_of_stage(made, stage)
        assert {"to_host", "to_device"} <= {each.kind for each in theirs}
        assert ours == theirs


def waits(made: Strategy) -> int:
    """Waits of the host in a step, less those for the update."""
    (program,) = of_gpt(made).programs
    return sum(
        isinstance(each, HostWait) and "update" not in each.id for each in walk(program.step)
    )


def test_pinned_gradients_are_awaited_once_for_each_group_at_the_end_of_backward() -> None:
    groups = SHAPE.layers + 1
    assert waits(strategy(1)) == groups


def test_gradients_that_are_added_on_the_host_stop_it() -> None:
    """One wait for the copy and one for the sum: a thread of Python does it."""
    groups = SHAPE.layers + 1
    assert waits(strategy(2)) == groups + 2 * groups


def test_every_copy_from_and_to_pageable_memory_stops_the_host() -> None:
    made = strategy(1, pin_memory=False)
    copies = [each for each in issued(of_gpt(made)) if each.kind in {"to_host", "to_device"}]
    assert waits(made) == len(copies)


def test_an_unknown_policy_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="offload_policy"):
        strategy(1, offload_policy="nvme")
    with pytest.raises(ConfigError, match="stays at device"):
        strategy(1).but({"offload.optimizer": "host"})
