"""Small transformers with experts, trained on expert ranks and by a plain loop."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from exact_training import cluster
from plain_mixture import Chosen, PlainMixture, mixing_by, moved
from tiny_training import Parameters, optimizer_of_rules, values
from torch import distributed, nn
from trained_axes import PLAIN, SEED, SMALL_LLAMA, AxesCase, firsts

from zsim.backend.backend import Job
from zsim.model.architecture import Llama, Transformer
from zsim.model.experts import DropRule, Experts, LoadBalancing, Scores
from zsim.model.pipeline_stages import in_blocks
from zsim.model.transformer import transformer as described
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import BALANCED
from zsim.strategy.strategy import Parallel, Strategy
from zsim.trace.trace import Trace
from zsim_torch.backend import Assignment, trained_on_rank
from zsim_torch.feed import feed
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module import router_layer
from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.router_layer import best_experts
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.module.transformer import transformer
from zsim_torch.module.transformer_segment import is_of_experts
from zsim_torch.supervise.ranks import RankPool

Choices = Sequence[torch.Tensor]
"""Numbers of the chosen experts of each token, [tokens, choices], one tensor for each choice."""

FEW = Experts(count=4, top_k=2, intermediate_size=6, auxiliary_coefficient=0.2)
"""Four experts of six: with seven rows of a rank, some are often without any."""

MIXTURES = {
    "softmax of all": FEW,
    "softmax of the chosen, biases": replace(
        FEW, scores=Scores.SOFTMAX_OF_CHOSEN, bias=True, router_bias=True
    ),
    "sigmoids in groups, shared experts": replace(
        FEW,
        count=8,
        top_k=3,
        scores=Scores.SIGMOID,
        groups=4,
        top_groups=2,
        scaling=2.5,
        shared_intermediate_size=5,
        dense_layers=1,
    ),
    "one choice, a gate of shared experts, no loss of balance": replace(
        FEW,
        top_k=1,
        normalised=False,
        shared_intermediate_size=3,
        shared_gate=True,
        auxiliary_loss=False,
        auxiliary_coefficient=0.01,
    ),
    "losses of each sequence and of logits": replace(
        FEW, load_balancing_type=LoadBalancing.SEQ_AUX_LOSS, z_loss=True, z_coefficient=0.05
    ),
    "a loss of all ranks and micro-batches": replace(
        FEW, load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS
    ),
    "biases of sigmoids": replace(FEW, scores=Scores.SIGMOID, score_bias=True, bias_rate=0.05),
    "a capacity, biases of softmax": replace(
        FEW, capacity_factor=1.25, score_bias=True, bias_rate=0.05
    ),
    "a capacity by position": replace(
        FEW, capacity_factor=1.0, drop_policy=DropRule.POSITION, normalised=False
    ),
    "a capacity with padding": replace(
        FEW, capacity_factor=1.25, pads_to_capacity=True, shared_intermediate_size=5
    ),
}


def mixing(experts: Experts, layers: int = 3) -> Llama:
    """Return a small transformer with these experts."""
    return replace(SMALL_LLAMA, experts=experts, layers=layers)


def over(
    expert: int,
    data: int,
    made: Strategy = PLAIN,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    **changes: object,
) -> Strategy:
    """Return a strategy with ranks along these axes, of which `expert` hold the experts."""
    zero = {f"zero.{name}": value for name, value in changes.items()}
    parallel = Parallel(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=1 if tensor > 1 else None,
    )
    return made.but({"parallel": parallel, **zero})


@dataclass(frozen=True, slots=True)
class ExpertCase(AxesCase):
    """Which experts to train on which ranks.

    A rank has room for `most` times the mean of its rows, by default for any number.
    """

    most: float | None = None

    @cache  # noqa: B019  # cases are few
    def job(self) -> Job:
        strategy, shape = self.strategy, self.shape
        assert isinstance(shape, Transformer)
        model = described(
            replace(shape, execution=strategy.execution),
            micro_batch_size=self.micro_batch_size,
            tensor=strategy.parallel.tensor,
            precision=strategy.train.precision,
            sequence=strategy.cuts_tokens,
        )
        if strategy.parallel.pipeline > 1:
            model = in_blocks(model)
        if model.routing is not None:
            most = self.most or float(strategy.parallel.expert)
            model = replace(model, routing=model.routing.limited(most))
        named = make_schedule(model, strategy)
        job = Job(schedule=named, model=model, cluster=cluster(strategy.ranks), steps=self.steps)
        if not named.counts:
            return job
        return replace(job, schedule=bound(named, BALANCED).schedule, named=named, binding=BALANCED)


@dataclass(frozen=True, slots=True)
class ExpertResult:
    """What is left on a rank: its own experts, and its tensor part of the rest."""

    place: ExpertPlace
    tensor: TensorPlace
    parameters: Parameters
    losses: tuple[float, ...]
    trace: Trace
    routed: Choices


def trained_experts(
    pool: RankPool, case: ExpertCase, replay: Sequence[Choices] | None = None
) -> list[ExpertResult]:
    """Train a case on the ranks of `pool`; `replay` has the choices of each rank's routers."""
    return list(pool.run(by_rank, case, case.job(), replay))


@contextmanager
def choices(replay: Choices | None) -> Generator[Choices]:
    """Record the choices of routers on this rank; if given, `replay` decides them."""
    found: list[torch.Tensor] = []

    def best(experts: Experts, ranked: torch.Tensor) -> torch.Tensor:
        own = best_experts(experts, ranked) if replay is None else replay[len(found)]
        found.append(own)
        return own

    with patch.object(router_layer, "best_experts", best):
        yield found


def by_rank(case: ExpertCase, job: Job, replay: Sequence[Choices] | None = None) -> ExpertResult:
    """Train a case on this rank."""
    named = replace(job, schedule=job.written)
    work = Assignment(job=named, seed=SEED, data=None, poison=case.poison, observe=case.observe)
    own = None if replay is None else replay[distributed.get_rank()]
    with choices(own) as routed:
        trained = trained_on_rank(work)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    coordinates = named.schedule.mesh.coordinates(rank)
    place = ExpertPlace.of(named.schedule, coordinates)
    tensor = TensorPlace.of(named.schedule, coordinates)
    return ExpertResult(
        place, tensor, trained.full_parameters(), trained.losses, trained.trace, routed
    )


class PlainTraining(NamedTuple):
    """Parameters before and after, and the loss of each step without losses of routers.

    `routed` has what routers chose, by rank, in the order of steps, micro-batches and blocks.
    """

    before: Parameters
    after: Parameters
    losses: tuple[float, ...]
    routed: Sequence[Sequence[Chosen]]

    def choices(self, experts: Experts) -> list[Choices]:
        """Return the numbers of the chosen experts of each token, by rank."""
        return [[each.chosen.topk(experts.top_k, 1).indices for each in own] for own in self.routed]


class Flip(NamedTuple):
    """A token that a rank sends to other experts, and how close their scores are.

    `place` counts the choices of the rank's routers.
    """

    rank: int
    place: int
    token: int
    margin: float


def flips(plain: PlainTraining, results: Sequence[ExpertResult]) -> Iterator[Flip]:
    """Yield the tokens whose experts differ, with the largest difference of exchanged scores."""
    for rank, (known, result) in enumerate(zip(plain.routed, results, strict=True)):
        for place, (one, other) in enumerate(zip(known, result.routed, strict=True)):
            won = torch.zeros_like(one.chosen).scatter(1, other, 1) - one.chosen
            lost = torch.where(won < 0, one.scores, 0).amax(1)
            least = torch.where(won > 0, one.scores, 1).amin(1)
            for token in won.any(1).nonzero().flatten().tolist():
                yield Flip(rank, place, token, float((lost - least)[token].detach()))


def by_plain_mixtures(case: ExpertCase) -> PlainTraining:
    """Train in one process, with mixtures by their definition."""
    strategy, job, shape = case.strategy, case.job(), case.shape
    assert isinstance(shape, Transformer)
    shape = replace(shape, execution=strategy.execution)
    module = transformer(shape, dtype=TORCH_DTYPE[strategy.train.precision.optimizer], seed=SEED)
    before = values(module)
    optimizer = optimizer_of_rules(strategy, module)
    times = strategy.train.gradient_accumulation_steps
    feeds = [feed(job, rank, data=None, seed=SEED) for rank in firsts(job.schedule.mesh)]
    losses: list[float] = []
    routed: list[list[Chosen]] = [[] for _ in feeds]
    for _ in range(case.steps):
        batches = [[next(each) for each in feeds] for _ in range(times)]
        loss, forwards = _plain_step(case, module, optimizer, batches)
        losses.append(loss)
        for number, plain in enumerate(forwards):
            routed[number % len(feeds)] += [made for (made,) in plain.noted.values()]
    return PlainTraining(before, values(module), tuple(losses), routed)


def _plain_step(
    case: ExpertCase,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[torch.Tensor]],
) -> tuple[float, list[PlainMixture]]:
    """Train a step on the batches of each micro-batch and rank.

    Return the mean loss, and the mixtures of all forwards in the same order.
    """
    shape = case.shape
    assert isinstance(shape, Transformer)
    assert shape.experts is not None
    optimizer.zero_grad()
    count = sum(map(len, batches))
    strategy = case.strategy
    parts = strategy.parallel.tensor if strategy.execution.own_loads else 1
    earlier: list[PlainMixture] = []
    total = 0.0
    for of_ranks in batches:
        made: list[tuple[PlainMixture, torch.Tensor]] = []
        for batch in of_ranks:
            plain = PlainMixture(shape, parts)
            with mixing_by(plain):
                made.append((plain, module(batch)))
        now = [plain for plain, _ in made]
        every = [loss + plain.losses(earlier, now) for plain, loss in made]
        (torch.stack(every).sum() / count).backward()  # type: ignore[no-untyped-call]
        total += sum(float(loss.detach()) for _, loss in made) / count
        earlier += now
    if case.strategy.train.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), case.strategy.train.clip_norm)
    optimizer.step()
    _move_biases(shape.experts, earlier)
    return total, earlier


@torch.no_grad()
def _move_biases(experts: Experts, forwards: Sequence[PlainMixture]) -> None:
    """Update the biases of experts from the rows of all forwards of a step."""
    loads = [plain.loads() for plain in forwards]
    for block in loads[0]:
        bias = dict(block.named_parameters()).get("router.score_bias")
        if bias is not None:
            load = torch.stack([each[block] for each in loads]).sum(0)
            bias.copy_(moved(experts, bias, load))


def whole_of(case: ExpertCase, results: Sequence[ExpertResult]) -> Parameters:
    """Return every parameter in its shape: experts of all ranks, and equal copies of the rest."""
    assert isinstance(case.shape, Transformer)
    shape = replace(case.shape, execution=case.strategy.execution)
    shapes = {name: each.shape for name, each in transformer(shape, seed=None).named_parameters()}
    found: Parameters = {}
    for name, size in shapes.items():
        # places of elements in the whole, cut as the values are; 0 is padding of a table
        numbers = torch.arange(1, size.numel() + 1, dtype=torch.float64).view(size)
        made = torch.full((size.numel() + 1,), float("nan"), dtype=torch.float64)
        for result in results:
            own = result.tensor.part(case.shape, name, numbers)
            if is_of_experts(name):
                own = numbers[result.place.own(size[0])]
            places = own.flatten().long()
            value, before = result.parameters[name].double().flatten(), made[places]
            known = ~before.isnan() & (places > 0)
            assert torch.equal(before[known], value[known]), name
            made[places] = value
        assert not made[1:].isnan().any(), name
        found[name] = made[1:].view(size)
    return found
