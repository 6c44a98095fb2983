"""Auxiliary losses of routers: sums over the tokens of a rank, and the losses of these sums.

`zsim.model.transformer.router_losses` describes these segments. The loss of balance is
coefficient x experts x the sum of f x P, with the share f of the choices and the mean score P of
each expert (Fedus et al. 2021, "Switch Transformers", equation 4). Ranks that share sequences have
summed the choices before, so f is that of all their tokens; P is a summand of this rank. The loss
of each sequence apart is the mean over sequences (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
For the global loss, f is that of all ranks and micro-batches so far (Qiu et al. 2025).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zsim.model.architecture import Transformer
from zsim.model.experts import Experts, LoadBalancing, Scores


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """Sums over the tokens of each sequence; each sequence has `length` tokens.

    The first token of this rank is number `first` of a micro-batch. With `together`, all tokens are
    one sequence.
    """

    length: int
    first: int = 0
    sequences: int | None = None
    together: bool = True

    @classmethod
    def of(
        cls, shape: Transformer, *, first: int = 0, sequences: int | None = None
    ) -> "SequenceSums":
        """Return the sums for the auxiliary loss of `shape`.

        Without a number of `sequences`, the rank has whole sequences.
        """
        assert shape.experts is not None
        apart = shape.experts.load_balancing_type is LoadBalancing.SEQ_AUX_LOSS
        return cls(shape.sequence_length, first, sequences, together=not apart)

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sums of `rows` [tokens, columns], flat, one sequence after the other."""
        if self.together:
            return rows.sum(0)
        count = self.sequences or len(rows) // self.length
        places = torch.arange(self.first, self.first + len(rows), device=rows.device)
        made = rows.new_zeros(count, rows.shape[1])
        return made.index_add(0, places // self.length, rows).flatten()


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Sums of a router over the tokens of this rank, which its losses and its bias read."""

    experts: Experts
    sums: SequenceSums

    def balance(self, chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of scores and the choices of each expert for the loss of balance.

        Choices are the best scores, without biases and groups (DeepSeek-AI 2024, "DeepSeek-V3",
        equation 18; `compute_routing_scores_for_aux_loss` of megatron/core/transformer/moe in
        August 2026, d98e8a64).
        """
        experts = self.experts
        shares = scores
        if experts.scores is Scores.SIGMOID:
            shares = scores / scores.sum(-1, keepdim=True)
        if experts.score_bias or experts.groups != experts.top_groups:
            chosen = scores.detach().topk(experts.top_k, -1).indices
        return self.sums.sum(shares), self.sums.sum(self._map(chosen))

    def _map(self, chosen: Tensor) -> Tensor:
        """Return 1 for each choice of a token, and 0 for all other experts."""
        made = torch.zeros(len(chosen), self.experts.count, dtype=torch.int64, device=chosen.device)
        return made.scatter_(1, chosen, 1)

    def sizes(self, logits: Tensor) -> Tensor:
        """Return the mean square of the logarithms of the sums of exponents of logits."""
        return logits.logsumexp(-1).square().mean()


def balance_loss(experts: Experts, summed: Tensor, load: Tensor, *, tokens: int) -> Tensor:
    """Return the loss of balance, from sums of scores and choices, of `tokens` of a micro-batch."""
    loads = load.view(-1, experts.count).to(summed.dtype)
    # without loads of other ranks, a rank may have no token of a sequence
    shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
    means = summed.view(loads.shape) * (len(loads) / tokens)
    factor = experts.auxiliary_coefficient * experts.count / len(loads)
    return factor * (shares * means).sum()


def z_loss(experts: Experts, sizes: Tensor, *, ranks: int = 1) -> Tensor:
    """Return the loss of the size of logits on one of the `ranks` that share a micro-batch.

    It is the mean square of the logarithms of sums of exponents (Zoph et al. 2022, "ST-MoE",
    equation 5).
    """
    return sizes.mean() * (experts.z_coefficient / ranks)


class _WithLoss(torch.autograd.Function):
    """Return weights unchanged; backward adds the gradient of a loss, which has the factor 1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:  # noqa: ANN401  (torch's own)
        """Return `weights`."""
        ctx.size = loss.shape
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401  (torch's own)
        """Return the gradients of the weights and of the loss."""
        return gradients[0], gradients[0].new_ones(ctx.size)


def with_loss(weights: Tensor, loss: Tensor) -> Tensor:
    """Return `weights`, whose backward also computes the gradient of `loss`."""
    made: Tensor = _WithLoss.apply(weights, loss)  # type: ignore[no-untyped-call]
    return made


class LossSegment(nn.Module):
    """An auxiliary loss of a router."""


class BalanceSegment(LossSegment):
    """The loss of balance of a router, after ranks have summed the choices of experts."""

    def __init__(self, experts: Experts, tokens: int) -> None:
        super().__init__()
        self.experts, self.tokens = experts, tokens

    def forward(self, summed: Tensor, load: Tensor) -> Tensor:
        """Return the loss."""
        return balance_loss(self.experts, summed, load, tokens=self.tokens)


class LogitSegment(LossSegment):
    """The loss of the size of logits of a router."""

    def __init__(self, experts: Experts, ranks: int) -> None:
        super().__init__()
        self.experts, self.ranks = experts, ranks

    def forward(self, sizes: Tensor) -> Tensor:
        """Return the loss."""
        return z_loss(self.experts, sizes, ranks=self.ranks)
