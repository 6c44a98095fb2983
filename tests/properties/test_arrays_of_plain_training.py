"""Segments that read the arrays of the plain step: the shortcut refutes what numbers refute."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from faults.fault import Draw, drawn
from faults.of_schedules.drawn_edits import DRAWN
from faults.schedules import rewritten, with_program

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check, values
from zsim.proof.context import Context
from zsim.proof.execution.segments import Segments
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, HostWait, Operation, Receive
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

SHAPE = GPT(layers=4, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
RUNTIMES = {
    "nanotron": Nanotron(),
    "megatron": Megatron(),
    "megatron, interleaved": Megatron(num_layers_per_virtual_pipeline_stage=1),
}
SEED = 20_261_123
PLACES = 12
Change = Callable[[Operation], tuple[Operation, ...]]


class Forgetful(dict[tuple[int, int], object]):
    """Never knows that two arrays are equal."""

    def __contains__(self, key: object) -> bool:
        """Return that it does not."""
        return False


@cache
def made(name: str) -> tuple[Schedule, Model]:
    """A pipeline of two stages whose micro-batches take turns in slots, and its model."""
    strategy = Strategy(
        parallel=Parallel(pipeline=2),
        zero=Zero(stage=1, emulate=RUNTIMES[name]),
        train=Train(gradient_accumulation_steps=4),
    )
    model = in_blocks(gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision))
    return make_schedule(model, strategy), model


def shown(schedule: Schedule, model: Model) -> values.Shown:
    return values.shown(Context.of(schedule, model))


def by_numbers(schedule: Schedule, model: Model, monkeypatch: pytest.MonkeyPatch) -> values.Shown:
    """A proof in which every segment compares all numbers that it reads."""
    initialized = Segments.__init__

    def forgetful(self: Segments, *given: object) -> None:
        initialized(self, *given)  # type: ignore[arg-type]
        self._equal = Forgetful()  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "__init__", forgetful)
        patch.setattr(Segments, "_as_plain", lambda *_: None)
        patch.setattr(Segments, "_parts_of_plain", lambda *_: None)
        return shown(schedule, model)


def computes(schedule: Schedule) -> Iterator[tuple[int, Compute, Compute]]:
    """Yield, by program, a segment on one micro-batch and on the next one."""
    for number, program in enumerate(schedule.programs):
        latest: dict[tuple[str, int, Action], Compute] = {}
        for each in program.step:
            if isinstance(each, Compute) and each.unit:
                key = (each.unit, each.segment, each.action)
                if key in latest:
                    yield number, latest[key], each
                latest[key] = each


def faults(schedule: Schedule) -> Iterator[tuple[int, Change]]:
    """Yield wrong edits of programs: other micro-batches, messages that are lost or go astray."""

    def instead(old: Operation, *new: Operation) -> Change:
        return lambda each: new if each.id == old.id else (each,)

    def lost(old: Operation) -> Change:
        def change(each: Operation) -> tuple[Operation, ...]:
            waits = isinstance(each, HostWait) and each.operation == old.id
            return () if waits or each.id == old.id else (each,)

        return change

    for number, one, other in computes(schedule):
        if one.operands is not other.operands:  # another slot
            yield number, instead(other, replace(other, operands=one.operands))
        yield number, lost(one)
    for number, program in enumerate(schedule.programs):
        for each in program.step:
            if isinstance(each, Receive):
                yield number, lost(each)
                yield number, instead(each, replace(each, offset=0))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", RUNTIMES)
def test_wrong_pipelines_are_refuted(name: str) -> None:
    schedule, model = made(name)
    assert not check(schedule, model)
    found = list(faults(schedule))
    for place in np.random.default_rng(SEED).permutation(len(found))[:PLACES].tolist():
        number, change = found[place]
        program = rewritten(schedule.programs[number], change)
        assert check(with_program(schedule, program), model)


def refuted(
    name: str, operators: Sequence[Draw[Schedule, Schedule]], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return how many of drawn edits are refuted, all as by numbers."""
    schedule, model = made(name)
    rng, count = np.random.default_rng(SEED), 0
    for operator in operators:
        edit = drawn(operator, schedule, rng)
        if edit is not None:
            found = shown(edit.made, model)
            assert found.findings == by_numbers(edit.made, model, monkeypatch).findings
            count += bool(found.findings)
    return count


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", RUNTIMES)
def test_drawn_edits_are_refuted_as_by_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("drop", "move", "operands of another", "insert a copy of an operation")
    assert refuted(name, [DRAWN[each] for each in names], monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNTIMES)
def test_many_edits_are_refuted_as_by_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuted(name, list(DRAWN.values()) * 10, monkeypatch) > 40
