"""On real ranks, runtimes that keep states on the host train what they train without, in bits."""

import pytest
import torch
from emulated_strategies import OFFLOADED, strategy
from shared_ranks import SharedPools
from small_files import all_in_small_files, small_files
from tiny_training import UNITS, Case, Result, Tiny

from zsim.runtimes.registry import file_bytes
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadOptimizer, OffloadParam
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim_torch.module.description import describe

WAYS = ((Precision.BF16, 1, 0.05), (Precision.FP32, 3, None))
"""Formats, micro-batches, and the largest norm."""


pytestmark = pytest.mark.matrix(12, together=True)


def without(options: RuntimeOptions) -> RuntimeOptions:
    """The same runtime with everything on the device."""
    if isinstance(options, FSDP2):
        return options.model_copy(update={"offload_policy": OffloadPolicy.NONE})
    assert isinstance(options, DeepSpeed)
    return options.model_copy(
        update={
            "offload_optimizer": OffloadOptimizer(),
            "offload_param": OffloadParam(),
            "migration_stream": False,
        }
    )


def pairs(ranks: int, *, whole: bool) -> list[tuple[str, Strategy, Strategy]]:
    """Each offloaded strategy and the same without, in every way; else every other, in one way."""
    found: list[tuple[str, Strategy, Strategy]] = []
    for number, (name, (stage, options)) in enumerate(OFFLOADED.items()):
        if not whole and number % 2 != ranks % 2:
            continue
        for precision, micro_batches, clip in WAYS if whole else [WAYS[number // 2 % 2]]:
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


Ran = list[tuple[str, Case, Result, Result]]


PAIRS = [
    (ranks, whole, number)
    for ranks, whole in ((1, False), (2, False), (2, True), (4, True))
    for number in range(len(pairs(ranks, whole=whole)))
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.long if each[1] else ()) for each in PAIRS],
    ids=[f"{ranks}-{number}{'-every' * whole}" for ranks, whole, number in PAIRS],
)
def ran(pool_of: SharedPools, request: pytest.FixtureRequest) -> Ran:
    """Return of every rank the name, the case, and the results with and without."""
    ranks, whole, number = request.param
    name, *both = pairs(ranks, whole=whole)[number]
    cases = [Case(each, steps=2, observe=True) for each in both]
    by_rank = pool_of(ranks).run(all_in_small_files, cases)
    return [(name, cases[0], one, other) for one, other in by_rank]


@pytest.mark.matrix(9)
def test_states_on_the_host_or_in_files_change_no_bit(ran: Ran) -> None:
    for name, _, one, other in ran:
        assert one.losses == other.losses, name
        for parameter, value in other.parameters.items():
            assert torch.equal(one.parameters[parameter], value), (name, parameter)


def test_memory_of_the_host_holds_its_book(ran: Ran) -> None:
    for name, _, one, _ in ran:
        live = one.observed["live_bytes_peak/pool/host"]
        assert live == one.observed["booked_bytes_peak/pool/host"] > 0, name


def test_files_are_read_and_written_as_the_closed_form_says(ran: Ran) -> None:
    for name, case, result, _ in ran:
        precision = case.strategy.train.precision
        model = describe(Tiny(precision), UNITS, case.batch(0, 0, 0), precision=precision)
        with small_files():
            moved = file_bytes(model, case.strategy)
        assert (moved is not None) == ("nvme" in name)
        read, written = (0, 0) if moved is None else (moved.read, moved.written)
        for way, promised in (("read", read), ("written", written)):
            counts = [
                count for key, count in result.observed.items() if key.startswith(f"{way}_bytes/")
            ]
            assert sum(counts) == promised * case.steps, (name, way)
            assert (promised > 0) == ("nvme" in name)
