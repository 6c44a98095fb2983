"""Parameters replicated over the tensor axis whose gradients are partial sums over it.

Each rank's gradient of them covers only its own tokens, or its own heads, and is summed over the
axis.
"""

from collections.abc import Container, Iterable
from itertools import accumulate

from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.bucket import UnitRun
from zsim.zero.names import TENSOR


def shared_views(run: UnitRun, buffer: str, shared: Container[str]) -> tuple[tuple[str, View], ...]:
    """Return the names of the run's parameters in `shared`, and the views of their gradients.

    `buffer` holds the gradients of the trained parameters of the run in order.
    """
    sizes = [each.elements for each in run.trained]
    return tuple(
        (each.name, View(buffer=buffer, start=start, size=each.elements))
        for each, start in zip(run.trained, accumulate(sizes, initial=0), strict=False)
        if each.name in shared
    )


def sum_over_tokens(
    writer: ScheduleWriter, gradients: Iterable[tuple[str, View]], *, after: Iterable[Edge] = ()
) -> list[str]:
    """Sum gradients of replicated parameters over the tensor axis, each separately and in place.

    Each rank's gradient covers only its own tokens or heads. The first sum waits for the edges
    `after`. Return the operations.
    """
    done: list[str] = []
    for name, view in gradients:
        path, edges = f"sum/{view.buffer}/{name}", () if done else after
        done.append(writer.all_reduce(path, TENSOR, view, stream=COMPUTE, after=edges))
    return done
