"""Fused collectives, and the `Compute` with which each is fused.

A fused all-gather is read by a `Compute` that depends on it and has kernels for its parts, or
kernels that overlap it. A fused reduce-scatter or all-reduce moves the output of such a `Compute`.
Both are in flight together: the dependent one may start before the other ends, and ends after it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zsim.model.kernel import FusedPart, parts_of
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
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
"""Parts of kernels that overlap the all-gather of an operand, by the operand's role."""

MAKES = frozenset({FusedPart.SCATTERED, FusedPart.SPLIT, FusedPart.BESIDE_SCATTER})
"""Parts of kernels that overlap the reduce-scatter or all-reduce of their `Compute`'s output."""

BY_KERNEL = frozenset({FusedPart.SPLIT, FusedPart.BESIDE_GATHER, FusedPart.BESIDE_SCATTER})
"""Kernel parts that overlap a collective run by a kernel; copy engines run the others."""


@dataclass(slots=True)
class Fusion:
    """Collectives of one group with which a `Compute` is fused.

    `gathers` holds the ids of all-gathers by kernel part; `scatter` is the id of a reduce-scatter
    or all-reduce.

    The collectives of the parts in `competing` overlap kernels that leave them no SMs.
    """

    group: str
    gathers: dict[FusedPart, str] = field(default_factory=dict[FusedPart, str])
    scatter: str | None = None
    competing: frozenset[FusedPart] = frozenset()


@dataclass(frozen=True, slots=True)
class Fusions:
    """Fused operations of a program by id.

    `computes` holds the gathers of each fused `Compute`, `makers` the `Compute` that makes the
    input of a reduce-scatter or all-reduce, `readers` the `Compute` that reads the output of an
    all-gather.
    """

    computes: Mapping[str, Fusion]
    makers: Mapping[str, Compute]
    readers: Mapping[str, Compute]

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> "Fusions":
        """Find fused collectives among `operations`, and the `Compute` that reads or makes each."""
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

    def overlapping(self, operation: StreamOperation) -> frozenset[str]:
        """Return ids of the operations that `operation` both waits for and overlaps."""
        if operation.id in self.makers:
            return frozenset({self.makers[operation.id].id})
        fusion = self.computes.get(operation.id)
        return frozenset() if fusion is None else frozenset(fusion.gathers.values())


def _by_part(compute: Compute, came: Iterable[AllGather]) -> dict[FusedPart, str]:
    """Return ids of gathers by the part of the kernels that multiply the gathered tensor."""
    read = {each.view.buffer: PARTS_OF.get(each.role, ()) for each in compute.operands}
    known = parts_of(compute.kernels)
    return {
        part: each.id for each in came for part in read.get(each.target.buffer, ()) if part in known
    }


def _competing(compute: Compute) -> frozenset[FusedPart]:
    kernels = (each for each in compute.kernels if each.part in BY_KERNEL and not each.spared)
    return parts_of(kernels)


def inspect_fusions(program: Program) -> None:
    """Raise ScheduleError unless each fused collective has a `Compute` with which it is fused.

    Raises:
        ScheduleError: no `Compute` reads or makes the data of a collective `in_parts` or `beside`.
    """
    operations = (*program.setup, *program.step)
    if not _has_fused((*program.setup_work, *program.step_work)):
        return
    marked = [each for each in walk(operations) if is_fused(each)]
    found = Fusions.of(program.step)
    fused = {*found.makers, *found.readers}
    for each in marked:
        if each.id not in fused:
            how = "beside a Compute" if _overlaps(each) else "in parts"
            why = f"{how}, but fused with no Compute, which reads what it gathers, or makes "
            raise ScheduleError(f"{each.id}: {why}what it scatters")


def _has_fused(work: Iterable[Operation]) -> bool:
    """Return True if any operation is a fused collective; most programs have none."""
    few = [each for each in work if isinstance(each, (CollectiveOperation, Together))]
    return any(map(is_fused, few))


def is_fused(operation: Operation) -> bool:
    """Return True if `operation` is a collective `in_parts` or `beside`, or contains one."""
    if type(operation) is Together:
        return any(map(is_fused, operation.members))
    return is_in_parts(operation) or _overlaps(operation)


def _overlaps(operation: Operation) -> bool:
    return isinstance(operation, CollectiveOperation) and operation.beside


def is_in_parts(operation: Operation) -> bool:
    """Return True if `operation` is a collective `in_parts`, or contains one."""
    if type(operation) is Together:
        return any(map(is_in_parts, operation.members))
    return isinstance(operation, CollectiveOperation) and operation.in_parts
