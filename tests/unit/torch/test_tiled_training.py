"""Layers in tiles on real ranks: equal bits with the tiled module, near the layer as one.

Layers are cut along their outputs, so each element of an output is the same sum of products; the
gradient of an input is a sum over tiles, in fp32 or in bf16, which is rounded otherwise.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from shared_ranks import SharedPools
from tiled_training import TiledCase, all_trained, put_together
from tiny_training import Result

from zsim.closed_form.offloaded import file_bytes
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep

pytestmark = pytest.mark.matrix(15, together=True)
WAYS: tuple[tuple[Precision, int, Checkpointing], ...] = tuple(
    product((Precision.FP32, Precision.BF16), (1, 3), (Checkpointing.NONE, Checkpointing.FULL))
)
BOUND = {Precision.FP32: 1e-4, Precision.BF16: 0.02}
"""Largest difference of a parameter from that of the layer as one, after two steps of Adam of
0.01: bf16 has 8 bits, so a sum over tiles differs by up to 2^-8 of itself."""
CLIP = 0.05
SMALL = 31
"""Elements of all ranks' parts of a sub-group: cuts that no vector and no block of a file knows."""


def tiled(ranks: int, way: tuple[Precision, int, Checkpointing]) -> TiledCase:
    """A training in three tiles of 3 or 4 rows, which no number of ranks but 1 divides."""
    precision, micro_batches, checkpointing = way
    return TiledCase(
        Strategy(
            parallel=Parallel(data=ranks),
            zero=Zero(stage=3, tiles=3),
            activations=Activations(checkpointing=checkpointing),
            train=Train(
                gradient_accumulation_steps=micro_batches,
                optimizer=Adam(learning_rate=0.01, epsilon=1e-5),
                precision=precision,
            ),
        )
    )


def moved(case: TiledCase) -> TiledCase:
    """The same with states on files, checkpoints on the host where there are some, and poison."""
    full = case.strategy.activations.checkpointing is Checkpointing.FULL
    checkpoints = MemoryTier.HOST if full else MemoryTier.DEVICE
    offload = Offload(
        optimizer=MemoryTier.NVME,
        parameters=MemoryTier.NVME,
        checkpoints=checkpoints,
        sub_group_elements=SMALL // case.strategy.ranks,
    )
    strategy = case.strategy.model_copy(update={"offload": offload})
    return replace(case, strategy=strategy, poison=True)


def gathered_whole(case: TiledCase) -> TiledCase:
    """The same with every tile gathered from the first use of the first to the end."""
    knobs = {"zero.keep_after_forward": Keep.EVERYTHING, "zero.prefetch_units": 99}
    return replace(case, strategy=case.strategy.but(knobs))


def five(case: TiledCase) -> list[TiledCase]:
    """In tiles; the module in tiles gathered whole, and in blocks; untiled; on files."""
    blocks = replace(case, by_block=True)
    return [case, gathered_whole(case), blocks, case.untiled, moved(case)]


def suite(ranks: int) -> list[tuple[Precision, int, Checkpointing]]:
    """Two ways, on 4 ranks one; the rest is long."""
    return [WAYS[ranks % 4], WAYS[7 - ranks % 3]][ranks // 4 :]


Ran = tuple[list[TiledCase], list[list[Result]]]
EVERY = [(ranks, way) for ranks in (1, 2, 4) for way in WAYS]


def id_of(asked: tuple[int, tuple[Precision, int, Checkpointing]]) -> str:
    ranks, (precision, micro_batches, checkpointing) = asked
    return f"{ranks}-{precision}-{micro_batches}-{checkpointing}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(asked, marks=() if asked[1] in suite(asked[0]) else pytest.mark.long)
        for asked in EVERY
    ],
    ids=[*map(id_of, EVERY)],
)
def ran(pool_of: SharedPools, request: pytest.FixtureRequest) -> Ran:
    """Return cases, and the results of each rank for them in their order."""
    ranks, way = request.param
    asked = five(tiled(ranks, way))
    return asked, [*pool_of(ranks).run(all_trained, asked)]


def by_five(ran: Ran) -> list[tuple[TiledCase, list[Result]]]:
    """Each way on each rank, with its five results."""
    asked, found = ran
    return [
        (asked[start], of_rank[start : start + 5])
        for of_rank in found
        for start in range(0, len(asked), 5)
    ]


def assert_same_bits(case: TiledCase, one: Result, other: Result) -> None:
    assert one.losses == other.losses, case
    assert set(one.parameters) == set(other.parameters)
    for name, value in one.parameters.items():
        assert value.isfinite().all()
        assert torch.equal(value, other.parameters[name]), (case, name)


@pytest.mark.one_commit_in(24)
def test_tiles_gathered_alone_train_the_bits_of_the_tiled_module(ran: Ran) -> None:
    for case, (tiles, whole, *_) in by_five(ran):
        assert_same_bits(case, tiles, whole)


def test_units_that_are_tiles_train_the_bits_of_blocks_of_tiles(ran: Ran) -> None:
    """Four ranks sum in an order that depends on the place in a bucket, and buckets differ."""
    for case, (tiles, _, blocks, *_) in by_five(ran):
        if case.strategy.ranks < 4:
            assert_same_bits(case, tiles, blocks)
        for name, value in blocks.parameters.items():
            bound = BOUND[case.strategy.train.precision]
            torch.testing.assert_close(tiles.parameters[name], value, rtol=0, atol=bound)


def test_tiles_with_states_on_files_train_the_same_bits(ran: Ran) -> None:
    for case, (tiles, *_, files) in by_five(ran):
        assert_same_bits(case, tiles, files)


def test_tiles_train_what_the_layer_as_one_trains_up_to_rounding(ran: Ran) -> None:
    for case, (tiles, _, _, untiled, _) in by_five(ran):
        bound = BOUND[case.strategy.train.precision]
        together = put_together(tiles.parameters)
        assert set(together) == set(untiled.parameters)
        for name, value in untiled.parameters.items():
            torch.testing.assert_close(together[name], value, rtol=0, atol=bound)


def test_books_are_those_of_live_memory_and_files_move_the_closed_form(ran: Ran) -> None:
    for case, (tiles, *_, files) in by_five(ran):
        observed = tiles.observed
        assert observed["live_bytes_peak/state"] == observed["booked_bytes_peak/state"]
        observed, offloaded = files.observed, moved(case)
        for pool in offloaded.schedule().pools:
            if pool.name != "device":
                live = observed[f"live_bytes_peak/pool/{pool.name}"]
                assert live == observed[f"booked_bytes_peak/pool/{pool.name}"], case
        promised = file_bytes(offloaded.model(), offloaded.strategy)
        assert promised is not None
        assert observed["read_bytes/pool/nvme"] == promised.read * case.steps
        assert observed["written_bytes/pool/nvme"] == promised.written * case.steps


def test_tiles_gather_what_the_contract_says(ran: Ran) -> None:
    for case, (tiles, *_) in by_five(ran):
        promised = case.schedule().contract.wire_bytes
        assert promised is not None
        for line in promised:
            if line.group == "data" and not line.scalar:
                seen = tiles.observed[f"wire_bytes/data/{line.collective}"]
                assert seen == line.bytes * case.steps, case
