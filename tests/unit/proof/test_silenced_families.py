"""No family falls silent because a schedule lacks what the family looks for.

What makes a family look is taken away from right schedules: tests, branches, scales, draws, places,
promises. The contract still asks for it, so there is a finding, or the answer says what it no
longer shows.
"""

from collections.abc import Callable, Iterable
from functools import cache

import pytest
from emulated_strategies import OFFLOADED, strategy
from faults.cases import DROPOUT, model_of, strategies
from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import Proof, prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Branch,
    Compute,
    Copy,
    Fill,
    Operation,
    Role,
    SetScalar,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Place, Schedule, ScheduleError
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy

COLUMNS = strategies()
SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=7)

Removal = Callable[[Schedule], Schedule]

HOST = Strategy.of({"parallel": {"data": 2}, "zero": {"stage": 2}})
OWN = {
    "delayed": HOST.but(
        {
            "offload.optimizer": "host",
            "offload.delayed_update": True,
            "offload.warm_up_steps": 2,
            "train.precision": "fp16",
        }
    ),
    "filed": HOST.but({"offload.optimizer": "nvme", "train.precision": "fp16"}),
}
JOBS = (
    "stage 0",
    "stage 2",
    "deepspeed 1",
    "fsdp2 float8",
    DROPOUT,
    "pipelines",
    "deepspeed 3 with its optimizer on the cpu",
    *OWN,
)


@cache
def job(name: str) -> tuple[Schedule, Model, Proof]:
    """A right schedule, its model, and its proof."""
    made: Strategy | None
    if name in OWN:
        made = OWN[name]
    elif name in OFFLOADED:
        made = strategy(OFFLOADED[name], data=2, precision=Precision.BF16, clip_norm=1.0)
    else:
        made = COLUMNS[name][0]
    assert made is not None
    model = gpt(SHAPE, micro_batch_size=1, precision=made.train.precision)
    if name in COLUMNS:
        model = model_of(made, name)
    schedule = make_schedule(model, made)
    proof = prove(schedule, model)
    assert proof.findings == ()
    return schedule, model, proof


def through(edit: Callable[[Operation], Operation | tuple[Operation, ...]]) -> Removal:
    """Return the removal that puts every operation through `edit`."""

    def every(operation: Operation) -> Iterable[Operation]:
        found = edit(operation)
        return found if isinstance(found, tuple) else (found,)

    return lambda schedule: edited(schedule, every)


def idle(*actions: Action) -> Removal:
    """Return the removal that lets computations of these actions do nothing."""

    def edit(each: Operation) -> Operation:
        if not isinstance(each, Compute) or each.action not in actions:
            return each
        made = [operand.view for operand in each.operands if operand.role is Role.OUTPUT]
        if made:
            return Fill(id=each.id, stream=each.stream, after=each.after, target=made[0], value=0.0)
        view = each.operands[-1].view
        return Copy(id=each.id, stream=each.stream, after=each.after, source=view, target=view)

    return through(edit)


def without_scale(each: Operation) -> Operation:
    if isinstance(each, Fill) and each.scalar is not None:
        return replace(each, scalar=None)
    if isinstance(each, Compute) and each.action in (Action.UNSCALE, Action.CLIP):
        return replace(each, scalars=())
    return each


def with_constant_scale(each: Operation) -> Operation:
    """Scales by the first value of the loss scale, for ever."""
    if isinstance(each, Fill) and each.scalar is not None:
        return replace(each, scalar=None, value=each.value * 65536.0)
    return each


def without_branch(each: Operation) -> Operation | tuple[Operation, ...]:
    return each.otherwise if isinstance(each, Branch) else each


def without_draw(each: Operation) -> Operation:
    return replace(each, draw=None) if isinstance(each, Compute) and each.draw else each


def in_device_memory(schedule: Schedule) -> Schedule:
    return replace(
        schedule,
        pools=tuple(replace(each, place=Place.DEVICE) for each in schedule.pools),
        host_threads=(),
    )


def promised(**fields: object) -> Removal:
    """Return the removal that leaves out a promise."""
    return lambda made: replace(made, contract=replace(made.contract, **fields))


REMOVALS: dict[str, Removal] = {
    "tests of gradients": idle(Action.FINITE),
    "branches": through(without_branch),
    "scaling": through(without_scale),
    "the loss scale of what is scaled": through(with_constant_scale),
    "clipping": idle(Action.CLIP),
    "norms": idle(Action.NORM),
    "largest magnitudes": idle(Action.AMAX),
    "updates": idle(Action.UPDATE),
    "counting": through(lambda each: () if isinstance(each, SetScalar) else each),
    "draws": lambda made: replace(through(without_draw)(made), generators=()),
    "other places": in_device_memory,
    "threads": lambda made: replace(made, host_threads=()),
    "alignment": lambda made: replace(
        made, layouts=tuple(replace(each, alignment=1) for each in made.layouts)
    ),
    "peaks": promised(peak_bytes=()),
    "a peak": lambda made: promised(peak_bytes=made.contract.peak_bytes[1:])(made),
    "volume": promised(wire_bytes=None),
    "copies from and to the host": promised(host_bytes=None),
    "traffic of files": promised(file_bytes=None),
    "the strategy": promised(strategy=None),
    "the parameters": promised(parameters=()),
}


NEEDS = {"copies from and to the host": Place.HOST, "traffic of files": Place.NVME}
"""Places without which a promise says nothing."""


def removed(name: str, schedule: Schedule, removal: str) -> Schedule:
    """The schedule without what a removal takes away; the same one if it has nothing of it."""
    needed = NEEDS.get(removal)
    if needed is not None and all(each.place is not needed for each in job(name)[0].pools):
        return schedule
    return REMOVALS[removal](schedule)


def is_silent(name: str, removals: Iterable[str]) -> bool | None:
    """Return whether nothing is said of what was removed; None if nothing was, or may be."""
    schedule, model, proof = job(name)
    made = schedule
    try:
        for removal in removals:
            made = removed(name, made, removal)
    except ScheduleError:  # refused before any proof
        return None
    if made == schedule:
        return None
    found = prove(made, model)
    return not found.findings and set(found.not_shown) <= set(proof.not_shown)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("removal", REMOVALS)
def test_a_family_says_it_when_what_it_looks_for_is_gone(removal: str) -> None:
    silent = {name: is_silent(name, [removal]) for name in JOBS}
    assert set(silent.values()) - {None} == {False}, silent


@pytest.mark.one_commit_in(4)
@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(JOBS),
    removals=st.lists(st.sampled_from(sorted(REMOVALS)), min_size=2, max_size=4, unique=True),
)
def test_what_is_removed_together_is_not_silent_either(name: str, removals: list[str]) -> None:
    assert not is_silent(name, removals)
