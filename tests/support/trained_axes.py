"""Small transformers trained on ranks with tensor and pipeline axes, and by a plain loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from exact_training import cluster
from tiny_training import Parameters, optimizer_of_rules, values
from torch import distributed

from zsim.backend.backend import Job
from zsim.model.architecture import GPT, Architecture, Llama
from zsim.model.pipeline_stages import in_blocks
from zsim.model.transformer import transformer as described
from zsim.runtimes.registry import make_schedule
from zsim.schedule.mesh import Mesh
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.execution import ContextExchange
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron, TensorMode
from zsim_torch.backend import Assignment, trained_on_rank
from zsim_torch.feed import feed
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.module.transformer import transformer
from zsim_torch.supervise.ranks import RankPool

SEED = 3

SMALL_GPT = GPT(layers=2, hidden_size=8, attention_heads=4, sequence_length=6, vocab_size=11)
"""Its vocabulary is padded on 2 and on 4 ranks."""
TIED_GPT: Architecture = replace(
    SMALL_GPT, tied_embeddings=True, parallel_residual=True, joined_qkv=False
)
SMALL_LLAMA = Llama(
    layers=3,
    hidden_size=8,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=12,
    sequence_length=6,
    vocab_size=11,
)
DEEP_LLAMA = replace(SMALL_LLAMA, layers=5)
WIDE_GPT = replace(SMALL_GPT, vocab_size=160)
"""Its head has more elements than its blocks, so of four stages one has the loss alone."""

PLAIN = Strategy(
    zero=Zero(stage=0),
    train=Train(
        gradient_accumulation_steps=2,
        precision=Precision.FP64,
        optimizer=Adam(learning_rate=0.01, epsilon=1e-5),
    ),
)
NANOTRON = PLAIN.but(
    {
        "zero.emulate": Nanotron(),
        "train.precision": Precision.FP32,
        "train.gradient_accumulation_steps": 3,
    }
)
MEGATRON = PLAIN.but(
    {"zero.stage": 1, "zero.emulate": Megatron(), "train.precision": Precision.FP32}
)
OF_TOKENS = PLAIN.but({"zero.sequence_parallel": True})
MEGATRON_OF_TOKENS = MEGATRON.but({"zero.emulate": Megatron(sequence_parallel=True)})
FSDP2_OF_TOKENS = PLAIN.but(
    {"zero.stage": 3, "zero.emulate": FSDP2(), "train.precision": Precision.FP32}
)
"""Hidden states cut by tokens, which is the default there."""
FSDP2_OF_STAGES = FSDP2_OF_TOKENS.but(
    {"zero.emulate": FSDP2(reshard_after_forward=False), "train.gradient_accumulation_steps": 4}
)
CUT = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
KEPT = CUT.but(tp_recompute_allgather=False)
FULL = {"activations": Activations(checkpointing=Checkpointing.FULL)}
EVERY_SECOND = {"activations": Activations(checkpointing=Checkpointing.FULL, every_nth=2)}
PARTITIONED = {"activations": Activations(checkpointing=Checkpointing.FULL, partition=True)}


def on(
    made: Strategy, data: int = 1, tensor: int = 1, pipeline: int = 1, **more: object
) -> Strategy:
    """`made` on ranks along these axes, with other fields of ZeRO and of training."""
    changes: dict[str, object] = {
        "parallel": Parallel(data=data, tensor=tensor, pipeline=pipeline),
    }
    for name, value in more.items():
        changes[f"{'train' if name == 'clip_norm' else 'zero'}.{name}"] = value
    return made.but(changes)


BESIDE = on(
    MEGATRON,
    tensor=2,
    emulate=Megatron(
        sequence_parallel=True, tp_comm_overlap=True, gradient_accumulation_fusion=True
    ),
    clip_norm=0.1,
)
"""Linear layers beside collectives of their tokens."""
SUMMED_BESIDE = on(
    MEGATRON,
    tensor=2,
    emulate=Megatron(async_tensor_model_parallel_allreduce=True),
    clip_norm=0.1,
)
SCATTERED_BESIDE = SUMMED_BESIDE.but(
    {"zero.emulate": Megatron(async_tensor_model_parallel_allreduce=True, sequence_parallel=True)}
)
"""Gradients of what column-parallel layers read beside those of weights."""


SUMMED_IN_FP32 = on(
    MEGATRON.but({"train.precision": Precision.BF16}),
    data=2,
    emulate=Megatron(allreduce_in_float32=True, allreduce_bucket_size=1000),
    clip_norm=0.1,
)
"""Gradients in bf16 that are summed whole."""


def sharing(made: Strategy, data: int, context: int, **zero: object) -> Strategy:
    """`made` on ranks that share sequences, and gather each other's keys and values."""
    changes: dict[str, object] = {
        "parallel": Parallel(
            data=data, context=context, context_exchange=ContextExchange.ALL_GATHER
        )
    }
    return made.but(changes | {f"zero.{name}": value for name, value in zero.items()})


@dataclass(frozen=True, slots=True)
class AxesCase:
    """What to train on which axes, and for how long."""

    shape: Architecture
    strategy: Strategy
    micro_batch_size: int = 2
    steps: int = 2
    poison: bool = False
    witness: bool = False
    observe: bool = True

    @cache  # noqa: B019  # cases are few, and tests ask for what their ranks follow, too
    def job(self) -> Job:
        strategy, shape = self.strategy, self.shape
        if strategy.parallel.context > 1 or strategy.execution.splits:
            shape = replace(shape, execution=strategy.execution)
        model = described(
            shape,
            micro_batch_size=self.micro_batch_size,
            tensor=strategy.parallel.tensor,
            precision=strategy.train.precision,
            sequence=strategy.cuts_tokens,
            keeps_gathered=strategy.keeps_gathered,
            in_place_loss=strategy.in_place_loss,
        )
        if strategy.parallel.pipeline > 1:
            model = in_blocks(model)
        made = make_schedule(model, strategy)
        return Job(schedule=made, model=model, cluster=cluster(strategy.ranks), steps=self.steps)


BESIDE_PRODUCTS = {
    f"Megatron-LM, tensor 2, {name}": AxesCase(
        replace(shape, execution=beside.execution), beside, witness=True
    )
    for name, shape, beside in (
        ("products beside collectives of tokens", SMALL_LLAMA, BESIDE),
        ("gradients summed beside products", SMALL_GPT, SUMMED_BESIDE),
        ("gradients scattered beside products", SMALL_LLAMA, SCATTERED_BESIDE),
    )
}
"""Tensor ranks of Megatron-LM whose products run beside collectives."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What is left on a rank: of what the tensor axis cuts its part."""

    place: TensorPlace
    parameters: Parameters
    losses: tuple[float, ...]
    trace: Trace


class HasPart(Protocol):
    """What a rank has of each parameter, and its place along the tensor axis."""

    @property
    def place(self) -> TensorPlace: ...

    @property
    def parameters(self) -> Parameters: ...


def trained_on_axes(pool: RankPool, cases: Sequence[AxesCase]) -> list[list[RankResult]]:
    """Train case after case on the ranks of `pool`, by jobs that are made here, once.

    Return the results of every rank for each case.
    """
    by_number = pool.run(by_ranks, [*cases], [case.job() for case in cases])
    return [list(results) for results in zip(*by_number, strict=True)]


def by_ranks(cases: list[AxesCase], jobs: list[Job]) -> list[RankResult]:
    """Train case after case on this rank of one process group."""
    return [by_rank(*each) for each in zip(cases, jobs, strict=True)]


def by_rank(case: AxesCase, job: Job) -> RankResult:
    """Train a case on this rank."""
    work = Assignment(
        job=job,
        seed=SEED,
        data=None,
        poison=case.poison,
        witness=case.witness,
        observe=case.observe,
    )
    trained = trained_on_rank(work)
    place = place_of(job.schedule)
    return RankResult(place, trained.full_parameters(), trained.losses, trained.trace)


def place_of(schedule: Schedule) -> TensorPlace:
    """Where this rank is along the tensor axis."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return TensorPlace.of(schedule, schedule.mesh.coordinates(rank))


def whole(case: AxesCase, results: Sequence[HasPart]) -> Parameters:
    """Every parameter in its shape, from the parts of ranks: where they have copies, all equal."""
    shape = case.shape
    shapes = {name: each.shape for name, each in transformer(shape, seed=None).named_parameters()}
    found: Parameters = {}
    for name, size in shapes.items():
        # Where each element of the whole lies in the parts: numbered, and cut as the values are.
        numbers = torch.arange(1, size.numel() + 1, dtype=torch.float64).view(size)
        made = torch.full((size.numel() + 1,), float("nan"), dtype=torch.float64)
        for result in results:
            places = result.place.part(shape, name, numbers).flatten().long()
            values_there = result.parameters[name].double().flatten()
            before = made[places]
            known = ~before.isnan() & (places > 0)
            assert torch.equal(before[known], values_there[known]), name
            made[places] = values_there
        assert not made[1:].isnan().any(), name
        found[name] = made[1:].view(size)
    return found


def firsts(mesh: Mesh) -> list[int]:
    """Ranks of the first stage, the first of the tensor axis, one for each replica."""
    return [
        rank
        for rank in range(mesh.size)
        if not any(mesh.coordinates(rank).get(axis) for axis in ("pipeline", "tensor"))
    ]


def by_plain_loop(case: AxesCase) -> tuple[Parameters, Parameters, tuple[float, ...]]:
    """One process, the whole batch: parameters before and after, and the mean loss of each step."""
    strategy, job = case.strategy, case.job()
    module = transformer(
        case.shape, dtype=TORCH_DTYPE[strategy.train.precision.optimizer], seed=SEED
    )
    before = values(module)
    optimizer = optimizer_of_rules(strategy, module)
    count = strategy.replicas * strategy.train.gradient_accumulation_steps
    feeds = [feed(job, rank, data=None, seed=SEED) for rank in firsts(job.schedule.mesh)]
    losses: list[float] = []
    for _ in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for source in feeds:
            for _ in range(strategy.train.gradient_accumulation_steps):
                loss = module(next(source))
                loss.backward()
                total += float(loss.detach()) / count
        for parameter in module.parameters():  # routers add gradients that no loss has
            if parameter.grad is not None:
                parameter.grad /= count
        if strategy.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), strategy.train.clip_norm)
        optimizer.step()
        losses.append(total)
    return before, values(module), tuple(losses)
