"""Schedules of other runtimes train on real ranks as one process does."""

import pytest
from emulated_strategies import EMULATED, strategy
from tiny_training import BOUND, Case, all_by_schedule, by_plain_loop, distance

from zsim.strategy import Checkpointing, Precision
from zsim_torch.ranks import RankPool


def cases(data: int, replicate: int) -> dict[str, Case]:
    """Every runtime, with one micro-batch a step and with two."""
    found: dict[str, Case] = {}
    for name, named in EMULATED.items():
        for micro_batches, checkpointing in ((1, Checkpointing.FULL), (2, Checkpointing.NONE)):
            made = strategy(
                named,
                data=data,
                replicate=replicate,
                micro_batches=micro_batches,
                checkpointing=checkpointing,
                clip_norm=0.1,
            )
            if made is not None:
                found[f"{name}, {micro_batches} micro-batches"] = Case(made, steps=3)
    return found


@pytest.mark.parametrize(("data", "replicate"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_every_runtime_trains_as_one_process_does(data: int, replicate: int) -> None:
    found = cases(data, replicate)
    with RankPool(data * replicate) as pool:
        results = pool.run(all_by_schedule, list(found.values()))[0]
    plain = {
        micro_batches: by_plain_loop(case)
        for case in found.values()
        for micro_batches in [case.strategy.gradient_accumulation_steps]
    }
    for (name, case), result in zip(found.items(), results, strict=True):
        before, after, losses = plain[case.strategy.gradient_accumulation_steps]
        assert distance(result.parameters, after, before) <= BOUND[Precision.FP32], name
        assert result.losses == pytest.approx(losses, rel=1e-3), name
