"""Run reduce-scatter and all-gather on Gloo with few copies.

Torch's versions for Gloo sum a copy of the whole tensor on every rank, and gather into a separate
buffer. For 32 MB on two ranks they take three times the CPU time (35 ms and 26 ms, versus 13 and 9
here). Here, all-gather broadcasts each rank's part in place. Reduce-scatter exchanges parts, and
each rank sums its parts in the order of ranks. On two ranks the result is bitwise equal to torch's;
on more ranks it does not depend on which rank sums. A rank sends (n - 1) / n of the whole, as in
the ring algorithm.

The exchanged parts use as much memory as the whole tensor, like torch's copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import distributed

from zsim.schedule.operation import Reduction
from zsim_torch.execute.reserve import Reserve
from zsim_torch.observe.watchers import Exchange, seen, unwatched

SUMS = {Reduction.SUM: "sum", Reduction.AVERAGE: "average"}
"""Sum reductions, by their names in witnesses."""


@dataclass(slots=True)
class Exchanged:
    """An exchange in flight: its calls, and the function that computes the target afterwards."""

    works: Sequence[distributed.Work]
    at_end: list[Callable[[], object]]
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the target is complete."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            with unwatched():
                self.finish()
        for each in self.at_end:
            each()


@dataclass(slots=True)
class GlooExchange:
    """Issues the exchanges of a rank; reuses the memory of parts."""

    _reserve: Reserve = field(default_factory=Reserve)

    def all_gather(
        self, target: torch.Tensor, source: torch.Tensor, group: distributed.ProcessGroup
    ) -> Exchanged:
        """Gather the `source` of each rank into its slot of `target`."""
        at_end = seen(Exchange("all_gather", group, source, target))
        with unwatched():
            parts = target.chunk(group.size())
            own = parts[group.rank()]
            if own.data_ptr() != source.data_ptr():
                # `source` may overlap its slot in the same buffer; torch refuses such a copy.
                inside = source.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
                own.copy_(source.clone() if inside else source)
            works = [group.broadcast(part, root) for root, part in enumerate(parts)]
        return Exchanged(works, at_end)

    def reduce_scatter(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        group: distributed.ProcessGroup,
        reduction: Reduction,
    ) -> Exchanged:
        """Sum this rank's part over all ranks into `target`; the sum is done on `wait`."""
        at_end = seen(Exchange("reduce_scatter", group, source, target, SUMS[reduction]))
        with unwatched():
            found = self._reserve.take(source.numel(), source.dtype)
            work = group.alltoall_base(found, source, [], [])
        ranks = group.size()

        def finish() -> None:
            first, second, *others = found.chunk(ranks)
            torch.add(first, second, out=target)
            for each in others:
                target.add_(each)
            if reduction is Reduction.AVERAGE:
                target.div_(ranks)

        return Exchanged([work], at_end, finish)


_OPTIONS: Final[dict[distributed.ReduceOp.RedOpType, distributed.AllreduceOptions]] = {}


def all_reduced(
    target: torch.Tensor,
    group: distributed.ProcessGroup,
    reduction: distributed.ReduceOp.RedOpType,
) -> distributed.Work:
    """Reduce `target` over all ranks, without the overhead of `torch.distributed.all_reduce`."""
    options = _OPTIONS.get(reduction)
    if options is None:
        options = _OPTIONS[reduction] = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp(reduction)
    return group.allreduce([target], options)
