"""Stages of a pipeline that all take as long, to count its bubble, and what they hold."""

from dataclasses import dataclass

from exact_training import cluster

from zsim.backend.backend import Job
from zsim.model.model import Model
from zsim.schedule.operation import Allocate, Compute, Free, Role
from zsim.schedule.schedule import Program, Schedule
from zsim_des import SimBackend

FORWARD_PS, BACKWARD_PS = 70, 110
CHUNK_PS = FORWARD_PS + BACKWARD_PS
"""Time that a micro-batch takes in a chunk of a stage."""


@dataclass(frozen=True)
class Uniform:
    """A stage takes so long forward and backward, and a reduction; everything else nothing."""

    firsts: frozenset[str]
    forward_ps: int
    backward_ps: int

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        del rank, step, operation
        return 0

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        del rank, step
        if operation not in self.firsts:
            return 0
        return self.forward_ps if operation.startswith("step/forward") else self.backward_ps

    def communication_ps(self, step: int, operation: str) -> int:
        del step, operation
        return 0


def firsts(made: Schedule) -> frozenset[str]:
    """The first forward and backward operation of each micro-batch on each stage."""
    found: dict[tuple[object, ...], str] = {}
    for program in made.programs:
        for operation in program.step:
            if isinstance(operation, Compute) and operation.unit:
                chunk = operation.id.partition("/chunk")[2].partition("/")[0]
                key = (program.role, operation.action, operation.micro_batch, chunk)
                found.setdefault(key, operation.id)
    return frozenset(found.values())


def uniform_step_ps(made: Schedule, model: Model) -> int:
    """Return the time of a step after another, where every chunk takes `CHUNK_PS`."""
    timing = Uniform(firsts(made), forward_ps=FORWARD_PS, backward_ps=BACKWARD_PS)
    job = Job(schedule=made, model=model, cluster=cluster(made.mesh.size), steps=2)
    first, second = SimBackend(durations=timing).step_ends_ps(job)
    return second - first


def saved_peak(program: Program) -> int:
    """The most that is held at once of what segments save, without the values between them."""
    saved = {
        operand.view.buffer
        for each in program.step
        if isinstance(each, Compute)
        for operand in each.operands
        if operand.role is Role.SAVED
    }
    held = most = 0
    for operation in program.step:
        if isinstance(operation, Allocate | Free) and operation.buffer in saved:
            size = program.by_name[operation.buffer].size_bytes
            held += size if isinstance(operation, Allocate) else -size
            most = max(most, held)
    return most
