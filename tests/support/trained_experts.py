"""Small transformers with experts, trained on expert ranks and by a plain loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from exact_training import cluster
from tiny_training import Parameters
from torch import distributed
from trained_axes import PLAIN, SEED, SMALL_LLAMA, AxesCase

from zsim.backend.backend import Job
from zsim.model.architecture import Llama, Transformer
from zsim.model.experts import Experts, Scores
from zsim.model.transformer import transformer as described
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import BALANCED
from zsim.strategy.strategy import Parallel, Strategy
from zsim.trace.trace import Trace
from zsim_torch.backend import Assignment, trained_on_rank
from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.transformer import transformer
from zsim_torch.module.transformer_segment import is_of_experts
from zsim_torch.supervise.ranks import RankPool

FEW = Experts(count=4, top_k=2, intermediate_size=6)
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
    ),
}


def mixing(experts: Experts, *, balanced: bool = False) -> Llama:
    """Return a small transformer with these experts; if `balanced`, with an auxiliary loss."""
    return replace(SMALL_LLAMA, experts=replace(experts, auxiliary_loss=balanced))


def over(expert: int, data: int, made: Strategy = PLAIN, **changes: object) -> Strategy:
    """Return a strategy with ranks along the data axis, of which `expert` hold the experts."""
    zero = {f"zero.{name}": value for name, value in changes.items()}
    return made.but({"parallel": Parallel(data=data, expert=expert), **zero})


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
            tensor=1,
            precision=strategy.train.precision,
        )
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
    """What is left on a rank: its own experts, and all of the rest."""

    place: ExpertPlace
    parameters: Parameters
    losses: tuple[float, ...]
    trace: Trace


def trained_experts(pool: RankPool, case: ExpertCase) -> list[ExpertResult]:
    """Train a case on the ranks of `pool`."""
    return list(pool.run(by_rank, case, case.job()))


def by_rank(case: ExpertCase, job: Job) -> ExpertResult:
    """Train a case on this rank."""
    named = replace(job, schedule=job.written)
    work = Assignment(job=named, seed=SEED, data=None, poison=case.poison, observe=case.observe)
    trained = trained_on_rank(work)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    place = ExpertPlace.of(named.schedule, named.schedule.mesh.coordinates(rank))
    return ExpertResult(place, trained.full_parameters(), trained.losses, trained.trace)


def whole_of(case: ExpertCase, results: Sequence[ExpertResult]) -> Parameters:
    """Return every parameter in its shape: experts of all ranks, and equal copies of the rest."""
    assert isinstance(case.shape, Transformer)
    shapes = {
        name: each.shape for name, each in transformer(case.shape, seed=None).named_parameters()
    }
    found: Parameters = {}
    for name, size in shapes.items():
        made = torch.full(size, float("nan"), dtype=torch.float64)
        for result in results:
            own = result.place.own(size[0]) if is_of_experts(name) else slice(None)
            value = result.parameters[name].double().view(made[own].shape)
            known = ~made[own].isnan()
            assert torch.equal(made[own][known], value[known]), name
            made[own] = value
        assert not made.isnan().any(), name
        found[name] = made
    return found
