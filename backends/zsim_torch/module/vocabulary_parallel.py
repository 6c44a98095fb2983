"""Embedding and cross entropy with the vocabulary divided over tensor parallel ranks.

No function communicates: segments compute summands, which the schedule sums over the ranks (Shoeybi
et al. 2019, section 3). Saved tensors are those of `zsim.model.transformer`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

SCALE = 2.0**63
"""Scale of the two sums of exponentials: 2^63 is half the exponent range of fp32."""

_ELSEWHERE, _LOW = 1, 2
"""Flag bits per token: its target is on another rank; its sum is scaled up."""


class OwnVocabulary(NamedTuple):
    """Tokens of a rank: rows of its part from `start` on; rows from `end` on are padding."""

    start: int
    end: int

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each token, 0 for tokens of other ranks, and a mask of those."""
        elsewhere = (tokens < self.start) | (tokens >= self.end)
        return (tokens - self.start).masked_fill_(elsewhere, 0), elsewhere


class _OwnWords(torch.autograd.Function):
    """Rows of this rank's embedding, zero for tokens of other ranks; saves the batch."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor, own: OwnVocabulary) -> Tensor:  # noqa: ANN401  (torch's own)
        """Look up all tokens of `batch` but the last of each sequence."""
        ctx.save_for_backward(batch)
        ctx.own, ctx.rows = own, weight.shape[0]
        rows, elsewhere = own.local(batch[:, :-1])
        found = torch.nn.functional.embedding(rows, weight)
        return found.masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:  # noqa: ANN401
        """Return the gradient of this rank's part."""
        (batch,) = ctx.saved_tensors
        rows, elsewhere = ctx.own.local(batch[:, :-1])
        incoming = gradients[0].masked_fill(elsewhere[..., None], 0)
        made = torch.ops.aten.embedding_dense_backward(
            incoming, rows, num_weights=ctx.rows, padding_idx=-1, scale_grad_by_freq=False
        )
        return None, made, None


def words(batch: Tensor, weight: Tensor, own: OwnVocabulary) -> Tensor:
    """Return this rank's summand of the embeddings of a batch: [sequences, tokens, hidden]."""
    made: Tensor = _OwnWords.apply(batch, weight, own)  # type: ignore[no-untyped-call]
    return made


class _OwnStatistics(torch.autograd.Function):
    """Three numbers per token whose sums over ranks give its cross entropy.

    Megatron-LM first takes a maximum over ranks. Here a sum must suffice, so exponentials are not
    relative to a global maximum. Each rank scales its sum down by 2^63 if its largest logit is at
    least 0, else up, and returns it in the first or second number. The two numbers together cover
    the exponents from 2^-190 to 2^190 in fp32, and add no rounding.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, own: OwnVocabulary) -> Tensor:  # noqa: ANN401
        """Return [3, tokens]: sums of exponentials scaled down, and up, and the target's logit."""
        rows, elsewhere = own.local(targets)
        if own.end - own.start < logits.shape[1]:
            logits = logits.clone()
            logits[:, own.end - own.start :] = -torch.inf
        top = logits.amax(1)
        top.masked_fill_(top == -torch.inf, 0)  # a rank may have only padding
        low = top < 0
        scale = torch.where(low, SCALE, 1 / SCALE) * top.double().exp()
        kept = (logits - top[:, None]).exp_().mul_(scale.to(logits.dtype)[:, None])
        sums = kept.sum(1)
        bits = elsewhere.to(torch.int8) * _ELSEWHERE + low.to(torch.int8) * _LOW
        ctx.save_for_backward(kept, rows, bits)
        found = logits.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0)
        return torch.stack([sums.masked_fill(low, 0), sums.masked_fill(~low, 0), found])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Return the gradient of the logits, in new memory."""
        kept, rows, bits = ctx.saved_tensors
        down, up, target = gradients[0]
        made = kept.mul(torch.where((bits & _LOW).bool(), up, down)[:, None])
        own = target.masked_fill((bits & _ELSEWHERE).bool(), 0)
        return made.scatter_add_(1, rows[:, None], own[:, None]), None, None


def statistics(logits: Tensor, batch: Tensor, own: OwnVocabulary) -> Tensor:
    """Return this rank's summands [3, tokens] for `mean_cross_entropy`.

    `logits` are [tokens, rows of this rank's part], in the data type of the loss.
    """
    targets = batch[:, 1:].flatten()
    made: Tensor = _OwnStatistics.apply(logits, targets, own)  # type: ignore[no-untyped-call]
    return made


class _SummedCrossEntropy(torch.autograd.Function):
    """Mean of the log of the sum of exponentials, minus the target's logit; saves its input."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor) -> Tensor:  # noqa: ANN401
        """Return the loss of statistics summed over the ranks."""
        ctx.save_for_backward(summed)
        logarithm = _total(summed).log()
        return (logarithm - summed[2].double()).mean().to(summed.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401
        """Return the gradient of the statistics; zero for a sum that no rank contributed to."""
        (summed,) = ctx.saved_tensors
        each = gradients[0].double() / summed.shape[1]
        share = each / _total(summed)
        made = torch.stack([share * SCALE, share / SCALE, -each.expand_as(share)])
        made[:2].masked_fill_(summed[:2] == 0, 0)  # these gradients may be infinite
        return made.to(summed.dtype)


def _total(summed: Tensor) -> Tensor:
    wide = summed.double()
    return wide[0] * SCALE + wide[1] / SCALE


def mean_cross_entropy(summed: Tensor) -> Tensor:
    """Return the mean cross entropy of the tokens, from statistics summed over all ranks."""
    made: Tensor = _SummedCrossEntropy.apply(summed.view(3, -1))  # type: ignore[no-untyped-call]
    return made
