"""Places: each kernel finds all that it reads and writes in the memory of its own processor.

Exact numbers do not see where a buffer is. Segments and communication run on the device, as NCCL
asks; an update, a norm or another pass over gradients runs where its operands are, which is one
place. Copies cross between places, sums do not.
"""

from collections.abc import Iterator

from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.access import accesses
from zsim.schedule.operation import Action, Communication, Compute, Copy, Together, walk
from zsim.schedule.schedule import Place

INVARIANT = "places"

SEGMENTS = (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD)


def examine(context: Context) -> list[Finding]:
    """Find operations whose operands no processor has all in its own memory."""
    return list(_examine(context))


def _examine(context: Context) -> Iterator[Finding]:
    place_of = {pool.name: pool.place for pool in context.schedule.pools}
    if set(place_of.values()) == {Place.DEVICE}:
        return
    for program in context.schedule.programs:
        for operation in (*walk(program.setup), *walk(program.step)):
            if not isinstance(operation, Compute | Communication | Together | Copy):
                continue
            found: dict[Place, str] = {}
            for access in accesses(operation):
                name = access.view.buffer
                found.setdefault(place_of[program.by_name[name].pool], name)
            why = ""
            if isinstance(operation, Copy):
                if operation.accumulate and len(found) > 1:
                    why = "adds up across places"
            elif isinstance(operation, Compute) and operation.action not in SEGMENTS:
                if len(found) > 1:
                    why = "runs in one place"
            elif Place.HOST in found:
                why = "runs on the device"
            if why:
                where = " and ".join(f"{name} in {place} memory" for place, name in found.items())
                yield Finding(
                    invariant=INVARIANT,
                    role=program.role,
                    operation=operation.id,
                    why=f"{why}, and touches {where}",
                )
