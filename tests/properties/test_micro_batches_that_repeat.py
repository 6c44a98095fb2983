"""Operations that each micro-batch repeats are looked at once, with findings as if all were."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
from faults.changes import Edit
from faults.of_schedules.registry import EACH, ONE, ScheduleFault
from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import prove, values
from zsim.proof.execution import persistent
from zsim.proof.execution.segment_replay import SegmentReplay
from zsim.proof.finding import Finding
from zsim.runtimes.registry import make_schedule
from zsim.schedule import program, validate
from zsim.schedule.access import touching
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

GATHERS = "fsdp2, one stage"
"""Parameters are gathered anew for each micro-batch, into other arrays."""
CASES = {
    "nanotron, three stages": Strategy(
        parallel=Parallel(pipeline=3),
        zero=Zero(stage=1, emulate=Nanotron()),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=6, clip_norm=1.0),
    ),
    "nanotron, replicas and checkpoints": Strategy(
        parallel=Parallel(pipeline=2, data=2),
        zero=Zero(stage=1, emulate=Nanotron()),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=5),
    ),
    "megatron, overflows": Strategy(
        parallel=Parallel(pipeline=2, tensor=2),
        zero=Zero(stage=1, emulate=Megatron()),
        train=Train(precision=Precision.FP16, gradient_accumulation_steps=5),
    ),
    GATHERS: Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, emulate=FSDP2()),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=4),
    ),
}
SEED = 20_261_123


@cache
def made(name: str) -> tuple[Schedule, Model]:
    """A schedule of one block for each stage, and its model."""
    layers = max(2, CASES[name].parallel.pipeline)
    shape = Llama(layers=layers, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=6)
    model = in_blocks(fitting(shape, CASES[name]))
    return make_schedule(model, CASES[name]), model


def anew(schedule: Schedule) -> Schedule:
    """The same schedule, of which nothing is known."""
    return replace(schedule, programs=tuple(replace(each) for each in schedule.programs))


@contextmanager
def each_looked_at(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Look at every operation, and run every segment."""
    with monkeypatch.context() as patch:
        patch.setattr(program, "distinct", touching)
        patch.setattr(persistent, "distinct", touching)
        patch.setattr(SegmentReplay, "run", lambda *_: None)
        patch.setattr(validate, "recurring", lambda _: ())
        patch.setattr(values, "with_fewer", lambda *_: None)
        yield


def findings(schedule: Schedule, model: Model) -> tuple[Finding, ...]:
    return prove(anew(schedule), model).findings


def judge(
    schedule: Schedule,
    edits: Iterator[Edit],
    model: Model,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare findings of so many edits; some have to be refuted, and some proved."""
    refuted = 0
    for edit in edits:
        short = findings(edit.made, model)
        with each_looked_at(monkeypatch):
            assert findings(edit.made, model) == short, edit.text
        refuted += bool(short)
        count -= 1
        if not count:
            break
    assert refuted
    assert not findings(schedule, model)


@pytest.mark.parametrize("name", [name for name in CASES if name != GATHERS])
def test_segments_of_later_micro_batches_are_replayed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = made(name)
    replayed: list[bool] = []
    run = SegmentReplay.run

    def counted(*given: object) -> object:
        found = run(*given)  # type: ignore[arg-type]
        replayed.append(found is not None)
        return found

    monkeypatch.setattr(SegmentReplay, "run", counted)
    assert not findings(schedule, model)
    assert sum(replayed) > len(replayed) // 6  # sums over a tensor axis are other arrays


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", [EACH, ONE], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_has_the_same_findings(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = made(name)
    judge(schedule, fault.mutants(schedule, SEED), model, 12, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("fault", [EACH, ONE], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_many_mutants_have_the_same_findings(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = made(name)
    judge(schedule, fault.mutants(schedule, SEED + 1), model, 40, monkeypatch)
