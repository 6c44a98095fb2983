"""On real ranks, runtimes that keep states on the host train what they train without, in bits."""

import pytest
import torch
from emulated_strategies import OFFLOADED, strategy
from tiny_training import Case, Result, all_by_schedule

from zsim.runtimes.deepspeed.options import DeepSpeed, OffloadOptimizer, OffloadParam
from zsim.runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy
from zsim_torch.supervise.ranks import RankPool

WAYS = ((Precision.BF16, 1, 0.05), (Precision.FP32, 3, None))
"""Formats, micro-batches, and the largest norm."""


def without(options: RuntimeOptions) -> RuntimeOptions:
    """The same runtime with everything on the device."""
    if isinstance(options, FSDP2):
        return options.model_copy(update={"offload_policy": OffloadPolicy.NONE})
    assert isinstance(options, DeepSpeed)
    return options.model_copy(
        update={"offload_optimizer": OffloadOptimizer(), "offload_param": OffloadParam()}
    )


def pairs(ranks: int) -> list[tuple[str, Strategy, Strategy]]:
    """Each offloaded strategy and the same without."""
    found: list[tuple[str, Strategy, Strategy]] = []
    for name, (stage, options) in OFFLOADED.items():
        for precision, micro_batches, clip in WAYS:
            one, other = (
                strategy(
                    (stage, each),
                    data=ranks,
                    micro_batches=micro_batches,
                    precision=precision,
                    clip_norm=clip,
                )
                for each in (options, without(options))
            )
            if one is not None and other is not None:
                found.append((f"{name}, {precision}, {micro_batches}", one, other))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_on_the_host_change_no_bit(ranks: int) -> None:
    found = pairs(ranks)
    cases = [Case(each, steps=3, observe=True) for _, *both in found for each in both]
    with RankPool(ranks) as pool:
        by_rank: list[list[Result]] = [*pool.run(all_by_schedule, cases)]
    for results in by_rank:
        for (name, *_), one, other in zip(found, results[::2], results[1::2], strict=True):
            assert one.losses == other.losses, name
            for parameter, value in other.parameters.items():
                assert torch.equal(one.parameters[parameter], value), (name, parameter)
            assert one.observed["live_bytes_peak/pool/host"] > 0, name
            live = one.observed["live_bytes_peak/pool/host"]
            assert live == one.observed["booked_bytes_peak/pool/host"], name
