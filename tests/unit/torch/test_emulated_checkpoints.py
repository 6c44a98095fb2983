"""On real ranks, runtimes that keep checkpoints on the host train what they train without, in bits.

Blocks are five, so that some come back where a stream of copies keeps the last two.
"""

from collections.abc import Sequence

import pytest
import torch
from emulated_strategies import CHECKPOINTED, strategy
from tiny_training import BOUND, distance
from trained_axes import DEEP_LLAMA, AxesCase, RankResult, by_plain_loop, by_ranks, on, whole

from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_torch.supervise.ranks import RankPool

FULL = Checkpointing.FULL
PARTITIONED = {"activations": Activations(checkpointing=FULL, partition=True)}
PLAIN_LOOP = ("fsdp1, checkpoints on the host", "deepspeed 3, checkpoints on the host")
"""Those that are compared with one process; the others are as they are without."""


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
Ran = dict[str, tuple[AxesCase, list[RankResult], list[RankResult]]]


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Of each the case, and what every rank has, with checkpoints on the host and without."""
    moved = [AxesCase(DEEP_LLAMA, each) for each in MOVING.values()]
    kept = [AxesCase(DEEP_LLAMA, without(each)) for each in MOVING.values()]
    with RankPool(2) as pool:
        by_rank: Sequence[list[RankResult]] = pool.run(by_ranks, [*moved, *kept])
    results = [list(each) for each in zip(*by_rank, strict=True)]
    halves = zip(moved, results[: len(moved)], results[len(moved) :], strict=True)
    return dict(zip(MOVING, halves, strict=True))


@pytest.mark.parametrize("name", MOVING)
def test_checkpoints_on_the_host_change_no_bit(ran: Ran, name: str) -> None:
    _, moved, kept = ran[name]
    for one, other in zip(moved, kept, strict=True):
        assert one.losses == other.losses
        for parameter, value in other.parameters.items():
            assert torch.equal(one.parameters[parameter], value), parameter


@pytest.mark.parametrize("name", PLAIN_LOOP)
def test_ranks_train_as_one_process_does(ran: Ran, name: str) -> None:
    case, moved, _ = ran[name]
    before, after, losses = by_plain_loop(case)
    assert distance(whole(case, moved), after, before) <= BOUND[Precision.FP32]
    assert moved[0].losses == pytest.approx(losses, rel=1e-3)
