"""The router of a mixture: its product, the choice of experts, and its auxiliary losses.

Kernels of a router include its losses, unless they are segments (`router_losses`). Then the segment
of the router also returns the sums that these read.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Transformer
from zsim.model.experts import Experts, RouterFormat, Scores
from zsim_torch.module.auxiliary_loss import (
    RouterSums,
    SequenceSums,
    balance_loss,
    with_loss,
    z_loss,
)
from zsim_torch.module.routed_rows import SentRows


class ChosenExperts(NamedTuple):
    """Experts of each token, and their weights, both [tokens, choices]."""

    experts: Tensor
    weights: Tensor


class Routed(NamedTuple):
    """The choice of experts, and the logits and scores [tokens, experts] behind it."""

    choice: ChosenExperts
    logits: Tensor
    scores: Tensor


def choose(experts: Experts, logits: Tensor, bias: Tensor | None = None) -> Routed:
    """Return the experts of each token and their weights, from the logits [tokens, experts].

    A `bias` of each expert is added to scores for the choice alone.
    """
    wide = logits if logits.dtype is torch.float64 else logits.float()
    scores = wide.sigmoid() if experts.scores is Scores.SIGMOID else wide.softmax(-1)
    chosen = best_experts(experts, scores if bias is None else scores + bias)
    weights = scores.gather(1, chosen)
    if experts.normalised or experts.scores is Scores.SOFTMAX_OF_CHOSEN:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routed(ChosenExperts(chosen, weights * experts.scaling), wide, scores)


@torch.no_grad()
def best_experts(experts: Experts, ranked: Tensor) -> Tensor:
    """Return the experts with the largest values in each row of `ranked`, among the best groups."""
    return _among_groups(experts, ranked).topk(experts.top_k, -1).indices


def _among_groups(experts: Experts, scores: Tensor) -> Tensor:
    """Return scores, minus infinity outside the best groups of experts of each token.

    The score of a group is its best one, or the sum of its best two with sigmoids (DeepSeek-AI
    2024, "DeepSeek-V2", section 2.1.3, and "DeepSeek-V3", section 2.1.2).
    """
    if experts.groups == experts.top_groups:
        return scores
    grouped = scores.view(len(scores), experts.groups, -1)
    best = min(2 if experts.scores is Scores.SIGMOID else 1, grouped.shape[2])
    groups = grouped.topk(best, -1).values.sum(-1).topk(experts.top_groups, -1).indices
    kept = torch.zeros(len(scores), experts.groups, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, groups, value=True)
    return grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


class RouterLayer(nn.Module):
    """The product of a router, and the choice of experts.

    `sums` are the sums that auxiliary losses read. If losses are `apart`, other segments compute
    them; otherwise the weights of experts pass their gradients on. Of the tokens of a micro-batch,
    each of `ranks` has an equal part.
    """

    def __init__(
        self,
        shape: Transformer,
        dtype: torch.dtype,
        sums: SequenceSums | None = None,
        *,
        apart: bool = False,
        ranks: int = 1,
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        self.experts = experts = shape.experts
        self.sums = RouterSums(experts, sums or SequenceSums.of(shape))
        self.apart, self.ranks = apart, ranks
        self.weight = nn.Parameter(torch.empty(experts.count, shape.hidden_size, dtype=dtype))
        self.bias = self.score_bias = None
        if experts.router_bias:
            self.bias = nn.Parameter(torch.empty(experts.count, dtype=dtype))
        if experts.score_bias and not shape.execution.own_loads:
            kept = torch.empty(experts.count, dtype=torch.float32)
            self.score_bias = nn.Parameter(kept, requires_grad=False)

    def forward(self, tokens: Tensor) -> Routed:
        """Return the choice of experts for `tokens` [tokens, hidden size]."""
        operands = [tokens, self.weight, self.bias]
        if self.experts.router_format is RouterFormat.FP32 and tokens.dtype is not torch.float64:
            operands = [None if each is None else each.float() for each in operands]
        read, weight, bias = operands
        assert read is not None
        assert weight is not None
        routed = choose(self.experts, functional.linear(read, weight, bias), self.score_bias)
        return routed if self.apart else self._with_losses(routed)

    def sums_of(self, routed: Routed, rows: SentRows) -> dict[str, Tensor]:
        """Return the sums that losses and the update of the bias read, by the names of values.

        Losses count choices before rows are dropped, biases after it (`routing` of
        megatron/core/transformer/moe/router.py in August 2026, d98e8a64).
        """
        experts, found = self.experts, dict[str, Tensor]()
        if self.apart and experts.auxiliary_loss:
            summed, load = self.sums.balance(routed.choice.experts, routed.scores)
            found |= {"auxiliary/scores": summed, "auxiliary/load": load}
        if self.apart and experts.z_loss:
            found["z/sum"] = self.sums.sizes(routed.logits)
        if self.score_bias is not None:
            found["load"] = rows.counts
        return found

    def _with_losses(self, routed: Routed) -> Routed:
        """Return the choice with weights that pass the gradients of all auxiliary losses on."""
        experts, (choice, logits, scores) = self.experts, routed
        weights = choice.weights
        if experts.auxiliary_loss:
            summed, load = self.sums.balance(choice.experts, scores)
            loss = balance_loss(experts, summed, load, tokens=len(scores) * self.ranks)
            weights = with_loss(weights, loss)
        if experts.z_loss:
            sizes = self.sums.sizes(logits)
            weights = with_loss(weights, z_loss(experts, sizes, ranks=self.ranks))
        return Routed(choice._replace(weights=weights), logits, scores)
