import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import Case, Result, by_schedule, trained_on_ranks

from zsim.memory import memory_ledger
from zsim.schedule.operation import View
from zsim.schedule.schedule import Kind, Place
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.live_memory import LiveMemory, MemorySetting
from zsim_torch.execute.memory_part import ProducedPart, Remains
from zsim_torch.rank_result import state_peak


def cases(ranks: int) -> list[Case]:
    """Return every combination. The module has no attention: selective keeps what none keeps."""
    return [
        Case(
            Strategy(
                parallel=Parallel(data=ranks),
                zero=Zero(stage=stage, bucket_elements=60),
                activations=Activations(checkpointing=checkpointing),
                train=Train(
                    gradient_accumulation_steps=2,
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
        for checkpointing in (Checkpointing.NONE, Checkpointing.FULL)
        for precision in (Precision.FP32, Precision.BF16, Precision.FP16)
    ]


MOVED = {0: ("host", False), 1: ("device", True), 2: ("host", True), 3: ("nvme", False)}
"""By stage, the tier that checkpoints go to, and whether they lie in a row."""


def moving(ranks: int) -> list[Case]:
    return [
        replace(
            case,
            strategy=case.strategy.but(
                {
                    "offload.checkpoints": MOVED[case.strategy.zero.stage][0],
                    "zero.contiguous": MOVED[case.strategy.zero.stage][1],
                }
            ),
        )
        for case in cases(ranks)
        if case.strategy.activations.checkpointing is Checkpointing.FULL
        if case.strategy.train.precision is Precision.FP16
    ]


@cache
def booked(case: Case) -> int:
    """The peak of the book of the same storages on the device, from the schedule alone."""
    schedule = case.schedule()
    (program,) = schedule.programs
    on_device = {pool.name for pool in schedule.pools if pool.place is Place.DEVICE}
    entries = memory_ledger(program, case.steps)
    return state_peak(program, [each for each in entries if each.pool in on_device])


SHARES = [(1, 5), (2, 1), (3, 5)]
"""Numbers of ranks, and how few of their cases the suite draws from: of five, one has every stage,
every format and both ways of checkpointing."""


@pytest.mark.matrix(12)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("ranks", "share"),
    [*SHARES, *(pytest.param(ranks, 1, marks=pytest.mark.long) for ranks in (1, 3))],
)
def test_live_storages_peak_at_the_book_to_the_byte(
    pool_of: SharedPools, ranks: int, share: int, stage: int
) -> None:
    of_suite = [*cases(ranks)[::share], *moving(ranks)]
    asked = [case for case in of_suite if case.strategy.zero.stage == stage]
    assert asked
    for found in trained_on_ranks(pool_of(ranks), asked):
        for case, result in zip(asked, found, strict=True):
            assert result.observed["live_bytes_peak/state"] == booked(case), case
            assert result.observed["booked_bytes_peak/state"] == booked(case), case
            assert result.observed["shared_bytes_peak/gradient"] == 0


def one(stage: int) -> Case:
    return Case(
        Strategy(zero=Zero(stage=stage, bucket_elements=60), train=Train(optimizer=SGD())),
        steps=1,
        observe=True,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_free_that_frees_nothing_breaks_the_equality(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Remains] = []

    def frees_nothing(
        _: LiveMemory, name: str, remains: Remains, lent: object, *, travelled: bool
    ) -> None:
        assert name
        assert lent is None
        assert travelled is not None
        kept.append(remains)

    assert by_schedule(one(stage)).observed["live_bytes_peak/state"] == booked(one(stage))
    monkeypatch.setattr(LiveMemory, "drop", frees_nothing)
    assert by_schedule(one(stage)).observed["live_bytes_peak/state"] > booked(one(stage))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.GRADIENT])
def test_a_doubled_buffer_breaks_the_equality(
    stage: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = LiveMemory.allocate
    doubles: list[torch.Tensor] = []

    def twice(memory: LiveMemory, name: str) -> None:
        allocate(memory, name)
        if memory.program.by_name[name].kind is kind:
            with memory.setting.making():
                doubles.append(torch.empty_like(memory.part(name)))

    monkeypatch.setattr(LiveMemory, "allocate", twice)
    assert by_schedule(one(stage)).observed["live_bytes_peak/state"] > booked(one(stage))


def test_activations_and_the_rest_are_listed_beside() -> None:
    result: Result = by_schedule(one(0))
    assert result.observed["live_bytes_peak/other"] > 0
    assert result.observed["live_bytes_peak/all"] >= result.observed["live_bytes_peak/state"]


def memory_of_one() -> LiveMemory:
    """The memory of a small schedule of one rank."""
    schedule = Case(Strategy(zero=Zero(stage=0, bucket_elements=60))).schedule()
    (program,) = schedule.programs
    setting = MemorySetting(
        device=torch.device("cpu"),
        making=nullcontext,
        on_home=lambda _: nullcontext(),
        pools=HostPools(schedule, program, folder=Path(), device=torch.device("cpu"), poison=False),
        poison=False,
    )
    return LiveMemory(schedule, program, schedule.mesh.coordinates(0), setting)


def test_parts_that_were_made_in_another_order_are_read_by_their_places() -> None:
    memory = memory_of_one()
    made = next(each for each in memory.program.buffers if each.produced and each.elements > 3)
    values = torch.arange(made.elements, dtype=torch.float32)
    memory.promise(made.name)
    # as of a unit of two segments, of which the second has its backward first
    memory.bind(made.name, [ProducedPart(2, values[2:])])
    memory.bind(made.name, [ProducedPart(0, values[:2])])
    assert torch.equal(memory.flat(View(buffer=made.name, size=made.elements)), values)
    assert memory.flat(View(buffer=made.name, start=1, size=2)).tolist() == [1, 2]


def test_a_part_of_a_buffer_that_stays_is_cut_once_and_goes_with_it() -> None:
    memory = memory_of_one()
    program = memory.program
    name = next(each for each in program.persistent if program.by_name[each].elements >= 8)
    view = View(buffer=name, start=1, size=6)
    memory.allocate(name)
    cut = memory.shaped(view, torch.Size((2, 2)), 1)
    assert memory.shaped(view, torch.Size((2, 2)), 1) is cut
    memory.flat(view).copy_(torch.arange(6))
    assert cut.tolist() == [[1, 2], [3, 4]]
    assert memory.shaped(view, torch.Size((4,)), 1).tolist() == [1, 2, 3, 4]
    gone = weakref.ref(cut.untyped_storage())
    del cut
    memory.drop(name, memory.take_away(name), None, travelled=False)
    assert gone() is None
