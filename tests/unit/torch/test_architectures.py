"""Models of transformers, as they are: trained as plain torch trains them, or refused in a line."""

import copy
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, REFUSED, SUMMED_APART, Batch
from shared_ranks import SharedPools
from torch import distributed, nn

from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.module.unit import ModuleUnitError, UnitRunError
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

STEPS, RATE = 3, 0.1
ROUNDING = 2e-6
"""Bound of differences where gradients are added in another order: some eps of fp32."""

REASONS = {
    "Llama that keeps keys and values": r"unit model\.layers\.0: it is called with, or returns, a "
    r"DynamicCache that keeps tensors; .* say use_cache=False\)",
    "Llama that checkpoints by itself": r"unit model\.layers\.1: its backward reads parameter .*; "
    r"let the schedule recompute \(checkpointing full\), .*",
    "ResNet without labels": r"module: returns no loss for a batch; say loss=lambda .*",
    "OPT that drops layers": r"module: its forward calls .*; blocks must be called in one order",
}

SUITE = ("Llama, LoRA", "T5", "Mixtral", "ResNet", "ALBERT")
"""Of the table what the suite runs; `make test-long` runs it whole."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both trainings of a model: losses of this rank, and the most by which parameters differ."""

    losses: tuple[float, ...]
    plain: tuple[float, ...]
    apart: float
    buffers_equal: bool
    changed: int


def user_trains(module: nn.Module, strategy: Strategy, batches: list[object]) -> list[float]:
    # The user's lines.
    with Trainer(module, strategy, batch=batches[0]) as trainer:
        return [float(trainer.step(batch)) for batch in batches]


LINES = len(inspect.getsource(user_trains).splitlines()) - 2


def plain_steps(
    module: nn.Module, ranks: int, rank: int, give: Callable[[int], Batch]
) -> list[float]:
    """Train as DDP does, in one process: means of the gradients of all ranks, buffers of rank 0."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses: list[float] = []
    for step in range(STEPS):
        buffers = [buffer.clone() for buffer in module.buffers()]
        kept: list[torch.Tensor] = []
        for each in range(ranks):
            with torch.no_grad():
                for buffer, before in zip(module.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            loss = module(**give(ranks * step + each)).loss
            (loss / ranks).backward()
            if each == rank:
                losses.append(float(loss.detach()))
            kept = kept or [buffer.clone() for buffer in module.buffers()]
        with torch.no_grad():
            for buffer, first in zip(module.buffers(), kept, strict=True):
                buffer.copy_(first)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def outcome(name: str, stage: int) -> Outcome:
    """Train on this rank by zsim, and by torch."""
    joined = distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    torch.manual_seed(0)
    module, give = ARCHITECTURES[name]()
    plain = copy.deepcopy(module.train())
    before = [each.detach().clone() for each in module.parameters()]
    strategy = Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=stage),
        train=Train(optimizer=SGD(learning_rate=RATE)),
    )
    batches: list[object] = [give(ranks * step + rank) for step in range(STEPS)]
    losses = user_trains(module, strategy, batches)
    expected = plain_steps(plain, ranks, rank, give)
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    return Outcome(
        tuple(losses),
        tuple(expected),
        max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs),
        all(map(torch.equal, module.buffers(), plain.buffers())),
        sum(not torch.equal(one, other) for one, (other, _) in zip(before, pairs, strict=True)),
    )


def judged(name: str, found: Outcome, *, ranks: int) -> str:
    exact = ranks == 1 and name not in SUMMED_APART
    bound = 0.0 if exact else ROUNDING
    assert found.changed
    assert found.losses == pytest.approx(found.plain, rel=bound, abs=0)
    assert found.apart <= bound
    assert found.buffers_equal
    return "equal" if found.apart == 0 else f"equal within {found.apart:.0e}"


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.matrix(15)
@pytest.mark.parametrize("name", SUITE)
def test_a_model_of_transformers_trains_as_in_plain_torch(name: str) -> None:
    judged(name, outcome(name, 3), ranks=1)


def refusal(name: str) -> str:
    """Return why a model is refused; it has the parameters then that it had."""
    torch.manual_seed(0)
    module, give = REFUSED[name]()
    before = [each.detach().clone() for each in module.parameters()]
    with pytest.raises((ModuleUnitError, UnitRunError)) as caught:
        user_trains(module, Strategy(zero=Zero(stage=3)), [give(step) for step in range(6)])
    assert all(map(torch.equal, before, module.parameters()))
    return str(caught.value)


def adapters(*, sharded_by_torch: bool) -> dict[str, torch.Tensor]:
    """Train adapters of a Llama on two ranks, by zsim or FSDP2, and return all parameters."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    module, give = ARCHITECTURES["Llama, LoRA"]()
    batches: list[Batch] = [give(2 * step + rank) for step in range(STEPS)]
    trained = [each for each in module.parameters() if each.requires_grad]
    if not sharded_by_torch:
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        stage_3 = Strategy(parallel=Parallel(data=2), zero=Zero(stage=3))
        with Trainer(module, stage_3, batch=batches[0], optimizer=optimizer) as trainer:
            for batch in batches:
                trainer.step(batch)
        return {name: each.detach() for name, each in module.named_parameters()}
    fsdp: Any = import_module("torch.distributed.fsdp")  # a second; only here
    mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
    for layer in module.get_submodule("base_model.model.model.layers").children():
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(module, mesh=mesh)
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    for batch in batches:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole: dict[str, Any] = dict(module.named_parameters())
    return {name: each.full_tensor().detach() for name, each in whole.items()}


@pytest.mark.long
def test_adapters_of_a_llama_train_as_under_fsdp2(pool: RankPool) -> None:
    ours, theirs = (pool.run(partial(adapters, sharded_by_torch=by))[0] for by in (False, True))
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(("name", "line"), REASONS.items())
def test_what_cannot_be_followed_is_refused_in_one_line(name: str, line: str) -> None:
    assert re.fullmatch(line, refusal(name)), refusal(name)


@pytest.mark.long
def test_the_table_of_architectures(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[str] = []
    for name in ARCHITECTURES:
        alone = [judged(name, outcome(name, stage), ranks=1) for stage in (0, 3)]
        both = [
            judged(name, found, ranks=2)
            for stage in (0, 3)
            for found in pool.run(outcome, name, stage)
        ]
        rows.append(f"{name:<14} works: 1 rank {max(alone)}, 2 ranks {max(both)}")
    rows += [f"{name} is refused: {refusal(name)}" for name in REFUSED]
    title = f"{len(ARCHITECTURES)} work, {len(REFUSED)} are refused, 0 are wrong; {LINES} lines:"
    with capsys.disabled():
        sys.stdout.write("\n".join(["", title, inspect.getsource(user_trains), *rows, ""]))
