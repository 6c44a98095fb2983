"""A few steps of one rank, unrolled: what has finished before what, by what each wait means."""

from dataclasses import dataclass, field

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    SetScalar,
)
from zsim.schedule.schedule import Program

Flags = dict[str, bool]
"""Of a step: which buffers that branches read hold something that is not zero."""


def decided_by(branch: Branch) -> str:
    """The buffer that a branch reads, or the scalar."""
    return branch.value.buffer if branch.value is not None else branch.scalar or ""


@dataclass
class Run:
    """The steps that have run: each operation with the numbers of what had finished at its start.

    What the host and the streams know now, and who waits for an operation or on a communicator.
    """

    program: Program
    host: set[int] = field(default_factory=set[int])
    tails: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    latest: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    done: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    previous: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    ran: list[tuple[Operation, set[int]]] = field(default_factory=list[tuple[Operation, set[int]]])

    def step(self, flags: Flags) -> None:
        """One more step; the first one comes after a setup that has been drained."""
        self.done = {}
        self._issue(self.program.step, flags)
        self.previous |= self.done

    def _issue(self, operations: tuple[Operation, ...], flags: Flags) -> None:
        for operation in operations:
            match operation:
                case Allocate() | SetScalar():
                    pass
                case HostWait():
                    self.host |= self._of(operation.operation)
                case Free(uses=uses, mode=mode):
                    for use in uses:
                        if mode is FreeMode.HOST:
                            self.host |= self._of(use)
                        else:
                            home = self.program.by_name[operation.buffer].home
                            self.tails.setdefault(home, set()).update(self._of(use), self.host)
                case Branch(after=after):
                    for edge in after:
                        self.host |= self._of(edge)
                    self.ran.append((operation, set(self.host)))
                    is_set = flags[decided_by(operation)]
                    side = operation.then if is_set else operation.otherwise
                    self._issue(side, flags)
                case _:
                    known = self.tails.get(operation.stream, set()) | self.host
                    for edge in operation.after:
                        known |= self._of(edge)
                    group = getattr(operation, "group", "")
                    if group:
                        known |= self.latest.get(group, set())
                    self.ran.append((operation, known))
                    done = known | {len(self.ran) - 1}
                    self.tails[operation.stream] = self.done[operation.id] = done
                    if group:
                        self.latest[group] = done

    def _of(self, edge: Edge) -> set[int]:
        if isinstance(edge, Previous):
            return self.previous.get(edge.operation, set())
        return self.done.get(edge, set())
