from collections import defaultdict
from functools import cache

import pytest
from shared_ranks import SharedPools
from tiny_training import Case, Result, trained_on_ranks

from zsim.schedule.schedule import WireBytes
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train


def cases(ranks: int) -> list[Case]:
    """Return every combination; one micro-batch is reduced once in any case."""
    return [
        Case(
            Strategy(
                parallel=Parallel(data=ranks),
                zero=Zero(stage=stage, bucket_elements=60, reduce_once=once),
                activations=Activations(checkpointing=Checkpointing.FULL),
                train=Train(
                    gradient_accumulation_steps=micro_batches,
                    precision=precision,
                    optimizer=Adam(),
                    clip_norm=1.0,
                    loss_scale=LossScale(initial=1.0),
                ),
            ),
            steps=2,
            observe=True,
        )
        for stage in (0, 1, 2, 3)
        for micro_batches in (1, 3)
        for precision in (Precision.FP32, Precision.FP16)
        for once in (False, True)[:micro_batches]
    ]


def seen(result: Result, steps: int) -> set[WireBytes]:
    """Bytes of one step as the observer counted them."""
    found: set[WireBytes] = set()
    for name, number in result.observed.items():
        what, _, rest = name.partition("/")
        if what in ("wire_bytes", "scalar_wire_bytes") and number:
            group, collective = rest.split("/")
            scalar = what == "scalar_wire_bytes"
            assert number % steps == 0
            size = int(number) // steps
            found.add(WireBytes(group=group, collective=collective, bytes=size, scalar=scalar))
    return found


def of_stage(ranks: int, share: int, stage: int) -> list[Case]:
    """Return cases of a stage: all, or those that are among one of `share` of all stages."""
    return [case for case in cases(ranks)[::share] if case.strategy.zero.stage == stage]


@cache
def trained(pool_of: SharedPools, ranks: int, share: int, stage: int) -> tuple[list[Result], ...]:
    """Return results of each rank after these cases: two tests look at it."""
    return trained_on_ranks(pool_of(ranks), of_stage(ranks, share, stage))


@pytest.mark.matrix(24, together=True)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("ranks", "share"), [(2, 1), (4, 5), pytest.param(4, 1, marks=pytest.mark.long)]
)
def test_what_is_handed_to_torch_is_the_closed_form_to_the_byte(
    pool_of: SharedPools, ranks: int, share: int, stage: int
) -> None:
    asked = of_stage(ranks, share, stage)
    assert asked
    for found in trained(pool_of, ranks, share, stage):
        for case, result in zip(asked, found, strict=True):
            promised = case.schedule().contract.wire_bytes
            assert promised is not None
            assert seen(result, case.steps) == {one for one in promised if one.bytes}, case


@pytest.mark.matrix(12, together=True)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("ranks", "share"), [(2, 1)])
def test_the_trace_lists_what_the_observer_saw(
    pool_of: SharedPools, ranks: int, share: int, stage: int
) -> None:
    for result in trained(pool_of, ranks, share, stage)[0]:
        total: defaultdict[str, int] = defaultdict(int)
        for transfer in result.trace.ranks[0].transfers:
            what = "scalar_wire" if transfer.scalar else "wire"
            total[f"{what}_bytes/{transfer.group}/{transfer.collective}"] += transfer.bytes
            total[f"{what}_count/{transfer.group}/{transfer.collective}"] += 1
        observed = {name: n for name, n in result.observed.items() if "wire" in name}
        assert observed == dict(total)
