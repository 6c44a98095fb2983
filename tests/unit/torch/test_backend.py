from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shared_ranks import SharedPools

from zsim.backend.backend import Backend, Job, RefusedError, load_backend
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT, Architecture, Attention, Llama, Positions
from zsim.model.equal_units import equal_units
from zsim.model.transformer import transformer
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Execution, Float8
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_torch import RankPool, TorchBackend
from zsim_torch.module.transformer import transformer as plain_transformer
from zsim_torch.text import BatchPlace, TextError, read_text

CLUSTER = Cluster(
    name="none",
    nodes=1,
    gpus_per_node=1,
    gpu=Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)
SMALL = GPT(layers=2, hidden_size=16, attention_heads=2, sequence_length=12, vocab_size=256)
PLAIN = Strategy(
    zero=Zero(stage=3), train=Train(precision=Precision.FP64, optimizer=Adam(learning_rate=3e-3))
)


LLAMA = Llama(
    layers=2,
    hidden_size=16,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=20,
    sequence_length=12,
    vocab_size=256,
)


def job(
    strategy: Strategy,
    *,
    shape: Architecture = SMALL,
    micro_batch_size: int = 1,
    steps: int = 3,
) -> Job:
    model = transformer(
        shape, micro_batch_size=micro_batch_size, precision=strategy.train.precision
    )
    schedule = make_schedule(model, strategy)
    return Job(schedule=schedule, model=model, cluster=CLUSTER, steps=steps)


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


def losses(trace: Trace) -> list[float]:
    """The mean over ranks of each step."""
    steps = zip(*(one.losses for one in trace.ranks), strict=True)
    return [sum(step) / len(step) for step in steps]


def test_the_backend_is_installed_under_its_name() -> None:
    backend: Backend = TorchBackend()
    assert load_backend("torch") is TorchBackend
    assert backend.name == "torch"


@pytest.mark.one_commit_in(9)
def test_a_text_is_learned_and_every_rank_is_in_the_trace(pool: RankPool) -> None:
    fast = PLAIN.but({"parallel.data": 2, "train.optimizer": Adam(learning_rate=1e-2)})
    trace = TorchBackend(pool=pool).run(job(fast, micro_batch_size=4, steps=8), seed=0)
    found = losses(trace)
    assert found[0] == pytest.approx(5.545, rel=0.02)  # log 256, as good as guessing
    assert found[-1] < found[0] - 0.5
    assert [one.rank for one in trace.ranks] == [0, 1]
    assert (trace.backend, trace.steps, trace.seed) == ("torch", 8, 0)
    assert list(trace.step_end_ps) == sorted(trace.step_end_ps)
    assert all(
        0 <= event.start_ps <= event.end_ps for event in trace.ranks[0].events if event.step >= 0
    )


@pytest.mark.one_commit_in(9)
def test_ranks_and_micro_batches_share_one_text_and_one_start(pool: RankPool) -> None:
    """Two ranks; one rank with two micro-batches; one rank with a wide one: the same training."""
    shared = TorchBackend(pool=pool).run(job(PLAIN.but({"parallel.data": 2})), seed=5)
    many = TorchBackend().run(job(PLAIN.but({"train.gradient_accumulation_steps": 2})), seed=5)
    wide = TorchBackend().run(job(PLAIN, micro_batch_size=2), seed=5)
    assert losses(shared) == pytest.approx(losses(many), rel=1e-12)
    assert losses(shared) == pytest.approx(losses(wide), rel=1e-12)


KINDS = (
    SMALL,
    LLAMA,
    replace(LLAMA, attention=Attention.PLAIN, recompute_attention=True, tied_embeddings=True),
    replace(SMALL, positions=Positions.ROTARY, parallel_residual=True),
    replace(SMALL, positions=Positions.ALIBI, attention=Attention.PLAIN, bias=False),
)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_every_kind_of_transformer_trains_as_a_plain_loop_does(
    pool: RankPool, shape: Architecture, checkpointing: Checkpointing
) -> None:
    strategy = PLAIN.but(
        {
            "parallel.data": 2,
            "activations.checkpointing": checkpointing,
            "zero.bucket_elements": 300,
        }
    )
    found = losses(TorchBackend(pool=pool).run(job(strategy, shape=shape), seed=5))
    module = plain_transformer(shape, dtype=torch.float64, seed=5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0)
    text = read_text(None, shape.sequence_length)
    expected: list[float] = []
    for step in range(3):
        which = BatchPlace(step=step, micro_batch=0, coordinate=0, ranks=1, size=2)
        loss = module(text.batch(which, seed=5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.one_commit_in(6)
def test_a_seed_repeats_and_another_differs(pool: RankPool) -> None:
    backend, subject = TorchBackend(pool=pool), job(PLAIN.but({"parallel.data": 2}))
    first = losses(backend.run(subject, seed=1))
    assert losses(backend.run(subject, seed=1)) == first
    assert losses(backend.run(subject, seed=2)) != first


@pytest.mark.one_commit_in(6)
def test_poison_changes_nothing_that_is_right(pool: RankPool) -> None:
    subject = job(PLAIN.but({"parallel.data": 2}))
    plain = TorchBackend(pool=pool).run(subject, seed=1)
    poisoned = TorchBackend(pool=pool, poison=True).run(subject, seed=1)
    assert losses(poisoned) == losses(plain)


@pytest.mark.one_commit_in(6)
def test_own_text_is_trained_on(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 100)
    fast = PLAIN.but({"parallel.data": 2, "train.optimizer": Adam(learning_rate=5e-2)})
    trace = TorchBackend(pool=pool, data=path).run(job(fast, steps=8), seed=0)
    assert losses(trace)[-1] < 2  # there is nothing to learn but one letter


def test_a_text_that_is_not_there_is_refused_when_the_backend_is_made(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no such file or directory"):
        TorchBackend(data=tmp_path / "missing")


def test_what_is_refused_is_not_started() -> None:
    subject = Job(
        schedule=make_schedule(equal_units(parameters=64), Strategy(zero=Zero(stage=0))),
        model=equal_units(parameters=64),
        cluster=CLUSTER,
    )
    backend = TorchBackend()
    reason = backend.refusal(subject)
    assert reason is not None
    with pytest.raises(RefusedError) as caught:
        backend.run(subject, seed=0)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Execution(operations=True), "activations.checkpointing"),
        (Execution(compiled=True), "train.compile"),
        (Execution(recipe=Float8.ROWWISE), "train.float8"),
    ],
)
def test_what_no_module_does_is_refused_by_its_field(asked: Execution, field: str) -> None:
    reason = TorchBackend().refusal(job(PLAIN, shape=replace(LLAMA, execution=asked)))
    assert reason is not None
    assert reason.startswith(f"{field}: ")


def test_a_pool_has_as_many_ranks_as_the_schedule(pool: RankPool) -> None:
    with pytest.raises(RefusedError, match=r"^ranks: the schedule is for 1, the pool has 2$"):
        TorchBackend(pool=pool).run(job(PLAIN), seed=0)


def test_a_schedule_that_runs_no_unit_needs_no_model(pool: RankPool) -> None:
    build = ScheduleBuilder.of("sum", data=2)
    data, x = build.group("data", "data"), build.buffer("x", 4, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    build.step.all_reduce("sum", data, x.all)
    subject = Job(
        schedule=build.schedule(), model=equal_units(parameters=32), cluster=CLUSTER, steps=2
    )
    trace = TorchBackend(pool=pool).run(subject, seed=0)
    for one in trace.ranks:
        assert [transfer.operation for transfer in one.transfers] == ["step/sum"] * 2
        assert one.losses == ()
