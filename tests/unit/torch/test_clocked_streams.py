"""Vector clocks under the executor of real ranks find what `check` finds, whatever edge is dropped.

On host threads and file ranges as on streams of a device.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from clocked_streams import hazards_of
from offloaded_by_hand import Offloaded, OffloadedStates
from reduced_by_hand import Plan, Reduced, batches
from sharded_net import UNITS, Net
from tiny_training import UNITS as TINY_UNITS
from tiny_training import Case, Tiny

from zsim.proof import check
from zsim.proof.context import Context
from zsim.proof.families import families
from zsim.proof.finding import Finding
from zsim.schedule.operation import Branch, HostWait, Operation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim_record.clocks.finding import Hazard

STEPS = 2


def found_by_clocks(schedule: Schedule, plan: Plan) -> list[Hazard]:
    return hazards_of(schedule, Net(), UNITS, batches(plan, 0), steps=STEPS)


def found_by_check(schedule: Schedule) -> list[Finding]:
    context = Context.of(schedule)
    checks = [families()[name].examine for name in ("lifetime", "races", "host_order")]
    return [finding for examine in checks for finding in examine(context)]


def without_one_edge(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Each edge, use of a free, and wait of the host, and the schedule that lacks it."""
    (program,) = schedule.programs

    def put(part: str, place: int, *instead: Operation) -> Schedule:
        operations: tuple[Operation, ...] = getattr(program, part)
        changed = (*operations[:place], *instead, *operations[place + 1 :])
        if part == "setup":
            return replace(schedule, programs=(replace(program, setup=changed),))
        return replace(schedule, programs=(replace(program, step=changed),))

    for part in ("setup", "step"):
        for place, operation in enumerate(getattr(program, part)):
            if isinstance(operation, HostWait):
                yield operation.id, put(part, place)
            assert not isinstance(operation, Branch)
            for field in ("after", "uses"):
                edges = getattr(operation, field, ())
                for index, edge in enumerate(edges):
                    rest = (*edges[:index], *edges[index + 1 :])
                    name = f"{operation.id} {field} {edge}"
                    yield name, put(part, place, replace(operation, **{field: rest}))


PLANS = [
    Offloaded(ranks=1, groups=2, files=True, micro_batches=1),
    Offloaded(ranks=1, groups=2, micro_batches=1),
]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("plan", PLANS)
def test_clocks_find_a_dropped_edge_if_and_only_if_check_does(plan: Offloaded) -> None:
    schedule = OffloadedStates(plan).write()
    assert found_by_clocks(schedule, plan) == []
    assert check(schedule) == ()
    missed = 0
    for name, wrong in without_one_edge(schedule):
        findings, hazards = found_by_check(wrong), found_by_clocks(wrong, plan)
        assert bool(findings) == bool(hazards), (name, findings, hazards)
        missed += bool(findings)
    assert missed >= 15


def test_a_race_on_a_range_of_a_file_names_both_operations() -> None:
    schedule = OffloadedStates(PLANS[0]).write()
    wrong = dict(without_one_edge(schedule))["step/write0/master after step/update0"]
    hazards = found_by_clocks(wrong, PLANS[0])
    races = {(each.block.label, each.earlier.operation, each.later.operation) for each in hazards}
    assert races >= {
        ("slot0/master", "step/update0", "step/write0/master"),
        ("master", "step/read0/master", "step/write0/master"),
    }


def test_nothing_is_found_where_nothing_is_offloaded() -> None:
    plan = Plan(ranks=1, adam=True)
    assert found_by_clocks(Reduced(plan).write(), plan) == []


def offloads(stage: int) -> Iterator[Offload]:
    tiers = (MemoryTier.HOST, MemoryTier.NVME)
    for optimizer in tiers:
        yield Offload(optimizer=optimizer, sub_group_elements=7)
    if stage == 3:
        for optimizer, parameters in product(tiers, tiers):
            yield Offload(optimizer=optimizer, parameters=parameters, sub_group_elements=7)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zsims_own_offloaded_stages_have_no_hazard(stage: int) -> None:
    for offload in offloads(stage):
        case = Case(
            Strategy(
                zero=Zero(stage=stage, bucket_elements=60),
                offload=offload,
                train=Train(optimizer=Adam(), clip_norm=0.05, gradient_accumulation_steps=2),
            ),
            steps=STEPS,
        )
        module = Tiny(case.strategy.train.precision)
        found = hazards_of(case.schedule(), module, TINY_UNITS, case.batches(0), steps=STEPS)
        assert found == [], offload
