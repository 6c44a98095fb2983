"""Time single kernels: matrix products on a grid of sizes, all others by bytes.

Bytes are those that `zsim.model` counts for such a kernel. So the time of a model's kernel can be
looked up, whatever number of bytes an implementation really moves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from zsim.cluster.profile.measured import KernelTimes, ProductTimes, TimeCurve
from zsim.dtype import DType
from zsim.model.kernel import KernelKind, flash_attention
from zsim_record.measure.ladder import LADDER, Ladder
from zsim_record.measure.stopwatch import Stopwatch
from zsim_record.measure.time_budget import TimeBudget
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.causal_attention import rotated
from zsim_torch.supervise.progress_record import note

COLUMNS: Final = 256

PASSES: Final = 3
"""Desired number of passes over all kernels; more if there is time. The lowest time counts."""

LAYOUTS: Final = {False: ("nt",), True: ("nn", "tn")}
"""Operand layouts of products: forward y = x w^T, backward dx = dy w and dw = dy^T x."""

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One kernel to time. `prepare` allocates its operands and returns a function that runs it."""

    key: tuple[object, ...]
    prepare: Callable[[], Action]


def kernel_tables(
    watch: Stopwatch, dtypes: tuple[DType, ...], budget: TimeBudget, ladder: Ladder = LADDER
) -> tuple[tuple[ProductTimes, ...], tuple[KernelTimes, ...]]:
    """Return times of kernels in `dtypes`, each the lowest of all passes within `budget`."""
    with torch.no_grad():
        cases = [case for dtype in dtypes for case in _cases(watch.device, dtype, ladder)]
        found = _lowest(cases, watch, budget)
    grids = tuple(
        ProductTimes(
            dtype=dtype,
            backward=backward,
            extents=ladder.extents,
            seconds=tuple(
                sum(found[dtype, backward, layout, shape] for layout in LAYOUTS[backward])
                / len(LAYOUTS[backward])
                for shape in product(ladder.extents, repeat=3)
            ),
        )
        for dtype in dtypes
        for backward in (False, True)
    )
    curves: dict[tuple[KernelKind, DType, bool], dict[float, float]] = {}
    for (first, *rest), taken in found.items():
        if isinstance(first, KernelKind):
            dtype, backward, size = rest
            assert isinstance(dtype, DType)
            assert isinstance(backward, bool)
            assert isinstance(size, int)
            curves.setdefault((first, dtype, backward), {})[size] = taken
    return grids, tuple(
        KernelTimes(
            kind=kind,
            dtype=dtype,
            backward=backward,
            curve=_curve(points),
        )
        for (kind, dtype, backward), points in curves.items()
    )


def _curve(points: dict[float, float]) -> TimeCurve:
    sizes = sorted(points)
    return TimeCurve(sizes=tuple(sizes), seconds=tuple(points[size] for size in sizes))


def _lowest(
    cases: list[_Case], watch: Stopwatch, budget: TimeBudget
) -> dict[tuple[object, ...], float]:
    """Return the lowest time of each case over passes through all cases."""
    found: dict[tuple[object, ...], float] = {}
    done = 0
    while done < len(cases) or not budget.is_over:
        passes, place = divmod(done, len(cases))
        if not place:
            note(f"measuring kernels, pass {passes}")
        case = cases[place]
        taken = watch.seen_s(case.prepare())
        found[case.key] = min(taken, found.get(case.key, taken))
        done += 1
    budget.note("kernels", done // len(cases), PASSES)
    return found


def _cases(device: torch.device, dtype: DType, ladder: Ladder) -> Iterator[_Case]:
    made = TORCH_DTYPE[dtype]

    def tensor(*extents: int) -> Tensor:
        return torch.ones(extents, dtype=made, device=device)

    for backward, layouts in LAYOUTS.items():
        for layout, shape in product(layouts, product(ladder.extents, repeat=3)):

            def prepare(layout: str = layout, shape: tuple[int, ...] = shape) -> Action:
                m, n, k = shape
                left = tensor(k, m).t() if layout[0] == "t" else tensor(m, k)
                right = tensor(n, k).t() if layout[1] == "t" else tensor(k, n)
                return lambda: torch.mm(left, right)

            yield _Case(key=(dtype, backward, layout, shape), prepare=prepare)
    size = dtype.size_bytes
    for kind, backward, streams, operator in OPERATORS:
        for elements in ladder.elements:

            def prepare_rows(
                operator: Callable[[Tensor], Action] = operator, elements: int = elements
            ) -> Action:
                return operator(tensor(elements // COLUMNS, COLUMNS))

            key = (kind, dtype, backward, elements * streams * size)
            yield _Case(key=key, prepare=prepare_rows)
    for extents, backward in product(ladder.attentions, (False, True)):
        sequences, heads, tokens, width = extents
        shape = (sequences, heads, heads, tokens, tokens, width)
        flops = flash_attention(shape, dtype, backward=backward).executed_flops
        prepare_heads = partial(_attention, made, device, extents, backward=backward)
        yield _Case(key=(KernelKind.ATTENTION, dtype, backward, flops), prepare=prepare_heads)


def _add(rows: Tensor) -> Action:
    other = torch.ones_like(rows)
    return lambda: rows + other


def _sum(rows: Tensor) -> Action:
    return lambda: rows.sum(0)


def _norm(rows: Tensor) -> Action:
    weight = torch.ones_like(rows[0])
    return lambda: functional.layer_norm(rows, weight.shape, weight, weight)


def _norm_back(rows: Tensor) -> Action:
    weight, shape = torch.ones_like(rows[0]), list(rows.shape[-1:])
    _, mean, deviation = torch.native_layer_norm(rows, shape, weight, weight, 1e-5)
    aten = torch.ops.aten
    wanted = [True, True, True]
    return lambda: aten.native_layer_norm_backward(
        rows, rows, shape, mean, deviation, weight, weight, wanted
    )


def _activation(rows: Tensor) -> Action:
    return lambda: functional.gelu(rows)


def _activation_back(rows: Tensor) -> Action:
    return lambda: torch.ops.aten.gelu_backward(rows, rows)


def _softmax(rows: Tensor) -> Action:
    return lambda: rows.softmax(-1)


def _softmax_back(rows: Tensor) -> Action:
    return lambda: torch.ops.aten._softmax_backward_data(rows, rows, -1, rows.dtype)


def _entropy(rows: Tensor) -> Action:
    wide = rows.float()
    targets = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    return lambda: functional.cross_entropy(wide, targets)


def _entropy_back(rows: Tensor) -> Action:
    wide = rows.float()
    return lambda: torch.ops.aten._log_softmax_backward_data(wide, wide, 1, wide.dtype)


def _embedding(rows: Tensor) -> Action:
    places = torch.arange(len(rows), device=rows.device)
    return lambda: functional.embedding(places, rows)


def _embedding_back(rows: Tensor) -> Action:
    places = torch.arange(len(rows), device=rows.device)
    return lambda: torch.ops.aten.embedding_dense_backward(rows, places, len(rows), -1, False)  # noqa: FBT003


def _rotary(rows: Tensor) -> Action:
    heads = rows.view(1, len(rows), -1, 32)
    return lambda: rotated(heads, heads.shape[2])


def _attention(
    dtype: torch.dtype, device: torch.device, extents: tuple[int, ...], *, backward: bool
) -> Action:
    """Return attention or its backward by autograd, whose overhead is comparatively small."""
    query, key, value = (torch.ones(extents, dtype=dtype, device=device) for _ in range(3))
    attend = partial(functional.scaled_dot_product_attention, is_causal=True)
    if not backward:
        return partial(attend, query, key, value)
    operands = [each.requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        made = attend(query, key, value)
    return partial(torch.autograd.grad, made, operands, torch.ones_like(made), retain_graph=True)


OPERATORS: Final[tuple[tuple[KernelKind, bool, int, Callable[[Tensor], Action]], ...]] = (
    (KernelKind.ELEMENTWISE, False, 3, _add),
    (KernelKind.ELEMENTWISE, True, 1, _sum),
    (KernelKind.NORM, False, 2, _norm),
    (KernelKind.NORM, True, 5, _norm_back),
    (KernelKind.ACTIVATION, False, 2, _activation),
    (KernelKind.ACTIVATION, True, 3, _activation_back),
    (KernelKind.SOFTMAX, False, 2, _softmax),
    (KernelKind.SOFTMAX, True, 3, _softmax_back),
    (KernelKind.CROSS_ENTROPY, False, 3, _entropy),
    (KernelKind.CROSS_ENTROPY, True, 2, _entropy_back),
    (KernelKind.EMBEDDING, False, 2, _embedding),
    (KernelKind.EMBEDDING, True, 2, _embedding_back),
    (KernelKind.ROTARY, False, 2, _rotary),
    (KernelKind.ROTARY, True, 2, _rotary),
)
"""Kinds of kernels, forward and backward, with the number of tensors that a model counts."""
