"""Grouping: operations that are issued as one (`Together`) are all of one kind.

Runtimes coalesce collectives of one kind alone (torch.distributed's coalescing manager), and what a
group of several kinds would cost or do is not defined here. Sends and receives are one kind.
"""

from collections.abc import Iterator

from zsim.check.finding import Finding
from zsim.check.subject import Subject
from zsim.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Receive,
    ReduceScatter,
    Send,
    Together,
)

KINDS: dict[type[Communication], str] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    Broadcast: "broadcast",
    ReduceScatter: "reduce_scatter",
    Send: "send or receive",
    Receive: "send or receive",
}


def mixed(subject: Subject, invariant: str) -> Iterator[Finding]:
    """Find each `Together` whose members are of several kinds, for the family `invariant`."""
    for each in subject.programs:
        for _, numbered in each.parts:
            for number in numbered.communications:
                operation = numbered.operations[number]
                if not isinstance(operation, Together):
                    continue
                kinds = [KINDS[type(member)] for member in operation.members]
                if len(set(kinds)) > 1:
                    named = zip(operation.members, kinds, strict=True)
                    yield Finding(
                        invariant=invariant,
                        role=each.program.role,
                        operation=operation.id,
                        why="operations issued as one must be of one kind: "
                        + ", ".join(dict.fromkeys(kinds)),
                        witness=tuple(f"{member.id}: {kind}" for member, kind in named),
                    )
