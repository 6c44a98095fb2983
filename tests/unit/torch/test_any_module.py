"""Modules that know nothing of units: what crosses between repeated blocks, and what is refused."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from drawn_forward import STEPS, WIDTH, DrawnForward, Step
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_ranks import SharedPools
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from zsim.backend.backend import RefusedError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.nanotron.options import Nanotron
from zsim_torch.module.description import describe
from zsim_torch.module.unit import ModuleUnitError, UnitRunError
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

RATE = 0.01


def strategy(stage: int = 3, checkpointing: Checkpointing = Checkpointing.NONE) -> Strategy:
    return Strategy(
        zero=Zero(stage=stage, bucket_elements=30),
        activations=Activations(checkpointing=checkpointing),
        train=Train(precision=Precision.FP64, optimizer=Adam(learning_rate=RATE, epsilon=1e-3)),
    )


def batch(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def plain_losses(module: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, eps=1e-3)
    losses: list[float] = []
    for each in batches:
        optimizer.zero_grad()
        loss: Tensor = module(each)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.one_commit_in(12)
@settings(max_examples=15)
@given(steps=STEPS, stage=st.integers(0, 3), full=st.booleans())
def test_whatever_stands_between_blocks_trains_as_in_torch(
    steps: list[Step], stage: int, full: bool
) -> None:
    chosen = strategy(stage, Checkpointing.FULL if full else Checkpointing.NONE)
    module = DrawnForward(steps).double()
    plain = copy.deepcopy(module)
    batches = [batch(seed) for seed in range(3)]
    model = describe(module, None, batches[0], precision=Precision.FP64)
    assert check(make_schedule(model, chosen), model) == ()
    with Trainer(module, chosen, batch=batches[0], option=Option(poison=True)) as trainer:
        losses = [float(trainer.step(each)) for each in batches]
    assert losses == pytest.approx(plain_losses(plain, batches), rel=1e-9)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)


class Chain(nn.Module):
    """Two blocks; `between` is what a test does with them."""

    def __init__(self, between: Callable[["Chain", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(Told(self) for _ in range(2))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.between = between
        self.note: Any = 0.0

    def forward(self, batch: Tensor) -> Tensor:
        return self.between(self, batch)


class Told(nn.Module):
    """A block that may know the whole module, and leave something in it."""

    def __init__(self, whole: Chain) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.within: Callable[[Chain, Tensor], Tensor] = lambda whole, x: x
        self.__dict__["whole"] = whole

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.within(self.__dict__["whole"], torch.tanh(self.inner(x)))
        return made


def run(chain: Chain, x: Tensor) -> Tensor:
    for block in chain.blocks:
        x = block(x)
    return x.square().mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def slope(chain: Chain, x: Tensor) -> Tensor:
    loss = run(chain, x)
    found: Tensor = torch.autograd.grad(loss, chain.blocks[0].inner.weight)[0]
    return loss + found.sum()


def under_autocast(chain: Chain, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run(chain, chain.never(x))


def own_function(chain: Chain, x: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(chain.blocks[0](x))  # type: ignore[no-untyped-call]
    return run(chain, doubled + 1)


def decides(chain: Chain, x: Tensor) -> Tensor:
    made = chain.blocks[0](x)
    return run(chain, made if made.sum() > 0 else -made)


def order_by_batch(chain: Chain, x: Tensor) -> Tensor:
    first, second = chain.blocks if x[0, 0] > 0 else reversed(chain.blocks)
    loss: Tensor = second(first(x)).square().mean()
    return loss


def in_place(chain: Chain, x: Tensor) -> Tensor:
    return run(chain, chain.blocks[0](x).mul_(2))


def hidden_result(chain: Chain, x: Tensor) -> Tensor:
    note: Tensor | float = chain.note
    return run(chain, x) + note


def left_number(chain: Chain, x: Tensor) -> Tensor:
    loss = run(chain, x)
    note: float = chain.note
    return loss + 1e-12 * note


def told_between(chain: Chain, x: Tensor) -> Tensor:
    chain.note = 1.0
    x = chain.blocks[0](x)
    chain.note = 2.0
    last: Tensor = chain.blocks[1](x)
    return last.square().mean()


def kept_from_before(chain: Chain, x: Tensor) -> Tensor:
    before, chain.note = chain.note, chain.blocks[0](x)
    both: Tensor = chain.note + before
    return both.square().mean()


def leave(what: Callable[[Tensor], object]) -> Callable[[Chain, Tensor], Tensor]:
    def within(whole: Chain, x: Tensor) -> Tensor:
        whole.note = what(x)
        return x

    return within


def reads_other(whole: Chain, x: Tensor) -> Tensor:
    made: Tensor = x @ whole.blocks[1].inner.weight
    return made


@dataclass(frozen=True, slots=True)
class Case:
    between: Callable[[Chain, Tensor], Tensor]
    line: str
    within: Callable[[Chain, Tensor], Tensor] | None = None


REFUSED = {
    "a choice by values": Case(decides, "module: its forward decides by values between two units"),
    "a result changed in place": Case(in_place, "module: mul_ writes a tensor in place that"),
    "a gradient in a forward": Case(slope, "module: its forward calls grad, which"),
    "autocast": Case(under_autocast, "module: its forward calls linear under autocast; choose"),
    "a function of autograd": Case(own_function, "module: add reads what a function of autograd"),
    "a result left in the module": Case(
        hidden_result, r"unit blocks\.0: what it makes is read by add", leave(lambda x: x.sum())
    ),
    "a number left in the module": Case(
        left_number,
        r"unit blocks\.0: its forward changes note, which code between blocks reads",
        leave(lambda x: float(x.detach().sum())),
    ),
    "a number told to a block": Case(
        told_between,
        r"module: its forward changes note after unit blocks\.0 has read it",
        lambda whole, x: x * float(whole.note),
    ),
    "a tensor of an earlier forward": Case(
        kept_from_before, "module: (__)?r?add(__)? reads what an earlier forward left"
    ),
    "a parameter of another block": Case(
        run, r"unit blocks\.0: .* reads parameter blocks\.1\.inner\.weight", reads_other
    ),
}


def refused(case: Case) -> tuple[str, bool]:
    """Return why a module is refused, and whether it has what it had before."""
    module = Chain(case.between).double()
    if case.within is not None:
        setattr(module.blocks[0], "within", case.within)  # noqa: B010  (any module of a list)
    before = [each.detach().clone() for each in module.parameters()]
    with pytest.raises((ModuleUnitError, UnitRunError)) as caught:
        Trainer(module, strategy(), batch=batch(0)).step(batch(0))
    return str(caught.value), all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_told_before_a_parameter_changes(name: str) -> None:
    line, is_kept = refused(REFUSED[name])
    assert re.match(REFUSED[name].line, line), line
    assert is_kept
    assert len(line.splitlines()) == 1


def test_an_order_that_changes_with_the_data_is_told_in_the_step_that_has_it() -> None:
    module = Chain(order_by_batch).double()
    trainer = Trainer(module, strategy(), batch=batch(0).abs())
    trainer.step(batch(0).abs())
    with pytest.raises(ModuleUnitError, match=r"module: its forward calls blocks\.1 as block 1"):
        trainer.step(-batch(0).abs())


def test_a_block_that_returns_another_number_than_at_first_is_told() -> None:
    def counting(chain: Chain, x: Tensor) -> Tensor:
        found, number = chain.blocks[0](x)
        return run_all(chain, found * number)

    def run_all(chain: Chain, x: Tensor) -> Tensor:
        made: Tensor = chain.blocks[1](x)[0]
        return made.square().mean()

    module = Chain(counting).double()
    for block in module.blocks:
        block.within = lambda whole, x: (x, int(x.sum() > 0))
    ups = torch.ones(3, WIDTH).double()
    with torch.no_grad():
        module.blocks[0].inner.weight.copy_(torch.eye(WIDTH))
    trainer = Trainer(module, strategy(), batch=10 * ups)
    with pytest.raises(ModuleUnitError, match=r"unit blocks\.0: returned 0, the first time"):
        trainer.step(-10 * ups)


def test_a_schedule_that_is_made_already_and_what_is_observed_serve_any_module() -> None:
    module, other = Chain(run).double(), Chain(run).double()
    schedule = make_schedule(
        describe(module, None, batch(0), precision=Precision.FP64), strategy(stage=2)
    )
    option = Option(observe=True, keep_trace=True)
    with Trainer(module, schedule, batch=batch(0), option=option) as trainer:
        trainer.step(batch(0))
        seen = dict(trainer.trace().observed)
    assert seen["live_bytes_peak/all"] < 4096
    with Trainer(other, strategy(stage=3), batch=batch(0)) as trainer:
        trainer.step(batch(0))
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_a_batch_of_another_shape_is_refused_by_name() -> None:
    module = Chain(run).double()
    with Trainer(module, strategy(), batch=batch(0)) as trainer:
        trainer.step(batch(1))
        with pytest.raises(ModuleUnitError) as caught:
            trainer.step(batch(2)[:2])
    assert (
        str(caught.value) == "batch: batch is 2 x 4 float64, the schedule is made for 3 x 4 float64"
    )


def test_a_loss_is_the_user_s_if_the_module_returns_none() -> None:
    module = Chain(lambda chain, x: chain.blocks[1](chain.blocks[0](x))).double()
    with pytest.raises(ModuleUnitError, match=r"module: returns a tensor of 12 elements for a"):
        Trainer(module, strategy(), batch=batch(0))
    with pytest.raises(ModuleUnitError, match="units: missing; Chain has no forward, or no batch"):
        Trainer(module, strategy())
    with pytest.raises(RefusedError, match="batch: missing; a micro-batch is needed"):
        Trainer(module, strategy(), units=["blocks.0", "blocks.1"])
    plain = copy.deepcopy(module)
    wanted = float(plain(batch(0)).square().mean().detach())
    with Trainer(
        module, strategy(), batch=batch(0), loss=lambda net, given: net(given).square().mean()
    ) as trainer:
        assert float(trainer.step(batch(0))) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("axis", "changes"),
    [("tensor", {"zero.stage": 1}), ("pipeline", {"zero.stage": 1, "zero.emulate": Nanotron()})],
)
def test_units_that_are_found_are_not_cut_over_another_axis(
    axis: str, changes: dict[str, object]
) -> None:
    plain = Strategy(zero=Zero(stage=1), train=Train(precision=Precision.FP32))
    chosen = plain.but({f"parallel.{axis}": 2, **changes})
    with pytest.raises(RefusedError, match=rf"parallel\.{axis}: 2 must be 1"):
        Trainer(Chain(run), chosen, batch=batch(0).float())


def test_parameters_that_nothing_reads_stay_as_they_are() -> None:
    module = Chain(run).double()
    before = module.never.weight.detach().clone()
    decay = torch.optim.AdamW(module.parameters(), weight_decay=0.5)
    with Trainer(module, strategy(), batch=batch(0), optimizer=decay) as trainer:
        trainer.step(batch(0))
    assert torch.equal(module.never.weight, before)


class Statistics(nn.Module):
    """Batch norms in blocks and outside, and dropout: evaluation differs from training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(x), 0.5, self.training)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_buffers_change_as_in_torch_and_evaluation_is_that_of_the_module() -> None:
    module = Statistics().double()
    plain = copy.deepcopy(module)
    batches = [batch(seed) for seed in range(3)]
    torch.manual_seed(3)
    with Trainer(module, strategy(), batch=batches[0]) as trainer:
        losses = [float(trainer.step(each)) for each in batches]
        evaluated = float(trainer.evaluate(batches[0]))
    torch.manual_seed(3)
    assert losses == pytest.approx(plain_losses(plain, batches), rel=1e-9)
    assert all(map(torch.allclose, module.buffers(), plain.buffers()))
    assert module.training
    assert evaluated == pytest.approx(float(module.eval()(batches[0]).detach()), rel=1e-6)


def trained_on_ranks(*, by_torch: bool) -> dict[str, Tensor]:
    """Train with batch norms and dropout on two ranks, by zsim or DDP, and return all state."""
    rank = distributed.get_rank()
    module = Statistics().double()
    batches = [batch(2 * step + rank) for step in range(3)]
    torch.manual_seed(rank)
    if by_torch:
        plain_losses(DistributedDataParallel(module), batches)
    else:
        chosen = strategy(stage=3).but({"parallel.data": 2})
        with Trainer(module, chosen, batch=batches[0]) as trainer:
            for each in batches:
                trainer.step(each)
    return module.state_dict()


def both_ways() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return trained_on_ranks(by_torch=False), trained_on_ranks(by_torch=True)


@pytest.mark.one_commit_in(9)
def test_ranks_train_it_as_ddp_does_and_all_have_the_buffers_of_rank_0(
    pool_of: SharedPools,
) -> None:
    (one, plain), (other, _) = pool_of(2).run(both_ways)
    for name, value in plain.items():
        assert torch.allclose(one[name].double(), value.double(), rtol=1e-8, atol=1e-10), name
        assert torch.equal(one[name], other[name]), name
