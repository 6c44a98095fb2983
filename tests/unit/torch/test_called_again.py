"""A module that is called twice in a forward: one set of parameters, whose gradients add up."""

from dataclasses import replace

import pytest
import torch
from shared_ranks import SharedPools
from tiny_training import BOUND, Case, Tiny, distance, give, optimizer_of, values
from torch import distributed

from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.module.description import describe
from zsim_torch.module.meta_model import model_from
from zsim_torch.module.transformer import transformer
from zsim_torch.module.unit import UnitChoice
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.train import Option, train


class Twice(Tiny):
    """Calls its middle twice."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.middle(self.first(batch)))
        loss: torch.Tensor = self.last(hidden, batch)
        return loss


def units(module: Tiny) -> list[UnitChoice]:
    return ["first", "middle", ("again", module.middle), "last"]


def described(case: Case) -> Model:
    module = Twice(case.strategy.train.precision)
    precision = case.strategy.train.precision
    return describe(module, units(module), case.batch(0, 0, 0), precision=precision)


def by_schedule(case: Case, made: Schedule) -> dict[str, torch.Tensor]:
    module = Twice(case.strategy.train.precision)
    option = Option(write_back=False, poison=case.poison)
    data = case.batches(distributed.get_rank())
    trained = train(module, units(module), made, data, steps=case.steps, option=option)
    return trained.full_parameters()


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.matrix(18)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_it_trains_as_one_process_does(
    pool: RankPool, stage: int, checkpointing: Checkpointing
) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage, bucket_elements=60),
        activations=Activations(checkpointing=checkpointing),
        train=Train(
            gradient_accumulation_steps=2,
            optimizer=Adam(learning_rate=0.01, epsilon=1e-5),
            precision=Precision.FP64,
        ),
    )
    case = Case(strategy, steps=3, poison=True)
    made = make_schedule(described(case), strategy)
    module = Twice(strategy.train.precision)
    before, optimizer = values(module), optimizer_of(case, module)
    for step in range(case.steps):
        optimizer.zero_grad()
        give(case, optimizer, step)
        for rank in range(2):
            for micro_batch in range(2):
                (module(case.batch(step, micro_batch, rank)) / 4).backward()
        optimizer.step()
    for found in pool.run(by_schedule, case, made):
        assert distance(found, values(module), before) <= BOUND[strategy.train.precision]


def test_two_names_of_one_module_are_described_as_two_calls() -> None:
    case = Case(Strategy(parallel=Parallel(data=2), zero=Zero(stage=3)))
    model = described(case)
    assert [unit.module for unit in model.units] == ["", "", "middle", ""]
    assert check(make_schedule(model, case.strategy), model) == ()


def test_a_module_that_runs_twice_without_data_is_two_calls() -> None:
    module = Twice(Precision.FP32)
    found = model_from(module, (torch.zeros(2, 3, dtype=torch.int64),), units=["middle"])
    assert [(unit.name, unit.module) for unit in found.units][1:3] == [
        ("middle", ""),
        ("middle@2", "middle"),
    ]


def test_blocks_of_one_group_are_one_module() -> None:
    shape = GPT(
        layers=4,
        hidden_groups=2,
        hidden_size=4,
        attention_heads=2,
        sequence_length=2,
        vocab_size=5,
    )
    made, apart = (transformer(each) for each in (shape, replace(shape, hidden_groups=None)))
    assert made.get_submodule("block0") is made.get_submodule("block1")
    assert made.get_submodule("block2") is not made.get_submodule("block1")
    assert made.units == apart.units
    names = {name.split(".")[0] for name, _ in made.named_parameters()}
    assert names == {"embedding", "block0", "block2", "head"}
