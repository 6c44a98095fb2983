"""Collectives in parts or beside kernels, and the `Compute` that each is fused with.

What is gathered so is read by a `Compute` that waits for it and has kernels for its parts, or that
run beside it; what is scattered or summed so is made by one. They are on their way together: the
one that waits may begin before the other has ended, and ends behind it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zsim.model.kernel import FusedPart, parts_of
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Branch,
    CollectiveOperation,
    Compute,
    Operation,
    ReduceScatter,
    Role,
    StreamOperation,
    Together,
    walk,
)
from zsim.schedule.program import Program, ScheduleError

PARTS_OF = {
    Role.INPUT: (FusedPart.GATHERED, FusedPart.BESIDE_GATHER),
    Role.OUTPUT_GRADIENT: (FusedPart.GRADIENT,),
}
"""Parts of kernels that run beside the gather of an operand, by what that is to a `Compute`."""

MAKES = frozenset({FusedPart.SCATTERED, FusedPart.SPLIT, FusedPart.BESIDE_SCATTER})
"""Parts of kernels that run beside the scatter, or the sum, of what their `Compute` makes."""

BY_KERNEL = frozenset({FusedPart.SPLIT, FusedPart.BESIDE_GATHER, FusedPart.BESIDE_SCATTER})
"""Parts of kernels beside a collective that is a kernel itself; copy engines run the others."""


@dataclass(slots=True)
class Fusion:
    """The collectives that a `Compute` is fused with over a group: gathers by part, a `scatter`.

    The latter may be a sum.

    Parts that are in `competing` run beside kernels to which they leave no multiprocessors.
    """

    group: str
    gathers: dict[FusedPart, str] = field(default_factory=dict[FusedPart, str])
    scatter: str | None = None
    competing: frozenset[FusedPart] = frozenset()


@dataclass(frozen=True, slots=True)
class Fusions:
    """The fused operations of a program by id.

    Of a scatter or a sum there is who makes what it moves, of a gather who reads it.
    """

    computes: Mapping[str, Fusion]
    makers: Mapping[str, Compute]
    readers: Mapping[str, Compute]

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> "Fusions":
        """Return those among `operations`: fused collectives, with who reads or makes them."""
        gathers, computes = dict[str, AllGather](), dict[str, Compute]()
        fusions, makers, readers = dict[str, Fusion](), dict[str, Compute](), dict[str, Compute]()
        operations = tuple(operations)
        for each in walk(operations) if _has_fused(operations) else ():
            if isinstance(each, Compute):
                computes[each.id] = each
                came = [gathers[e] for e in each.after if isinstance(e, str) and e in gathers]
                if came and (by_part := _by_part(each, came)):
                    competing = _competing(each)
                    fusions[each.id] = Fusion(came[0].group, by_part, competing=competing)
                    readers |= dict.fromkeys(by_part.values(), each)
            elif isinstance(each, AllGather) and is_fused(each):
                gathers[each.id] = each
            elif isinstance(each, ReduceScatter | AllReduce) and is_fused(each):
                awaited = (computes.get(e) for e in each.after if isinstance(e, str))
                for maker in filter(None, awaited):
                    if MAKES & parts_of(maker.kernels):
                        plain = Fusion(each.group, competing=_competing(maker))
                        fusions.setdefault(maker.id, plain).scatter = each.id
                        makers[each.id] = maker
        return cls(fusions, makers, readers)

    def beside(self, operation: StreamOperation) -> frozenset[str]:
        """Return what `operation` waits for and is on its way with."""
        if operation.id in self.makers:
            return frozenset({self.makers[operation.id].id})
        fusion = self.computes.get(operation.id)
        return frozenset() if fusion is None else frozenset(fusion.gathers.values())


def _by_part(compute: Compute, came: Iterable[AllGather]) -> dict[FusedPart, str]:
    """Return gathers by the part that kernels have which multiply what comes."""
    read = {each.view.buffer: PARTS_OF.get(each.role, ()) for each in compute.operands}
    known = parts_of(compute.kernels)
    return {
        part: each.id for each in came for part in read.get(each.target.buffer, ()) if part in known
    }


def _competing(compute: Compute) -> frozenset[FusedPart]:
    kernels = (each for each in compute.kernels if each.part in BY_KERNEL and not each.spared)
    return parts_of(kernels)


def inspect_fusions(program: Program) -> None:
    """Check that a `Compute` is fused with each collective in parts or beside one.

    Raises:
        ScheduleError: none is.
    """
    operations = (*program.setup, *program.step)
    if not _has_fused(operations):
        return
    marked = [each for each in walk(operations) if is_fused(each)]
    found = Fusions.of(program.step)
    fused = {*found.makers, *found.readers}
    for each in marked:
        if each.id not in fused:
            how = "beside a Compute" if _is_beside(each) else "in parts"
            why = f"{how}, but fused with no Compute, which reads what it gathers, or makes "
            raise ScheduleError(f"{each.id}: {why}what it scatters")


def _has_fused(operations: Iterable[Operation]) -> bool:
    """Tell whether any is a fused collective; most programs have none, and end here."""
    # One look at the type of each, without `walk`: a program has 100,000 operations.
    few = [each for each in operations if isinstance(each, (CollectiveOperation, Together, Branch))]
    return any(map(is_fused, walk(few)))


def is_fused(operation: Operation) -> bool:
    """Tell whether `operation` is a collective in parts or beside a `Compute`, or has one."""
    if type(operation) is Together:
        return any(map(is_fused, operation.members))
    return is_in_parts(operation) or _is_beside(operation)


def _is_beside(operation: Operation) -> bool:
    return isinstance(operation, CollectiveOperation) and operation.beside


def is_in_parts(operation: Operation) -> bool:
    """Tell whether `operation` is a collective in parts, or has one."""
    if type(operation) is Together:
        return any(map(is_in_parts, operation.members))
    return isinstance(operation, CollectiveOperation) and operation.in_parts
