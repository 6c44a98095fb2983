"""Categories of memory as users name them: parameters, gradients, optimizer, activations."""

from collections import Counter
from collections.abc import Iterable

from zsim.schedule.program import Kind

CATEGORIES = {
    Kind.PARAMETER: "parameters",
    Kind.GRADIENT: "gradients",
    Kind.MASTER: "optimizer",
    Kind.MOMENT: "optimizer",
    Kind.SAVED: "activations",
    Kind.COMMUNICATION: "communication buffers",
    Kind.WORKSPACE: "workspace",
}
"""Category of each kind of buffer; fp32 copies of parameters are part of the optimizer."""

LABELS = {
    **CATEGORIES,
    Kind.MASTER: "optimizer's fp32 parameters",
    Kind.MOMENT: "optimizer's moments",
}
"""Label of each kind of buffer, where the parts of the optimizer are shown separately."""


def by_category(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the bytes of each category, the largest first, without empty ones.

    `sizes` are bytes by kind, as `Kind` or its value.
    """
    found: Counter[str] = Counter()
    for kind, size in sizes:
        found[CATEGORIES[Kind(kind)]] += size
    return [(name, size) for name, size in found.most_common() if size]
