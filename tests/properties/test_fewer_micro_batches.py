"""Micro-batches that are alike are proved by few of them, and who passes so passes as a whole."""

from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest
from faults.changes import Edit
from faults.of_schedules.registry import EACH, ONE, SOME, SOME_TWICE, ScheduleFault
from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import values
from zsim.proof.context import Context
from zsim.proof.execution.fewer_micro_batches import FewerMicroBatches, with_fewer
from zsim.proof.execution.inferred_model import training_of
from zsim.proof.families import ProofStage, of_stage
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

TRAIN = Train(precision=Precision.BF16, gradient_accumulation_steps=8, clip_norm=1.0)
CASES = {
    "nanotron, three stages": Strategy(
        parallel=Parallel(pipeline=3), zero=Zero(stage=1, emulate=Nanotron()), train=TRAIN
    ),
    "nanotron, replicas and checkpoints": Strategy(
        parallel=Parallel(pipeline=2, data=2),
        zero=Zero(stage=1, emulate=Nanotron()),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=TRAIN,
    ),
    "megatron, tensor ranks": Strategy(
        parallel=Parallel(pipeline=2, tensor=2), zero=Zero(stage=1, emulate=Megatron()), train=TRAIN
    ),
    "megatron, interleaved": Strategy(
        parallel=Parallel(pipeline=2),
        zero=Zero(stage=1, emulate=Megatron(num_layers_per_virtual_pipeline_stage=1)),
        train=TRAIN,
    ),
    "fsdp2, two stages": Strategy(
        parallel=Parallel(pipeline=2, data=2), zero=Zero(stage=3, emulate=FSDP2()), train=TRAIN
    ),
    "fsdp2, one stage": Strategy(
        parallel=Parallel(data=2), zero=Zero(stage=3, emulate=FSDP2()), train=TRAIN
    ),
    "zsim, stage 0": Strategy(parallel=Parallel(data=2), zero=Zero(stage=0), train=TRAIN),
    "zsim, stage 1": Strategy(parallel=Parallel(data=2), zero=Zero(stage=1), train=TRAIN),
    "zsim, stage 2": Strategy(parallel=Parallel(data=2), zero=Zero(stage=2), train=TRAIN),
    "zsim, stage 3": Strategy(parallel=Parallel(data=2), zero=Zero(stage=3), train=TRAIN),
}


WHOLE = ("fsdp2, two stages", "zsim, stage 2", "zsim, stage 3")
"""Cases in which micro-batches are not told apart: the whole schedule is run."""
SEED = 20_261_127


@cache
def made(name: str) -> tuple[Schedule, Model]:
    """A schedule of eight micro-batches, and its model."""
    shape = Llama(layers=4, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=6)
    model = in_blocks(fitting(shape, CASES[name]))
    return make_schedule(model, CASES[name]), model


def fewer(schedule: Schedule) -> FewerMicroBatches | None:
    training = training_of(schedule)
    assert training is not None
    return with_fewer(schedule, training)


def shown(schedule: Schedule, model: Model) -> values.Shown:
    return values.shown(Context.of(schedule, model))


def as_a_whole(schedule: Schedule, model: Model, monkeypatch: pytest.MonkeyPatch) -> values.Shown:
    with monkeypatch.context() as patch:
        patch.setattr(values, "with_fewer", lambda *_: None)
        return shown(schedule, model)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", CASES)
def test_micro_batches_that_are_alike_are_proved_by_few(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = made(name)

    found = fewer(schedule)

    assert (found is None) is (name in WHOLE)
    few, whole = shown(schedule, model), as_a_whole(schedule, model, monkeypatch)
    assert (few.findings, few.classes, few.training) == ((), whole.classes, whole.training)
    assert not whole.findings
    if found is not None:
        assert found.training.micro_batches <= 4
        assert few.error_bits > whole.error_bits  # it is that which was run


def judge(
    name: str,
    edits: Iterator[Edit],
    draws: int,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Check that few pass no edit that the whole refutes; return how many were told apart.

    A finding is always one of the whole. Whether operations are in order is looked at before values
    are: nothing is said of edits that are not.
    """
    _, model = made(name)
    told_apart = 0
    for edit in islice(edits, draws):
        edited = edit.made
        if fewer(edited) is None:
            continue
        told_apart += 1
        if shown(edited, model).findings:
            continue
        whole = as_a_whole(edited, model, monkeypatch)
        if whole.findings:
            context = Context.of(edited, model)
            assert any(each.examine(context) for each in of_stage(ProofStage.ORDER)), edit.text
    return told_apart


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", [SOME, SOME_TWICE], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_mutant_that_few_pass_passes_as_a_whole(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, _ = made(name)
    told_apart = judge(name, fault.mutants(schedule, SEED), 25, monkeypatch)
    assert bool(told_apart) is (name not in WHOLE)


@pytest.mark.long
@pytest.mark.parametrize("fault", [EACH, ONE, SOME, SOME_TWICE], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_many_mutants_that_few_pass_pass_as_a_whole(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, _ = made(name)
    judge(name, fault.mutants(schedule, SEED + 1), 400, monkeypatch)
