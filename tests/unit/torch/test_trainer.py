"""The trainer in a loop of one's own: equal to torch's own training, step by step."""

import copy
import gc
import io
import os
import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from plain_net import STAGE_2, Loss, assert_equal_parameters, batch, in_fp64, net
from shared_ranks import SharedPools
from tiny_training import UNITS, Case, Tiny
from torch import distributed, nn

import zsim
from zsim.backend.backend import RefusedError
from zsim.runtimes.registry import make_schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_torch.module.absent import AbsentParameterError
from zsim_torch.module.description import describe
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.run_option import Option
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.train import train
from zsim_torch.trainer import Trainer


class Evaluated(nn.Module):
    """Units whose evaluation differs from their training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.loss = Loss()


def on_ranks(stage: int) -> tuple[list[float], list[float], bool]:
    """Train with evaluations in between, and without; and evaluate torch's own module."""
    rank = distributed.get_rank()
    strategy = Strategy(parallel=Parallel(data=2), zero=Zero(stage=stage, bucket_elements=10))
    data = [batch(10 * rank + step).float() for step in range(4)]
    held = batch(99).float(), batch(98).float()

    def trained(module: Evaluated, *, between: bool) -> list[float]:
        torch.manual_seed(rank)
        found: list[float] = []
        with Trainer(module, strategy, units=("body", "loss"), batch=data[0]) as trainer:
            for each in data:
                trainer.step(each)
                if between:
                    found.append(float(trainer.evaluate(*held)))
        return found

    one, other = Evaluated(), Evaluated()
    evaluated = trained(one, between=True)
    trained(other, between=False)
    mine, theirs = one.state_dict(), other.state_dict()
    same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert one.training
    one.eval()
    plain = [float(one.loss(one.body(each), each).detach()) for each in held]
    return evaluated, plain, same


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_is_that_of_the_module_and_changes_no_bit_of_the_training(
    pool: RankPool, stage: int
) -> None:
    for evaluated, plain, same in pool.run(on_ranks, stage):
        assert same
        assert evaluated[-1] == pytest.approx(sum(plain) / 2, rel=1e-6)
        assert len(set(evaluated)) == 4


def averages() -> tuple[float, float]:
    case = Case(Strategy(parallel=Parallel(data=2), zero=Zero(stage=1)))
    with Trainer(
        Tiny(Precision.FP32), case.strategy, units=UNITS, batch=case.batch(0, 0, 0)
    ) as trainer:
        loss = trainer.step(case.batch(0, 0, distributed.get_rank()))
        return float(loss), trainer.average(loss)


@pytest.mark.one_commit_in(6)
def test_a_loss_is_the_rank_s_own_and_average_is_over_all(pool: RankPool) -> None:
    (one, mean), (other, again) = pool.run(averages)
    assert one != other
    assert mean == again == pytest.approx((one + other) / 2)


def test_train_is_a_loop_over_the_trainer() -> None:
    case = Case(STAGE_2.but({"train.gradient_accumulation_steps": 2}), steps=3)
    one, other = Tiny(Precision.FP32), Tiny(Precision.FP32)
    losses = train(one, UNITS, case.schedule(), case.batches(0), steps=3).losses
    data = list(case.batches(0))
    with Trainer(other, case.schedule(), units=UNITS) as trainer:
        found = [float(trainer.step(*data[2 * step : 2 * step + 2])) for step in range(3)]
    assert tuple(found) == losses
    for name, value in one.named_parameters():
        assert torch.equal(value, other.get_parameter(name))


def test_a_scenario_says_how_to_train_a_module_of_one_s_own() -> None:
    scenario = zsim.load("tiny", {"zero.stage": 3, "train.gradient_accumulation_steps": 1}, ranks=1)
    mine, theirs = net().float(), net().float()
    with Trainer(mine, scenario, batch=batch(0).float()) as trainer:
        one = float(trainer.step(batch(0).float()))
    with Trainer(theirs, scenario.strategy, batch=batch(0).float()) as trainer:
        assert float(trainer.step(batch(0).float())) == one
    assert_equal_parameters(mine, theirs)


def bytes_a_step(trainer: Trainer, steps: int) -> float:
    """Train, and return by how much Python's memory grows with a step, of so many after as many.

    What was made before the count began and is made anew later looks like growth at first.
    """
    data, sizes = batch(0), list[int]()
    tracemalloc.start()
    try:
        for _ in range(2):
            for _ in range(steps):
                trainer.step(data)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return (sizes[1] - sizes[0]) / steps


@pytest.mark.one_commit_in(24)
def test_memory_does_not_grow_with_the_steps_unless_the_trace_is_kept() -> None:
    strategy = in_fp64(clip_norm=1.0)
    with Trainer(net(), strategy, batch=batch(0)) as trainer:
        assert bytes_a_step(trainer, 400) < 100
    kept = Option(keep_trace=True)
    with Trainer(net(), strategy, batch=batch(0), option=kept) as trainer:
        assert bytes_a_step(trainer, 40) > 5_000


@pytest.mark.long
def test_resident_memory_is_flat_over_ten_thousand_steps() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    data = batch(0)
    with Trainer(net(), in_fp64(clip_norm=1.0), batch=batch(0)) as trainer:
        for _ in range(500):
            trainer.step(data)
        before = resident()
        for _ in range(10_000):
            trainer.step(data)
        assert resident() - before < 2_000_000


def schedule() -> zsim.Schedule:
    model = describe(net(), ("0", "1", "2", "3"), batch(0), precision=Precision.FP64)
    return make_schedule(model, in_fp64())


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_lost() -> None:
    module = net()
    with pytest.raises(RefusedError, match="optimizer: the schedule has its rules"):
        Trainer(module, schedule(), optimizer=SGD())
    with pytest.raises(ModuleUnitError, match=r"units: missing; ModuleDict has no forward"):
        Trainer(nn.ModuleDict({"net": module}), in_fp64(), batch=batch(0))
    with Trainer(module, in_fp64(), batch=batch(0)) as trainer:
        with pytest.raises(RefusedError) as caught:
            trainer.step(batch(0), batch(1))
        assert str(caught.value) == "batches: a step takes 1 on this rank, 2 are given"
        with pytest.raises(RefusedError, match="batches: at least one is needed to evaluate"):
            trainer.evaluate()
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            trainer.evaluate(torch.ones(3, 5).double())
        with pytest.raises(RefusedError, match=r"trace: not kept; say Option\(keep_trace=True\)"):
            trainer.trace()
        trainer.step(batch(0))
    with pytest.raises(RefusedError, match="trainer: its training has ended; make another one"):
        trainer.step(batch(0))


def test_after_an_error_in_the_first_step_the_module_has_what_it_came_with() -> None:
    module = net()
    before = [parameter.clone() for parameter in module.parameters()]
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        trainer.step(torch.ones(3, 5).double())
    for parameter, was in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    with pytest.raises(RefusedError, match="its training has ended"):
        trainer.step(batch(0))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_in_a_later_step_nobody_reads_or_saves_what_the_module_lacks(
    error: type[BaseException], tmp_path: Path
) -> None:
    module = net()
    before = [each.shape for each in module.parameters()]
    failing: list[bool] = []

    def fails(*_: object) -> None:
        if failing:
            raise error

    handle = module[0].register_forward_hook(fails)
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    trainer.step(batch(0))
    trainer.save(tmp_path)
    wanted = trainer.full_parameters()
    failing.append(True)
    with pytest.raises(error), trainer:
        trainer.step(batch(1))
    handle.remove()
    assert [each.shape for each in module.parameters()] == before
    reads: list[Callable[[], object]] = [
        module.state_dict,
        module[2].state_dict,
        lambda: module[0](batch(0)),
        lambda: copy.deepcopy(module),
        lambda: torch.save(module, io.BytesIO()),
        lambda: nn.utils.parameters_to_vector(module.parameters()),
        lambda: [each.data for each in module.parameters()],
    ]
    for read in reads:
        with pytest.raises(AbsentParameterError, match=r"it has no value: its training failed, or"):
            read()
    with pytest.raises(RefusedError, match="trainer: its training has failed, and no rank has"):
        trainer.full_parameters()
    with pytest.raises(RefusedError, match="or one that failed, left it no parameters"):
        Trainer(module, in_fp64(), batch=batch(0))
    with pytest.raises(AbsentParameterError):  # a trainer that is refused changes nothing
        module.state_dict()
    kept = Option(initial=tmp_path)
    with Trainer(module, in_fp64(), batch=batch(0), option=kept) as again:
        assert_same(again.full_parameters(), wanted)
    assert_same(module.state_dict(), wanted)


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_what_a_module_lacks_may_be_assigned_and_is_not_given_back_as_no_number() -> None:
    module = net()
    with Trainer(module, in_fp64(), batch=batch(0), option=Option(write_back=False)) as trainer:
        trainer.step(batch(0))
    made = net().state_dict()
    option = Option(initial=made.__getitem__, restart=True)
    failing = Trainer(module, in_fp64(), batch=batch(0), option=option)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        failing.step(torch.ones(3, 5).double())
    with pytest.raises(AbsentParameterError, match="or ended with write_back=False"):
        module.state_dict()
    module.load_state_dict(made, assign=True)
    assert_same(module.state_dict(), made)


def test_an_error_between_steps_of_one_rank_leaves_the_module_what_was_trained() -> None:
    module = net()
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    trainer.step(batch(0))
    wanted = trainer.full_parameters()
    with pytest.raises(KeyboardInterrupt), trainer:
        raise KeyboardInterrupt
    assert_same(module.state_dict(), wanted)
    with pytest.raises(RefusedError, match="its training has ended"):
        trainer.step(batch(0))


def stopped_between_steps() -> tuple[str, str]:
    case = Case(Strategy(parallel=Parallel(data=2), zero=Zero(stage=1)))
    module, data = Tiny(Precision.FP32), case.batch(0, 0, 0)
    trainer = Trainer(module, case.strategy, units=UNITS, batch=data)
    trainer.step(data)
    with pytest.raises(KeyboardInterrupt), trainer:
        raise KeyboardInterrupt
    with pytest.raises(AbsentParameterError) as caught:
        module.state_dict()
    with pytest.raises(RefusedError) as refused:
        trainer.full_parameters()
    return str(caught.value), str(refused.value)


@pytest.mark.one_commit_in(6)
def test_an_error_between_steps_of_several_ranks_leaves_no_value_to_read(pool: RankPool) -> None:
    for read, collected in pool.run(stopped_between_steps):
        assert "it has no value: its training failed" in read
        assert collected == "trainer: its training has failed, and no rank has its parameters"


def test_no_value_that_the_module_came_with_lives_past_the_first_step() -> None:
    module = net()
    came_with = [weakref.ref(each.untyped_storage()) for each in module.parameters()]
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    assert any(each() is not None for each in came_with)
    trainer.step(batch(0))
    assert not any(each() is not None for each in came_with)
    trainer.finish()


def test_finish_gives_the_module_what_was_trained() -> None:
    module = net()
    trainer = Trainer(module, in_fp64(), batch=batch(0))
    trainer.step(batch(0))
    wanted = trainer.full_parameters()
    trainer.finish()
    for name, value in module.named_parameters():
        assert torch.equal(value, wanted[name])
