"""An invariant that zsim does not have: no collective moves more bytes at once than a limit."""

from zsim.proof.context import Context
from zsim.proof.families import Family, ProofStage
from zsim.proof.finding import Finding
from zsim.schedule.operation import CollectiveOperation, walk
from zsim.schedule.schedule import Schedule

NAME = "messages"
LIMIT_BYTES = 128 * 1024
"""An example; a library may need a limit to place its buffers."""


def examine(context: Context) -> list[Finding]:
    """Find the collectives whose larger operand has more bytes than the limit."""
    found: list[Finding] = []
    for program in context.schedule.programs:
        for operation in walk((*program.setup, *program.step)):
            if isinstance(operation, CollectiveOperation):
                size = max(operation.source.size, operation.target.size)
                size_bytes = size * operation.wire.size_bytes
                if size_bytes > LIMIT_BYTES:
                    why = f"moves {size_bytes:,} bytes, at most {LIMIT_BYTES:,} are allowed"
                    found.append(
                        Finding(invariant=NAME, role=program.role, operation=operation.id, why=why)
                    )
    return found


def proves(schedule: Schedule) -> str | None:
    """Return the words if there are communicators."""
    return f"messages of at most {LIMIT_BYTES:,} bytes" if schedule.mesh.axes else None


MESSAGES = Family(name=NAME, stage=ProofStage.PROMISES, examine=examine, proves=proves)
