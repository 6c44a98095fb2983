"""Mixtures of experts by their definition: every expert runs all tokens, and most weights are 0.

Nothing of the modules of ranks is used but their parameters. Losses of routers are added to the
loss, and biases of experts move after each step.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Transformer
from zsim.model.experts import DropRule, Experts, LoadBalancing, Scores
from zsim_torch.module import transformer


class Chosen(NamedTuple):
    """Scores and logits of a router, and its choices as 0 and 1, all [tokens, experts].

    `best` are choices by scores alone, `kept` the choices whose rows reach an expert.
    """

    logits: Tensor
    scores: Tensor
    best: Tensor
    chosen: Tensor
    kept: Tensor


def _best(scores: Tensor, count: int) -> Tensor:
    """Return 1 for the `count` largest scores of each row, and 0 for all others."""
    return torch.zeros_like(scores).scatter(1, scores.argsort(1, descending=True)[:, :count], 1)


def _choices(experts: Experts, ranked: Tensor) -> Tensor:
    """Return 1 for the best experts of each token among its best groups."""
    if experts.groups == experts.top_groups:
        return _best(ranked, experts.top_k)
    grouped = ranked.view(len(ranked), experts.groups, -1)
    size = grouped.shape[2]
    best = min(size, 2 if experts.scores is Scores.SIGMOID else 1)
    of_groups = grouped.sort(2, descending=True).values[:, :, :best].sum(2)
    allowed = _best(of_groups, experts.top_groups).repeat_interleave(size, 1)
    return _best(torch.where(allowed > 0, ranked, -torch.inf), experts.top_k)


def _kept(experts: Experts, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the choices within the capacity of each expert."""
    if experts.capacity_factor is None:
        return chosen
    room = ceil(len(chosen) * experts.top_k / experts.count * experts.capacity_factor)
    before = chosen.cumsum(0) - chosen
    if experts.drop_policy is DropRule.WEIGHT:
        ranked = torch.where(chosen > 0, weights, -torch.inf)
        before = ranked.argsort(dim=0, descending=True, stable=True).argsort(0)
    return chosen * (before < room)


@dataclass
class PlainMixture:
    """Mixtures of a model: what their routers chose in each forward, and their biases, by block."""

    shape: Transformer
    parts: int = 1
    """Parts of the tokens of a micro-batch, each with losses of its own."""
    noted: dict[nn.Module, list[Chosen]] = field(
        default_factory=lambda: defaultdict[nn.Module, list[Chosen]](list)
    )

    @property
    def experts(self) -> Experts:
        """The experts of a block."""
        assert self.shape.experts is not None
        return self.shape.experts

    def run(
        self, part: nn.Module, shape: Transformer, normed: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of the mixture of a block."""
        del shape
        tokens = normed.flatten(0, -2)
        made = self._routed(part, tokens)
        if self.experts.shared_intermediate_size:
            shared = _mlp([part.get_parameter(f"shared.{each}.weight") for each in LAYERS], tokens)
            if self.experts.shared_gate:
                score = functional.linear(tokens, part.get_parameter("shared.score.weight"))
                shared = shared * score.sigmoid()
            made = made + shared
        return made.view(normed.shape), {}

    def _routed(self, part: nn.Module, tokens: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of all experts."""
        experts, parameters = self.experts, dict[str, Tensor](part.named_parameters())
        bias = parameters.get("router.bias")
        logits = functional.linear(tokens, parameters["router.weight"], bias)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        scores = logits.sigmoid() if experts.scores is Scores.SIGMOID else logits.softmax(1)
        added = parameters.get("router.score_bias", torch.zeros(experts.count))
        chosen = _choices(experts, scores.detach() + added)
        weights = scores * chosen
        if experts.normalised or experts.scores is Scores.SOFTMAX_OF_CHOSEN:
            weights = weights / weights.sum(1, keepdim=True)
        kept = _kept(experts, chosen, weights.detach())
        self.noted[part].append(
            Chosen(logits, scores, _best(scores.detach(), experts.top_k), chosen, kept)
        )
        outputs = torch.stack([self._expert(parameters, each, tokens) for each in _all(experts)], 1)
        made = experts.scaling * ((weights * kept)[:, :, None] * outputs).sum(1)
        return made.to(tokens.dtype)

    def _expert(self, parameters: dict[str, Tensor], number: int, tokens: Tensor) -> Tensor:
        """Return the outputs of an expert for all tokens."""

        def layer(name: str, read: Tensor) -> Tensor:
            bias = parameters.get(f"experts.{name}.bias")
            weight = parameters[f"experts.{name}.weight"][number]
            return functional.linear(read, weight, None if bias is None else bias[number])

        if "experts.gate.weight" in parameters:
            gate, up = layer("gate", tokens), layer("up", tokens)
        else:
            gate, up = layer("gate_up", tokens).chunk(2, 1)
        return layer("down", functional.silu(gate) * up)

    def losses(
        self, before: Sequence["PlainMixture"], all_ranks: Sequence["PlainMixture"]
    ) -> Tensor:
        """Return the sum of the losses of all routers in the last forward.

        `all_ranks` are the forwards of this micro-batch, `before` those of earlier ones.
        """
        return torch.stack([self._loss(block, before, all_ranks) for block in self.noted]).sum()

    def _loss(
        self,
        block: nn.Module,
        before: Sequence["PlainMixture"],
        all_ranks: Sequence["PlainMixture"],
    ) -> Tensor:
        (whole,) = self.noted[block]
        every = zip(*(each.chunk(self.parts) for each in whole), strict=True)
        losses = [self._of_part(block, Chosen(*part), before, all_ranks) for part in every]
        return torch.stack(losses).mean()

    def _of_part(
        self,
        block: nn.Module,
        made: Chosen,
        before: Sequence["PlainMixture"],
        all_ranks: Sequence["PlainMixture"],
    ) -> Tensor:
        experts = self.experts
        total = made.logits.new_zeros(())
        if experts.z_loss:
            sizes = made.logits.exp().sum(1).log()
            total = total + experts.z_coefficient * (sizes**2).mean()
        if not experts.auxiliary_loss:
            return total
        shares = made.scores / made.scores.sum(1, keepdim=True)
        kind, factor = experts.load_balancing_type, experts.auxiliary_coefficient * experts.count
        if kind is LoadBalancing.SEQ_AUX_LOSS:
            length = self.shape.sequence_length
            sequences = (torch.split(each, length) for each in (made.best, shares))
            parts = zip(*sequences, strict=True)
            every = [best.mean(0) / experts.top_k @ share.mean(0) for best, share in parts]
            return total + factor * torch.stack(every).mean()
        best = made.best
        if kind is LoadBalancing.GLOBAL_AUX_LOSS:
            best = torch.cat([one.noted[block][0].best for one in (*before, *all_ranks)])
        return total + factor * (best.mean(0) / experts.top_k) @ shares.mean(0)

    def loads(self) -> dict[nn.Module, Tensor]:
        """Return the rows of each expert, by block."""
        return {block: made.kept.sum(0) for block, (made,) in self.noted.items()}


LAYERS = ("gate", "up", "down")


def _mlp(layers: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Return the output of an MLP with a gate."""
    gate, up, down = layers
    product = functional.silu(tokens @ gate.T) * (tokens @ up.T)
    return product @ down.T


def _all(experts: Experts) -> range:
    return range(experts.count)


@contextmanager
def mixing_by(plain: PlainMixture) -> Generator[None]:
    """Run the mixtures of all blocks by `plain`."""
    with patch.object(transformer, "mixed", plain.run):
        yield


def moved(experts: Experts, bias: Tensor, load: Tensor) -> Tensor:
    """Return a bias after a step in which experts had these rows."""
    mean = load.sum() / len(load)
    step = torch.full_like(bias, experts.bias_rate)
    return bias + torch.where(load < mean, step, torch.where(load > mean, -step, 0))
