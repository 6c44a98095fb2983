"""Blocks that repeat are proved by induction, and whoever passes so passes as a whole."""

from functools import cache
from itertools import islice

import pytest
from faults.of_schedules.registry import BLOCKS, ScheduleFault

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import values
from zsim.proof.context import Context
from zsim.proof.execution.shortening import shortened
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

HOST, NVME = MemoryTier.HOST, MemoryTier.NVME
WHOLE = 10**9
CASES = {
    "accumulation and clipping": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=WHOLE),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2, clip_norm=1.0),
    ),
    "three buckets for each block": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=100),
        train=Train(precision=Precision.BF16),
    ),
    "all states in files": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=WHOLE),
        offload=Offload(optimizer=NVME, gradients=NVME, parameters=NVME, sub_group_elements=WHOLE),
        train=Train(precision=Precision.FP16),
    ),
    "states on the host": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=WHOLE),
        offload=Offload(optimizer=HOST, parameters=HOST),
        train=Train(precision=Precision.FP16, clip_norm=1.0),
    ),
    "checkpoints in parts on the host": Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=3, bucket_elements=WHOLE),
        offload=Offload(optimizer=NVME, checkpoints=HOST),
        activations=Activations(checkpointing=Checkpointing.FULL, partition=True),
        train=Train(precision=Precision.BF16),
    ),
}
SEED = 20_261_123


@cache
def made(name: str) -> tuple[Schedule, Model]:
    """A schedule of 56 blocks, and its model."""
    strategy = CASES[name]
    shape = GPT(layers=56, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=6)
    tensor = strategy.parallel.tensor
    precision = strategy.train.precision
    model = gpt(shape, micro_batch_size=1, precision=precision, tensor=tensor)
    return make_schedule(model, strategy), model


def as_a_whole(schedule: Schedule, model: Model, monkeypatch: pytest.MonkeyPatch) -> values.Shown:
    with monkeypatch.context() as patch:
        patch.setattr(values, "shortened", lambda *_: None)
        return values.shown(Context.of(schedule, model))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_whose_blocks_repeat_is_proved_with_fewer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, model = made(name)

    shorter = shortened(schedule, model)
    shown = values.shown(Context.of(schedule, model))

    assert shorter is not None
    assert 12 * len(shorter.model.units) < 5 * len(model.units)
    assert not shown.findings
    whole = as_a_whole(schedule, model, monkeypatch)
    assert (whole.findings, whole.ranks, whole.classes) == ((), shown.ranks, shown.classes)
    assert whole.training == shown.training


def missed(
    name: str, fault: ScheduleFault, seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Mutants of every block that are passed by induction and refuted as a whole."""
    schedule, model = made(name)
    found: list[str] = []
    refused = 0
    for mutant in islice(fault.mutants(schedule, seed), count):
        if shortened(mutant.made, model) is None:
            continue
        if values.shown(Context.of(mutant.made, model)).findings:
            refused += 1
        elif as_a_whole(mutant.made, model, monkeypatch).findings:
            found.append(mutant.text)
    assert refused
    return found


@pytest.mark.one_commit_in(8)
@pytest.mark.parametrize("fault", [BLOCKS], ids=str)
@pytest.mark.parametrize("name", ["accumulation and clipping", "three buckets for each block"])
def test_what_is_wrong_in_every_block_is_found(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missed(name, fault, SEED, 4, monkeypatch) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", [BLOCKS], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_in_every_block_is_found_in_many(
    name: str, fault: ScheduleFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missed(name, fault, SEED, 100, monkeypatch) == []
