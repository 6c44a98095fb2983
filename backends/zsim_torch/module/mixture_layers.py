"""Routed and shared experts in place of an MLP, with the names of `zsim.model.transformer`.

As in `grouped_mm_experts_forward` (transformers 5, integrations/moe.py), weights of choices
multiply the outputs of experts. Each expert is one product after the other.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Transformer
from zsim.model.experts import Experts, RouterFormat, Scores
from zsim_torch.module.routed_rows import in_order, sums_of_rows

BALANCE: Final = 0.01
"""Coefficient of the auxiliary loss of routers (Fedus et al. 2021, "Switch Transformers", section
2.2)."""


class ChosenExperts(NamedTuple):
    """Experts of each token, and their weights, both [tokens, choices]."""

    experts: Tensor
    weights: Tensor


class _Balanced(torch.autograd.Function):
    """Return scores unchanged; backward adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, slope: Tensor) -> Tensor:  # noqa: ANN401  (torch's own)
        """Return `scores`; `slope` is the gradient of the loss for the scores of each token."""
        ctx.save_for_backward(slope)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Return the gradient of the scores."""
        (slope,) = ctx.saved_tensors
        return gradients[0] + slope, None


def _with_balance(experts: Experts, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return `scores` whose gradient includes that of the loss for the balance of this rank.

    The loss is `BALANCE` x experts x the sum of f x P, where f is the share of the choices and P
    the mean score of an expert (Fedus et al. 2021, equation 4).
    """
    share = torch.bincount(chosen.reshape(-1), minlength=experts.count) / chosen.numel()
    slope = BALANCE * experts.count * share / len(scores)
    made: Tensor = _Balanced.apply(scores, slope.to(scores.dtype).expand_as(scores))  # type: ignore[no-untyped-call]
    return made


def choose(experts: Experts, logits: Tensor) -> ChosenExperts:
    """Return the experts of each token and their weights, from the logits [tokens, experts]."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    sigmoid = experts.scores is Scores.SIGMOID
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    with torch.no_grad():
        chosen = _among_groups(experts, scores).topk(experts.top_k, -1).indices
    if experts.auxiliary_loss:
        shares = scores / scores.sum(-1, keepdim=True) if sigmoid else scores
        balanced = _with_balance(experts, shares, chosen)
        scores = balanced * scores.sum(-1, keepdim=True) if sigmoid else balanced
    weights = scores.gather(1, chosen)
    if experts.normalised or experts.scores is Scores.SOFTMAX_OF_CHOSEN:
        weights = weights / weights.sum(-1, keepdim=True)
    return ChosenExperts(chosen, weights * experts.scaling)


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
    """The product of a router, and the choice of experts."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        self.experts = experts = shape.experts
        self.weight = nn.Parameter(torch.empty(experts.count, shape.hidden_size, dtype=dtype))
        self.bias = None
        if experts.router_bias:
            self.bias = nn.Parameter(torch.empty(experts.count, dtype=dtype))

    def forward(self, tokens: Tensor) -> ChosenExperts:
        """Return the choice of experts for `tokens` [tokens, hidden size]."""
        operands = [tokens, self.weight, self.bias]
        if self.experts.router_format is RouterFormat.FP32 and tokens.dtype is not torch.float64:
            operands = [None if each is None else each.float() for each in operands]
        read, weight, bias = operands
        assert read is not None
        assert weight is not None
        return choose(self.experts, functional.linear(read, weight, bias))


class _Stack(nn.Module):
    """Matrices of experts as one tensor, with biases if there are any, without a forward."""

    def __init__(
        self, count: int, rows: int, columns: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(count, rows, dtype=dtype)) if bias else None


class RoutedExperts(nn.Module):
    """The `count` experts of a rank."""

    def __init__(self, shape: Transformer, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        inner, bias = shape.experts.intermediate_size, shape.experts.bias
        self.count = count
        self.gate_up = _Stack(count, 2 * inner, shape.hidden_size, dtype, bias=bias)
        self.down = _Stack(count, shape.hidden_size, inner, dtype, bias=bias)

    def forward(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the weighted outputs for `rows`, each of one of this rank's `experts`."""
        found = in_order(experts, self.count)
        sorted_rows = rows[found.order]
        made = [
            self._of_expert(expert, part)
            for expert, part in enumerate(torch.split(sorted_rows, found.counts.tolist()))
            if len(part)
        ]
        back = torch.empty_like(found.order)
        back[found.order] = torch.arange(len(back), device=back.device)
        outputs = torch.cat(made)[back] if made else rows
        return (outputs * weights[:, None]).to(rows.dtype)

    def _of_expert(self, expert: int, rows: Tensor) -> Tensor:
        (wide, wide_bias), (down, down_bias) = (
            (each.weight[expert], None if each.bias is None else each.bias[expert])
            for each in (self.gate_up, self.down)
        )
        gate, up = functional.linear(rows, wide, wide_bias).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, down, down_bias)


class SharedExperts(nn.Module):
    """The MLP that all tokens run through, which may have a gate."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        hidden, wide = shape.hidden_size, shape.experts.shared_intermediate_size
        self.gate = nn.Linear(hidden, wide, bias=False, dtype=dtype)
        self.up = nn.Linear(hidden, wide, bias=False, dtype=dtype)
        self.down = nn.Linear(wide, hidden, bias=False, dtype=dtype)
        self.score = None
        if shape.experts.shared_gate:
            self.score = nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the output for `tokens`."""
        made: Tensor = self.down(functional.silu(self.gate(tokens)) * self.up(tokens))
        return made if self.score is None else made * self.score(tokens).sigmoid()


def add_mixture(part: nn.Module, shape: Transformer, dtype: torch.dtype) -> None:
    """Add router, experts and shared experts to `part`, a block that holds all experts."""
    experts = shape.experts
    assert experts is not None
    part.add_module("router", RouterLayer(shape, dtype))
    part.add_module("experts", RoutedExperts(shape, experts.count, dtype))
    if experts.shared_intermediate_size:
        part.add_module("shared", SharedExperts(shape, dtype))


def mixed(part: nn.Module, shape: Transformer, normed: Tensor) -> Tensor:
    """Return the output of the mixture of `part`, which holds all experts."""
    experts = shape.experts
    assert experts is not None
    tokens = normed.flatten(0, -2)
    choice = part.get_submodule("router")(tokens)
    rows = in_order(choice.experts, experts.count)
    copies, weights = permuted(tokens, choice, rows.order)
    own = torch.arange(experts.count, device=tokens.device).repeat_interleave(rows.counts)
    outputs = part.get_submodule("experts")(copies, weights, own)
    made = sums_of_rows(outputs, rows.order, experts.top_k)
    if experts.shared_intermediate_size:
        made = made + part.get_submodule("shared")(tokens)
    return made.view(normed.shape)


def permuted(tokens: Tensor, choice: ChosenExperts, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the copies of `tokens` and their weights in the order of experts."""
    return tokens[order // choice.experts.shape[1]], choice.weights.reshape(-1)[order]
