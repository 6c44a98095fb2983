"""Inputs of blocks and the loss of a forward, to compare two forwards bit by bit."""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zsim_torch.module.block_result import PLAIN, called_instead
from zsim_torch.module.generator_state import drawn_so_far
from zsim_torch.module.object_state import same
from zsim_torch.module.tensor_values import is_pretended

PLAIN_RUNS: Final = 2
"""Number of extra plain forwards, run if the forward by units differs from the first one."""

ALLOWED_SPREADS: Final = 4
"""Allowed difference between units and the module, as a multiple of that between plain runs."""

FREE_SPREAD: Final = 2**-10
"""Relative difference of losses that needs no warning: a GPU may sum in another order."""


@dataclass(slots=True)
class ForwardValues:
    """Arguments of the blocks of one forward in order, and its loss.

    `draws` is True if the forward drew random numbers from torch, Python or numpy.
    """

    entered: list[object] = field(default_factory=list[object])
    loss: Tensor = field(default_factory=lambda: torch.tensor(torch.nan))
    draws: bool = False

    @contextmanager
    def noted(
        self, blocks: Iterable[nn.Module], call: Callable[..., object] | None = None
    ) -> Generator[None]:
        """Return a context that records inputs of `blocks` and runs them by `call`, uncompiled."""

        def noting(block: nn.Module, *args: object, **kwargs: object) -> object:
            leaves = tree_leaves((args, kwargs))
            self.entered += [each.detach() if isinstance(each, Tensor) else each for each in leaves]
            with called_instead(block, None):
                return block(*args, **kwargs) if call is None else call(block, *args, **kwargs)

        before = drawn_so_far()
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(called_instead(block, partial(noting, block)))
            yield
        self.draws = drawn_so_far() != before

    def equals(self, other: "ForwardValues", plain: Sequence["ForwardValues"] = ()) -> bool:
        """Return True if all values are bitwise equal to those of `other`.

        If `plain` runs differ from `other`, a value may differ by ALLOWED_SPREADS times as much.
        """
        if any(len(each.entered) != len(self.entered) for each in (other, *plain)):
            return False
        rows = zip(
            self._values(), other._values(), *(each._values() for each in plain), strict=True
        )
        return all(_is_equal(mine, its) or _is_near(mine, its, again) for mine, its, *again in rows)

    def warn_of_spread(self, plain: Sequence["ForwardValues"]) -> None:
        """Warn if the loss of a run in `plain` differs from this one by more than rounding."""
        own = float(self.loss.detach())
        for each in plain:
            other = float(each.loss.detach())
            if abs(own - other) > FREE_SPREAD * max(abs(own), abs(other)):
                warnings.warn(
                    f"module: two forwards of one batch make losses of {own:.9g} and {other:.9g}; "
                    "zsim measures with forwards of its own and cannot put back all that they "
                    "change (a number in a file, in os.environ, or in an object of a package?)",
                    stacklevel=2,
                )
                return

    def _values(self) -> list[object]:
        return [*self.entered, self.loss.detach()]


def _is_equal(one: object, other: object) -> bool:
    """Return True if two leaves are equal: tensors bitwise; other objects by value or type.

    Tensors of a recording are equal if their shapes and data types are.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return same(one, other) if isinstance(one, PLAIN) else type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided or is_pretended(one) or is_pretended(other):
        return True
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    resolved = tensor.resolve_conj().resolve_neg().contiguous()
    return resolved.reshape(-1).view(torch.uint8)


def _is_near(one: object, other: object, plain: Sequence[object]) -> bool:
    """Return True if `one` differs from `other` at most as allowed by the `plain` runs."""
    spread = max((_distance(each, other) for each in plain), default=0.0)
    return 0 < _distance(one, other) <= ALLOWED_SPREADS * spread < torch.inf


def _distance(one: object, other: object) -> float:
    """Return the largest difference of elements; infinity unless both are tensors of one shape."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return torch.inf
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    found = float((one.to(wide) - other.to(wide)).abs().max())
    return torch.inf if found != found else found  # noqa: PLR0124  (NaN)
