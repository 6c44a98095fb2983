"""Routed and shared experts in place of an MLP, with the names of `zsim.model.transformer`.

As in `grouped_mm_experts_forward` (transformers 5, integrations/moe.py), weights of choices
multiply the outputs of experts. Each expert is one product after the other.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Transformer
from zsim_torch.module.routed_rows import SentRows, in_order, limited, sums_of_rows
from zsim_torch.module.router_layer import ChosenExperts, RouterLayer


class _Stack(nn.Module):
    """Matrices of experts as one tensor, with biases if there are any, without a forward."""

    def __init__(
        self, count: int, rows: int, columns: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(count, rows, dtype=dtype)) if bias else None


def splits_gate(shape: Transformer) -> bool:
    """Return True if gates and other inner layers of experts are separate parameters.

    They are where weights stay at the source (`GroupedExperts` of torchtitan in August 2026,
    b5bcd76c, torchtitan/models/common/moe.py).
    """
    execution, experts = shape.execution, shape.experts
    assert experts is not None
    return execution.expert > 1 and execution.weighs_at_source and not experts.bias


class RoutedExperts(nn.Module):
    """The `count` experts of a rank."""

    def __init__(self, shape: Transformer, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        inner, bias = shape.experts.intermediate_size, shape.experts.bias
        self.count = count
        hidden = shape.hidden_size
        self.inner = ("gate", "up") if splits_gate(shape) else ("gate_up",)
        for name in self.inner:
            rows = 2 * inner // len(self.inner)
            self.add_module(name, _Stack(count, rows, hidden, dtype, bias=bias))
        self.down = _Stack(count, shape.hidden_size, inner, dtype, bias=bias)

    def forward(self, rows: Tensor, weights: Tensor | None, experts: Tensor) -> Tensor:
        """Return the outputs for `rows`, each of one of this rank's `experts`, times `weights`."""
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
        if weights is None:
            return outputs
        return (outputs * weights[:, None]).to(rows.dtype)

    def _of_expert(self, expert: int, rows: Tensor) -> Tensor:
        made = [self._linear(name, expert, rows) for name in self.inner]
        gate, up = made if len(made) > 1 else made[0].chunk(2, -1)
        return self._linear("down", expert, functional.silu(gate) * up)

    def _linear(self, name: str, expert: int, rows: Tensor) -> Tensor:
        """Return the linear layer `name` of an expert."""
        stack = self.get_submodule(name)
        assert isinstance(stack, _Stack)
        bias = None if stack.bias is None else stack.bias[expert]
        return functional.linear(rows, stack.weight[expert], bias)


class SharedExperts(nn.Module):
    """The MLP that all tokens run through, which may have a gate.

    If `ranks` hold parts of it, this is one part, without the gate.
    """

    def __init__(self, shape: Transformer, dtype: torch.dtype, *, ranks: int = 1) -> None:
        super().__init__()
        assert shape.experts is not None
        hidden, wide = shape.hidden_size, shape.experts.shared_intermediate_size // ranks
        self.gate = nn.Linear(hidden, wide, bias=False, dtype=dtype)
        self.up = nn.Linear(hidden, wide, bias=False, dtype=dtype)
        self.down = nn.Linear(wide, hidden, bias=False, dtype=dtype)
        self.score = None
        if shape.experts.shared_gate and ranks == 1:
            self.score = nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the output for `tokens`."""
        made: Tensor = self.down(functional.silu(self.gate(tokens)) * self.up(tokens))
        return made if self.score is None else made * self.score(tokens).sigmoid()


class SharedGate(nn.Module):
    """The gate of shared experts whose outputs ranks have summed, if they have one."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        self.score = None
        if shape.experts.shared_gate:
            self.score = nn.Linear(shape.hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, made: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the output `made` for `tokens`, after the gate."""
        return made if self.score is None else made * self.score(tokens).sigmoid()


def add_mixture(part: nn.Module, shape: Transformer, dtype: torch.dtype) -> None:
    """Add router, experts and shared experts to `part`, a block that holds all experts."""
    experts = shape.experts
    assert experts is not None
    part.add_module("router", RouterLayer(shape, dtype))
    part.add_module("experts", RoutedExperts(shape, experts.count, dtype))
    if experts.shared_intermediate_size:
        part.add_module("shared", SharedExperts(shape, dtype))


def mixed(
    part: nn.Module, shape: Transformer, normed: Tensor, shared: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of the mixture of `part`, which holds all experts, and its sums.

    Tensor ranks have computed outputs of `shared` experts, before their gate.
    """
    experts = shape.experts
    assert experts is not None
    tokens = normed.flatten(0, -2)
    router = part.get_submodule("router")
    assert isinstance(router, RouterLayer)
    routed = router(tokens)
    rows = sent_rows(shape, routed.choice)
    copies, weights = permuted(tokens, routed.choice, rows)
    own = torch.arange(experts.count, device=tokens.device).repeat_interleave(rows.counts)
    outputs = part.get_submodule("experts")(copies, weights, own)
    made = sums_of_rows(outputs, rows, experts.top_k)
    if shared is not None:
        made = made + part.get_submodule("shared")(shared.view(made.shape), tokens)
    elif experts.shared_intermediate_size:
        made = made + part.get_submodule("shared")(tokens)
    return made.view(normed.shape), router.sums_of(routed, rows)


def sent_rows(shape: Transformer, choice: ChosenExperts) -> SentRows:
    """Return the order of the copies of tokens, without those beyond the capacity of an expert."""
    experts = shape.experts
    assert experts is not None
    rows = in_order(choice.experts, experts.count)
    drops = experts.drops(len(choice.experts))
    if drops is None:
        return rows
    return limited(rows, choice.weights, drops, pads=experts.pads_to_capacity)


def permuted(tokens: Tensor, choice: ChosenExperts, rows: SentRows) -> tuple[Tensor, Tensor]:
    """Return the copies of `tokens` and their weights in the order of experts."""
    weights, numbers = weights_and_tokens(choice, rows)
    sent = len(rows.order)
    return tokens[numbers[:sent]], weights[:sent]


def weights_and_tokens(choice: ChosenExperts, rows: SentRows) -> tuple[Tensor, Tensor]:
    """Return the weight and the token of each copy in the order of experts.

    Copies that fill an expert up to its capacity are of the last token, with the weight 0. Copies
    that are dropped are at the end, with the weight 0, too.
    """
    flat, choices = choice.weights.reshape(-1), choice.experts.shape[1]
    if not rows.pads and len(rows.order) == rows.pairs:
        return flat[rows.order], rows.order // choices
    order = rows.order
    if not rows.pads:
        order = functional.pad(order, (0, rows.pairs - len(order)), value=rows.pairs)
    weights = torch.cat([flat, flat.new_zeros(1)])[order]
    return weights, order.clamp(max=rows.pairs - 1) // choices
