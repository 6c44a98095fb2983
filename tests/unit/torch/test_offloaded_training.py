"""zsim's own stages with states on the host and in files: equal bits, books and bytes on ranks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import UNITS, Case, Result, Tiny, trained_on_ranks

from zsim.closed_form.offloaded import file_bytes
from zsim.model.model import Model
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.module.description import describe

pytestmark = pytest.mark.matrix(18, together=True)
ADAM = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1)
MOMENTUM = SGD(learning_rate=0.1, momentum=0.9)
WAYS = tuple(product((Precision.FP32, Precision.BF16), (1, 3), (None, 0.05)))
"""Formats, micro-batches, and the largest norm."""

SMALL = 7
"""Elements of a sub-group: cuts that no vector and no block of a file knows."""


def plain(ranks: int, stage: int, way: tuple[Precision, int, float | None]) -> Case:
    """A training on the device."""
    precision, micro_batches, clip = way
    return Case(
        Strategy(
            parallel=Parallel(data=ranks),
            zero=Zero(stage=stage, bucket_elements=60),
            train=Train(
                gradient_accumulation_steps=micro_batches,
                optimizer=MOMENTUM if micro_batches == 3 and clip else ADAM,
                precision=precision,
                clip_norm=clip,
            ),
        ),
        steps=3,
        observe=True,
    )


def offloads(stage: int) -> Iterator[Offload]:
    """Every combination of tiers that a stage has."""
    tiers = (MemoryTier.HOST, MemoryTier.NVME)
    parameters = (MemoryTier.DEVICE, *tiers) if stage == 3 else (MemoryTier.DEVICE,)
    for optimizer, kept in product(tiers, parameters):
        one = Offload(optimizer=optimizer, parameters=kept, sub_group_elements=SMALL)
        yield one
        if optimizer is MemoryTier.NVME:
            yield one.model_copy(update={"gradients": MemoryTier.NVME})
        elif kept is MemoryTier.DEVICE:
            yield one.model_copy(update={"device_share": 0.5})


def of_checkpoints(plain: Strategy) -> Iterator[Strategy]:
    """Units that are run again from inputs that leave the device, alone and with the optimizer."""
    for tier, optimizer, ahead in (
        (MemoryTier.HOST, MemoryTier.DEVICE, 1),
        (MemoryTier.NVME, MemoryTier.DEVICE, 0),
        (MemoryTier.NVME, MemoryTier.NVME, 2),
    ):
        offload = Offload(optimizer=optimizer, checkpoints=tier, read_units=ahead)
        full = Activations(checkpointing=Checkpointing.FULL)
        contiguous = plain.zero.model_copy(update={"contiguous": plain.zero.stage == 2})
        yield plain.model_copy(update={"offload": offload, "activations": full, "zero": contiguous})


def cases(ranks: int, *, whole: bool) -> list[tuple[Case, list[Case]]]:
    """Trainings, and each offloaded in every way; else in every second.

    Two ranks train two ways of a stage, which share its offloads; others one, with a half of them,
    and four ranks stage 3 alone. All eight ways are drawn.
    """
    found: list[tuple[Case, list[Case]]] = []
    for stage in (3,) if ranks == 4 and not whole else (0, 1, 2, 3):
        drawn = [WAYS[(3 * stage + 2 * ranks) % 8], WAYS[(3 * stage + 5) % 8]]
        ways = WAYS if whole else drawn[: 2 if ranks == 2 else 1]
        for number, way in enumerate(ways):
            one = plain(ranks, stage, way)
            half = slice((stage + number + ranks // 4) % 2, None, 2)
            strategies = [
                one.strategy.model_copy(update={"offload": each})
                for each in [*offloads(stage)][slice(None) if whole else half]
            ]
            found.append((one, [replace(one, strategy=each) for each in strategies]))
    unpiped = Offload(
        optimizer=MemoryTier.NVME,
        sub_group_elements=SMALL,
        pipeline_read=False,
        pipeline_write=False,
    )
    strategy = found[0][0].strategy.model_copy(update={"offload": unpiped})
    found[0][1].append(replace(found[0][0], strategy=strategy))
    for number, (one, rest) in enumerate(found):
        every = [replace(one, strategy=each) for each in of_checkpoints(one.strategy)]
        rest.extend(every if whole else [every[number % 3]])
    found[-1][1].append(replace(found[-1][1][-1], poison=True))
    return found


Ran = tuple[list[tuple[Case, list[Case]]], list[list[Result]]]
GROUPS = [
    (ranks, whole, number)
    for whole in (False, True)
    for ranks in (1, 2, 4)
    for number in range(len(cases(ranks, whole=whole)))
]
"""Numbers of ranks, and one training of each with its offloaded ones; the whole ones are long."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.long if each[1] else ()) for each in GROUPS],
    ids=[f"{ranks}-{number}{'-every' * whole}" for ranks, whole, number in GROUPS],
)
def ran(pool_of: SharedPools, request: pytest.FixtureRequest) -> Ran:
    """Return cases, and the results of each rank for them in their order."""
    ranks, whole, number = request.param
    one, rest = cases(ranks, whole=whole)[number]
    return [(one, rest)], [*trained_on_ranks(pool_of(ranks), [one, *rest])]


@pytest.mark.matrix(9)
def test_offloading_changes_no_bit_of_parameters_and_losses(ran: Ran) -> None:
    asked, by_rank = ran
    for results in by_rank:
        left = iter(results)
        for one, offloaded in asked:
            wanted = next(left)
            assert all(value.isfinite().all() for value in wanted.parameters.values())
            for case in offloaded:
                found = next(left)
                assert found.losses == wanted.losses, (one, case)
                for name, value in wanted.parameters.items():
                    assert torch.equal(found.parameters[name], value), (name, case)


def model_of(case: Case) -> Model:
    precision = case.strategy.train.precision
    return describe(Tiny(precision), UNITS, case.batch(0, 0, 0), precision=precision)


def test_pools_hold_their_book_and_files_move_the_closed_form(ran: Ran) -> None:
    asked, by_rank = ran
    promises = {
        case: file_bytes(model_of(case), case.strategy)
        for _, offloaded in asked
        for case in offloaded
    }
    for results in by_rank:
        left = iter(results)
        for _, offloaded in asked:
            next(left)
            for case in offloaded:
                observed = next(left).observed
                pools = [pool for pool in case.schedule().pools if pool.name != "device"]
                assert pools
                for pool in pools:
                    live = observed[f"live_bytes_peak/pool/{pool.name}"]
                    assert live == observed[f"booked_bytes_peak/pool/{pool.name}"], case
                moved = promises[case]
                for number, way in ((0, "read"), (1, "written")):
                    done = sum(
                        count
                        for name, count in observed.items()
                        if name.startswith(f"{way}_bytes/")
                    )
                    promised = 0 if moved is None else (moved.read, moved.written)[number]
                    assert done == promised * case.steps, case
                if not case.poison:
                    booked = observed["booked_bytes_peak/state"]
                    assert observed["live_bytes_peak/state"] == booked, case
