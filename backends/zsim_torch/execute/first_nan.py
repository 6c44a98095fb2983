"""In poison mode, check the results of a rank's operations for NaN from invalid memory."""

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from zsim.schedule.access import accesses
from zsim.schedule.operation import StreamOperation
from zsim.schedule.schedule import Kind
from zsim_torch.execute.live_memory import LiveMemory, MemoryFaultError
from zsim_torch.execute.poison import NanOrigin, has_no_number

STATE: Final = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)
"""Kinds of buffers that hold results of a run. Gradients may be NaN in a step that overflows."""


class CheckedOperation(NamedTuple):
    """An operation whose results are checked, and the tensors that it writes."""

    operation: str
    step: int
    place: int
    written: list[torch.Tensor]


@dataclass(slots=True)
class FirstNan:
    """The first operation of a rank that wrote NaN."""

    memory: LiveMemory
    first: NanOrigin | None = None
    _looked: int = 0

    def looking(self, operation: StreamOperation, step: int) -> CheckedOperation:
        """Return the tensors that `operation` writes, if the host can read them."""
        memory, written = self.memory, list[torch.Tensor]()
        self._looked += 1
        if self.first is None and memory.setting.device.type == "cpu":
            for access in accesses(operation):
                with suppress(MemoryFaultError):  # a micro-batch, a file or memory of autograd
                    if access.writes:
                        written += [each for _, each in memory.pieces(access.view)]
        return CheckedOperation(operation.id, step, self._looked, written)

    def look(self, looking: CheckedOperation) -> None:
        """Record `looking` if it wrote NaN and is the first operation to do so."""
        if has_no_number(looking.written):
            seen = NanOrigin(
                step=looking.step,
                place=looking.place,
                rank=self._rank,
                operation=looking.operation,
            )
            self.first = seen if self.first is None else min(seen, self.first)

    def of_run(self, losses: Iterable[float], step: int) -> NanOrigin | None:
        """Return the first operation that wrote NaN, if a result or a loss is NaN.

        On a GPU the host does not check each operation, so only the rank is known.
        """
        program, memory = self.memory.program, self.memory
        kept = (name for name in program.persistent if program.by_name[name].kind in STATE)
        left = (memory.left(name) for name in kept)
        if not any(math.isnan(loss) for loss in losses) and not has_no_number(left):
            return None
        return self.first or NanOrigin(
            step=step, place=sys.maxsize, rank=self._rank, operation="an operation"
        )

    @property
    def _rank(self) -> int:
        return self.memory.schedule.mesh.rank(self.memory.coordinates)
