"""Runs of runtimes on the pretended device, whose recording finds hazards: jobs of the judge."""

from dataclasses import dataclass

import torch.distributed as dist
from fsdp_matrix import RUNS, WORLD, train

from faults.judge import Known, NamedRun
from faults.of_executor.dropped_waits import WaitSite, waits_seen
from faults.of_executor.runtimes import Bug
from zsim_record import recording
from zsim_record.record.tape import Tape


def by_kind(tape: Tape) -> dict[str, list[str]]:
    """Return hazards of a recording by kind, with the functions that both accesses come from."""
    found: dict[str, list[str]] = {}
    for hazard in tape.findings:
        names: list[set[str]] = []
        for access in (hazard.earlier, hazard.later):
            frames = () if access.stack is None else access.stack.frames
            names.append({frame.function for frame in frames})
        found.setdefault(hazard.kind.value, []).append(" ".join(sorted(set.intersection(*names))))
    return found


@dataclass(frozen=True)
class BugRun(NamedRun):
    """A few lines of a runtime on the pretended device."""

    def findings(self, made: Bug, *, mended: bool = False) -> dict[str, list[str]]:
        """Return hazards by kind."""
        with recording(world=8) as tape:
            dist.init_process_group("nccl")
            made(mended)
        return by_kind(tape)

    def truth(self, made: Bug, _: object) -> Known:
        """Return that a bug is wrong."""
        del made
        return Known(is_wrong=True)


@dataclass(frozen=True)
class FsdpRun(NamedRun):
    """A training by FSDP2 on the pretended device."""

    def findings(self, made: WaitSite) -> dict[str, list[str]]:
        """Return hazards by kind, where the waits of one line are dropped."""
        with recording(world=WORLD) as tape, waits_seen(lambda each: each == made):
            train(RUNS[self.label])
        return by_kind(tape)

    def truth(self, made: WaitSite, _: object) -> Known:
        """Return that a dropped wait is wrong."""
        del made
        return Known(is_wrong=True)
