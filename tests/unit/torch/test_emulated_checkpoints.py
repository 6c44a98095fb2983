"""On real ranks, runtimes that keep checkpoints on the host train what they train without, in bits.

Blocks are five, so that some come back where a stream of copies keeps the last two.
"""

import pytest
import torch
from emulated_strategies import CHECKPOINTED, strategy
from shared_ranks import SharedPools
from tiny_training import BOUND, distance
from trained_axes import DEEP_LLAMA, AxesCase, by_plain_loop, on, trained_on_axes, whole

from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy

FULL = Checkpointing.FULL
PARTITIONED = {"activations": Activations(checkpointing=FULL, partition=True)}


def without(moved: Strategy) -> Strategy:
    """The same with checkpoints on the device."""
    runtime = moved.zero.emulate
    assert runtime is not None
    assert runtime.checkpoint_option is not None
    stays = {runtime.checkpoint_option: False}
    if "checkpoint_stream" in type(runtime).model_fields:
        stays["checkpoint_stream"] = False
    return moved.but({"zero.emulate": runtime.model_copy(update=stays)})


def moving() -> dict[str, Strategy]:
    """Every runtime that moves checkpoints, on two data ranks, or on a tensor axis."""
    found: dict[str, Strategy] = {}
    for number, (name, named) in enumerate(CHECKPOINTED.items()):
        made = strategy(
            named,
            data=2,
            micro_batches=1 + number % 2,
            checkpointing=FULL,
            precision=Precision.BF16 if "stream" in name else Precision.FP32,
            clip_norm=0.1,
        )
        assert made is not None
        found[name] = made
    blocking = found["deepspeed 1, checkpoints on the host"]
    found["deepspeed 1, parts of checkpoints"] = on(blocking, tensor=2).but(PARTITIONED)
    found["fsdp2, tokens cut"] = on(found["fsdp2, checkpoints on the host"], tensor=2)
    return found


MOVING = moving()


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", MOVING)
def test_checkpoints_on_the_host_change_no_bit_and_ranks_train_as_one_process_does(
    pool_of: SharedPools, name: str
) -> None:
    """One in bf16 has no plain loop, whose parameters are as wide as its masters."""
    case = AxesCase(DEEP_LLAMA, MOVING[name], observe=False)
    kept = AxesCase(DEEP_LLAMA, without(MOVING[name]), observe=False)
    moved, stayed = trained_on_axes(pool_of(2), [case, kept])
    for one, other in zip(moved, stayed, strict=True):
        assert one.losses == other.losses
        for parameter, value in other.parameters.items():
            assert torch.equal(one.parameters[parameter], value), parameter
    if case.strategy.train.precision is Precision.FP32:
        before, after, losses = by_plain_loop(case)
        assert distance(whole(case, moved), after, before) <= BOUND[Precision.FP32]
        assert moved[0].losses == pytest.approx(losses, rel=1e-3)
