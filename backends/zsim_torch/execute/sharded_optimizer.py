"""The optimizer on shards: update, norm, unscale, clip and finite check, in place.

Neither the start of a shard nor its division into operations changes a bit of an Adam update, or of
an SGD update in fp32 and fp64. Torch's fused Adam on the CPU rounds the last elements, which do not
fill a vector, differently (it may or may not fuse a multiply and an add), so they are padded to
whole vectors here. Norms are summed in fp64, in which squares of fp32 and shorter formats are
exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zsim.strategy.optimizer_rule import Adam, ClipNorm, Rule, rate_of

LANES: Final = 64
"""Elements that fill whole vectors in every format on every CPU (AVX-512: 64 bytes)."""

BLOCK: Final = 1 << 18
"""Elements per block of a CPU update, so that converted values stay in the cache."""

SUMMED: Final = 1 << 15
"""Elements per block of a sum of squares on the CPU, where they are converted to fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Flat tensors of equal size that an update reads and writes.

    `trained` are the masters or, without masters, the parameters. `moments` are in the order of the
    rule's `states`.
    """

    gradient: torch.Tensor
    trained: torch.Tensor
    moments: tuple[torch.Tensor, ...]


def update(rule: Rule | None, operands: Updated, scalars: Mapping[str, float]) -> None:
    """Apply one step of `rule`, by its fused operator if it has one.

    A rule that counts steps reads the number of the step, from 1, from the scalar "step".
    """
    if rule is None or isinstance(rule, ClipNorm):
        raise ValueError(f"update: {rule} is no optimizer")
    rate, step = rate_of(rule, scalars), scalars["step"] if rule.counts_steps else 0.0
    if rule.fused:
        _FUSED[rule.fused](rule, operands, rate, step)
        return
    gradient = operands.gradient.to(operands.trained.dtype)
    rule.update(gradient, operands.trained, operands.moments, rate=rate, step=step)


def _adam(rule: Adam, operands: Updated, rate: float, step: float) -> None:
    """Apply Adam (Kingma and Ba 2015, algorithm 1) with decoupled weight decay.

    Decay is as in Loshchilov and Hutter 2019, algorithm 2. It uses the fused kernel of
    `torch.optim.AdamW`: one pass that reads 16 bytes and writes 12 per element.
    """
    steps = torch.full((), step, dtype=torch.float32, device=operands.trained.device)

    def update_block(
        gradient: torch.Tensor, trained: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        _fused(rule, rate, steps, ([trained], [gradient], [first], [second]))

    _in_blocks(update_block, operands, operands.moments[0].dtype)


def _fused(
    rule: Adam, rate: float, step: torch.Tensor, lists: tuple[list[torch.Tensor], ...]
) -> None:
    """Update lists of parameters from gradients and both moments by torch's fused kernel."""
    trained, gradients, first, second = lists
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        trained,
        gradients,
        first,
        second,
        [],
        [step] * len(trained),
        lr=rate,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
    )


def _in_blocks(update_block: Callable[..., None], operands: Updated, dtype: torch.dtype) -> None:
    """Update in blocks, in the data type `dtype` of the moments; on a GPU in one block."""
    gradient, trained, moments = operands.gradient, operands.trained, operands.moments
    count = gradient.numel()
    whole, size = count - count % LANES, BLOCK
    if gradient.is_cuda:
        whole, size = count, max(count, 1)
    for start in range(0, whole, size):
        end = min(start + size, whole)
        own = trained[start:end]
        cast = own.to(dtype)
        update_block(gradient[start:end].to(dtype), cast, *(each[start:end] for each in moments))
        if cast is not own:
            own.copy_(cast)
    if whole < count:
        ends = [each[whole:] for each in (trained, *moments)]
        padded = [_padded(each, dtype) for each in ends]
        update_block(_padded(gradient[whole:], dtype), *padded)
        for each, updated in zip(ends, padded, strict=True):
            each.copy_(updated[: count - whole])


class SteadyAdam:
    """Adam on a persistent CPU shard; its views are created once.

    It gives bitwise the same result as `update` when gradient, masters and moments have one data
    type. It makes one call of torch, and creates no tensors except views of the gradient.
    """

    __slots__ = ("_blocks", "_ends", "_padded", "_rule", "_slots", "_step", "_whole")

    def __init__(self, rule: Any, operands: Updated) -> None:  # noqa: ANN401  (an `Adam`, see STEADY)
        count, self._rule = operands.trained.numel(), rule
        self._whole = whole = count - count % LANES
        state = (operands.trained, *operands.moments)
        self._blocks = [[each[:whole]] if whole else [] for each in state]
        self._step = torch.zeros((), dtype=torch.float32)
        self._ends, self._padded, self._slots = list[torch.Tensor](), _NOTHING, _NOTHING
        if whole < count:
            room = torch.zeros(1 + len(state), LANES, dtype=operands.trained.dtype)
            self._ends = [each[whole:] for each in state]
            self._padded, self._slots = room.unbind(), room[:, : count - whole].unbind()
            for block, padded in zip(self._blocks, self._padded[1:], strict=True):
                block.append(padded)

    @staticmethod
    def serves(operands: Updated) -> bool:
        """Return True if all operands are on the CPU and have one data type."""
        trained = operands.trained
        formats = {each.dtype for each in (operands.gradient, *operands.moments)}
        return trained.is_cpu and formats == {trained.dtype}

    def update(self, gradient: torch.Tensor, scalars: Mapping[str, float]) -> None:
        """Apply a step to the persistent buffers."""
        rule, whole, ends = self._rule, self._whole, self._ends
        gradients = [gradient[:whole] if ends else gradient] if whole else []
        if ends:
            _copy_each(self._slots, [gradient[whole:], *ends])
            gradients.append(self._padded[0])
        self._step.fill_(scalars["step"])
        trained, first, second = self._blocks
        rate, lists = rate_of(rule, scalars), (trained, gradients, first, second)
        _fused(rule, rate, self._step, lists)
        if ends:
            _copy_each(ends, self._slots[1:])


_NOTHING: Final[tuple[torch.Tensor, ...]] = ()


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]  # it takes tuples as well


def _padded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of fewer than LANES elements, padded with zeros."""
    made = torch.zeros(LANES, dtype=dtype)
    made[: tensor.numel()] = tensor
    return made


_FUSED: Final[Mapping[str, Callable[..., None]]] = {Adam.fused: _adam}

STEADY: Final[Mapping[str, type[SteadyAdam]]] = {Adam.fused: SteadyAdam}
"""Updates of persistent shards that are prepared once, by the fused operator of the rule."""


def sum_of_squares(gradients: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write the sum of squares of all elements, added in fp64, to `target`."""
    total = torch.zeros((), dtype=torch.float64, device=target.device)
    for gradient in gradients:
        if gradient.is_cuda:
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square_()
            continue
        for start in range(0, gradient.numel(), SUMMED):
            wide = gradient[start : start + SUMMED].double()
            total += torch.dot(wide, wide)
    target.copy_(total)


def is_finite(gradients: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write 1 to `target` if an element is infinite or NaN, else 0."""
    target.zero_()
    for gradient in gradients:
        if gradient.numel():
            bad = torch.isfinite(gradient).all().logical_not().to(target.dtype)
            torch.maximum(target, bad, out=target)


def largest_magnitudes(parameters: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write the largest magnitude of each parameter to its place in `target`."""
    for place, parameter in enumerate(parameters):
        target[place] = parameter.abs().max() if parameter.numel() else 0.0


def unscale(gradients: Sequence[torch.Tensor], scale: float) -> None:
    """Divide the gradients by the loss scale."""
    for gradient in gradients:
        gradient.div_(scale)


def clip(
    rule: Rule | None, squares: torch.Tensor, gradients: Sequence[torch.Tensor], scale: float
) -> None:
    """Scale gradients so that their norm is at most the rule's.

    `squares` is the sum of squares of all gradients while they were larger by `scale`. The host
    does not read it.
    """
    if not isinstance(rule, ClipNorm):
        raise ValueError(f"clip: {rule} does not clip")  # noqa: TRY004  (a fault of the schedule)
    norm = squares.sqrt().div_(scale)
    factor = (rule.maximum / (norm + rule.epsilon)).clamp_(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
