"""On real ranks, runtimes that keep states on the host train what they train without, in bits."""

import pytest
import torch
from emulated_strategies import OFFLOADED, strategy
from shared_ranks import SharedPools
from small_files import all_in_small_files, small_files
from tiny_training import UNITS, Case, Result, Tiny

from zsim.runtimes.deepspeed.options import DeepSpeed, OffloadOptimizer, OffloadParam
from zsim.runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim.runtimes.registry import file_bytes
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy
from zsim_torch.module.description import describe

WAYS = ((Precision.BF16, 1, 0.05), (Precision.FP32, 3, None))
"""Formats, micro-batches, and the largest norm."""


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


@pytest.fixture(
    scope="module",
    params=[
        (1, False),
        (2, False),
        *(pytest.param((n, True), marks=pytest.mark.long) for n in (2, 4)),
    ],
    ids=["1", "2", "2-every", "4-every"],
)
def ran(pool_of: SharedPools, request: pytest.FixtureRequest) -> Ran:
    """Of every rank the name, what was trained, and the results with and without."""
    ranks, whole = request.param
    named = pairs(ranks, whole=whole)
    cases = [Case(each, steps=2, observe=True) for _, *both in named for each in both]
    pool = pool_of(ranks)
    by_rank: list[list[Result]] = [*pool.run(all_in_small_files, cases)]
    return [
        (name, case, one, other)
        for results in by_rank
        for (name, *_), case, one, other in zip(
            named, cases[::2], results[::2], results[1::2], strict=True
        )
    ]


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
    filed = [each for each in ran if "nvme" in each[0]]
    assert filed
    for name, case, result, _ in filed:
        precision = case.strategy.train.precision
        model = describe(Tiny(precision), UNITS, case.batch(0, 0, 0), precision=precision)
        with small_files():
            moved = file_bytes(model, case.strategy)
        assert moved is not None
        for way, promised in (("read", moved.read), ("written", moved.written)):
            counts = [
                count for key, count in result.observed.items() if key.startswith(f"{way}_bytes/")
            ]
            assert sum(counts) == promised * case.steps > 0, (name, way)
