"""Frozen parameters and adapters: trained as FSDP2 trains them, and what is frozen stays."""

from pathlib import Path

import pytest
import torch
from adapted_net import READS, UNITS, AdaptedNet, batch, by_fsdp, by_trainer, by_trainer_all
from shared_ranks import SharedPools
from torch.distributed.checkpoint.filesystem import FileSystemReader

from zsim.backend.backend import RefusedError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.module.description import describe
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

ADAM = Adam(learning_rate=0.01, weight_decay=0.1)


def strategy(stage: int, ranks: int = 2) -> Strategy:
    return Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=stage, bucket_elements=40),
        train=Train(optimizer=ADAM),
    )


WAYS = [
    *(strategy(stage) for stage in range(4)),
    strategy(3).model_copy(update={"zero": Zero(stage=3, emulate=FSDP2())}),
    strategy(3).model_copy(update={"activations": Activations(checkpointing=Checkpointing.FULL)}),
    strategy(1).but({"train.clip_norm": 1e6}),
]


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


@pytest.mark.one_commit_in(9)
def test_adapters_train_as_under_fsdp2_and_frozen_parameters_keep_every_bit(pool: RankPool) -> None:
    before = dict(AdaptedNet().named_parameters())
    wanted = pool.run(by_fsdp)
    for results, (losses, parameters) in zip(pool.run(by_trainer_all, WAYS), wanted, strict=True):
        for way, (found, after) in zip(WAYS, results, strict=True):
            assert found == pytest.approx(losses, rel=1e-6), way
            for name, value in after.items():
                if before[name].requires_grad:
                    assert torch.allclose(value, parameters[name], atol=1e-6), (way, name)
                    assert not torch.equal(value, before[name])
                else:
                    assert torch.equal(value, before[name]), (way, name)


def test_moments_and_masters_are_of_adapters_alone(tmp_path: Path) -> None:
    module = AdaptedNet()
    mixed = strategy(2, ranks=1).but({"train.precision": Precision.BF16})
    with Trainer(module, mixed, units=UNITS, batch=batch(0, 0), reads=READS) as trainer:
        trainer.step(batch(0, 0))
        trainer.save(tmp_path)
        assert trainer.optimizer is not None
        (group,) = trainer.optimizer.param_groups
        assert len(group["params"]) == 2
        wanted = trainer.full_parameters()
    there = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    moments = [name for name in there if name.endswith(".exp_avg")]
    assert sorted(moments) == [
        "optim.state.second.down.weight.exp_avg",
        "optim.state.second.up.weight.exp_avg",
    ]
    with Trainer(AdaptedNet(), mixed, units=UNITS, batch=batch(0, 0), reads=READS) as other:
        other.load(tmp_path)
        for name, value in other.full_parameters().items():
            assert torch.equal(value, wanted[name])


@pytest.mark.parametrize("stage", [0, 3])
def test_the_schedule_of_a_described_module_with_adapters_is_proved(stage: int) -> None:
    model = describe(AdaptedNet(), UNITS, batch(0, 0), reads=READS)
    assert model.trained_count == 24
    assert check(make_schedule(model, strategy(stage)), model=model) == ()


def test_a_schedule_that_trains_what_the_module_froze_is_refused_by_name() -> None:
    module = AdaptedNet()
    module.second.frozen.weight.requires_grad_()
    made = make_schedule(describe(module, UNITS, batch(0, 0), reads=READS), strategy(1, ranks=1))
    with pytest.raises(RefusedError) as caught:
        Trainer(AdaptedNet(), made, units=UNITS)
    assert str(caught.value) == (
        "parameter second.frozen.weight: requires_grad is False; the schedule trains it"
    )
    module.requires_grad_()
    with pytest.raises(RefusedError, match="requires_grad is True; the schedule does not train it"):
        Trainer(module, made, units=UNITS)


def test_one_rank_trains_adapters_as_torch_does() -> None:
    losses, parameters = by_trainer(strategy(1, ranks=1))
    module = AdaptedNet()
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    for step, found in enumerate(losses):
        optimizer.zero_grad()
        loss = module(batch(step, 0))
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, value in module.named_parameters():
        assert torch.allclose(value, parameters[name], atol=1e-6)
