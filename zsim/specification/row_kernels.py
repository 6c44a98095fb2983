"""Kernels that treat each row of an expert by itself: random functions of the row and its weights.

All rows of one source for one expert have one place (`zsim.proof.execution.rows_as_places`). A
result at a place depends on the numbers there and on the weights of the expert. The gradient of
these weights is the sum over the expert's places. So it does not matter which rank runs an expert,
nor how rows get there: plain training has all experts in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from zsim.specification.residues import Numbers, Random, product, scrambled, summed, total


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """The kernels of one segment, over the rows of `sources` for each of some experts.

    `name` is that of the segment. Places are in the order of sources, then of experts, then of the
    `kinds` of rows that rules of dropping tell apart.
    """

    random: Random
    name: str
    sources: int
    experts: int
    kinds: int = 1

    def forward(
        self, inputs: Sequence[Numbers], weights: Sequence[Numbers], outputs: int
    ) -> list[Numbers]:
        """Return outputs with one number for each place; the last output is saved for backward."""
        seen = self._seen("forward", inputs, weights)
        return [self._made(f"makes {place}", seen) for place in range(outputs)]

    def backward(
        self,
        read: Sequence[Numbers],
        weights: Sequence[Numbers],
        slopes: Sequence[Numbers],
        *,
        trained: Sequence[int],
        wanted: int,
    ) -> tuple[list[Numbers], list[Numbers]]:
        """Return gradients of the weights numbered in `trained`, and of the first `wanted` inputs.

        `read` are the inputs and the saved numbers that backward reads, `slopes` the gradients of
        the outputs.
        """
        seen = self._seen("backward", read, weights)
        slope = self._digest("slope", slopes)
        towards = (
            product(self._made(f"towards input {place}", seen), slope) for place in range(wanted)
        )
        return [self._weights(number, weights[number], seen, slope) for number in trained], [
            *towards
        ]

    def _weights(self, number: int, weight: Numbers, seen: Numbers, slope: Numbers) -> Numbers:
        """Return the gradient of one parameter: the sum over the places of each expert."""
        pieces = weight.shape[-1] // self.experts
        key = self._key(f"towards weight {number}", pieces, seen.ndim + 1)
        factors = scrambled(seen[..., np.newaxis], key)
        terms = product(factors, slope[..., np.newaxis])
        apart = terms.reshape(*terms.shape[:-2], self.sources, self.experts, self.kinds, pieces)
        found = summed(apart, (-4, -2))
        return found.reshape(*found.shape[:-2], -1)

    def _seen(self, way: str, inputs: Sequence[Numbers], weights: Sequence[Numbers]) -> Numbers:
        """Return a number for each place that depends on everything that its row reads."""
        seen = self._digest(f"{way} reads", inputs)
        for number, weight in enumerate(weights):
            pieces = weight.shape[-1] // self.experts
            key = self._key(f"{way} weight {number}", pieces, weight.ndim + 1)
            each = weight.reshape(*weight.shape[:-1], self.experts, pieces)
            of_expert = summed(product(each, key), -1)
            of_kinds = np.repeat(of_expert, self.kinds, axis=-1)
            own = np.tile(of_kinds, (*(1,) * (of_kinds.ndim - 1), self.sources))
            seen = total(seen, own)
        return seen

    def _digest(self, what: str, numbers: Sequence[Numbers]) -> Numbers:
        """Return a linear combination of numbers, place by place."""
        found: Numbers | None = None
        for number, each in zip(count(), numbers):
            term = product(each, self._key(f"{what} {number}", 1, each.ndim))
            found = term if found is None else total(found, term)
        assert found is not None, f"{self.name} reads no rows"
        return found

    def _made(self, what: str, seen: Numbers) -> Numbers:
        return scrambled(seen, self._key(what, 1, seen.ndim))

    def _key(self, what: str, size: int, dimensions: int) -> Numbers:
        key = self.random.key(f"rows of {self.name} {what}", size)
        return key.reshape(2, *(1,) * (dimensions - 2), size)
