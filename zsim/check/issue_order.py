"""Order across communicators: all ranks issue the collectives of all communicators in one order.

Proved for setup and the step, for every way through the branches: the order in which hosts issue
collectives, taken over all ranks, has no cycle, whatever streams they are on. NCCL asks for that
where kernels of several communicators share a GPU: one that has started holds it until its peers
have started too, and two that wait for each other on two ranks never end. Progress knows of streams
and does not see that; a schedule that breaks this makes progress as long as nothing is shared.

Assumed: operations match (matching); sends and receives are left to progress. While all ranks play
one role there is one order, and nothing to prove.

Cost: one look at each collective of each cell of ranks that no role and no group tells apart. That
is exact: a cycle over cells is one over ranks, since from any rank of a cell the next operation
leads to some rank of the next cell, and ranks are finite.
"""

from itertools import pairwise, product

from zsim.check.cell import Cell, cells, communicators
from zsim.check.finding import Finding
from zsim.check.subject import NumberedProgram, Subject
from zsim.check.wait_graph import WaitGraph
from zsim.numbered import Numbered
from zsim.operation import Communication, Receive, Send, Together
from zsim.order import OUTCOMES_MAX

INVARIANT = "order across communicators"

Instance = tuple[str, int, int]
"""Group, which of its communicators, and how many operations were issued on it before."""


def examine(subject: Subject) -> list[Finding]:
    """Cycles of collectives that ranks issue in different orders."""
    schedule = subject.schedule
    if len(schedule.roles) == 1:
        return []
    among = cells(schedule)
    of: dict[Cell, dict[str, int]] = {cell: {} for cell in among}
    for group in schedule.groups:
        for number, each in enumerate(communicators(schedule.mesh, group, among)):
            for cell, _ in each.members:
                of[cell][group.name] = number
    by_role = {each.program.role: each for each in subject.programs}
    branches = sorted(
        {
            numbered.operations[number].id
            for each in subject.programs
            for _, numbered in each.parts
            for number in numbered.sides
        }
    )
    if 2 ** len(branches) > OUTCOMES_MAX:
        return []  # a finding of progress
    found: dict[frozenset[str], Finding] = {}
    for choice in product((True, False), repeat=len(branches)):
        taken = {name for name, then in zip(branches, choice, strict=True) if then}
        for part in range(2):
            for operations, finding in _cycles(by_role, of, part, taken):
                found.setdefault(operations, finding)
    return list(found.values())


def _cycles(
    by_role: dict[str, NumberedProgram],
    of: dict[Cell, dict[str, int]],
    part: int,
    taken: set[str],
) -> list[tuple[frozenset[str], Finding]]:
    graph = WaitGraph()
    nodes: dict[Instance, int] = {}
    told: set[tuple[Instance, Instance]] = set()
    for cell, groups in of.items():
        numbered = by_role[cell.role].parts[part][1]
        counts = dict.fromkeys(groups, 0)
        issued: list[tuple[Instance, str]] = []
        for number in _taken(numbered, numbered.items, taken):
            group = numbered.group[number]
            if group in groups and _is_collective(numbered, number):
                issued.append(
                    ((group, groups[group], counts[group]), numbered.operations[number].id)
                )
                counts[group] += 1
        for instance, name in issued:
            if instance not in nodes:
                nodes[instance] = graph.node(cell.role, name)
        for (one, before), (other, after) in pairwise(issued):
            if (one, other) not in told:
                told.add((one, other))
                why = f"{cell.role} issues {before}, then {after}"
                graph.wait(nodes[other], nodes[one], why)
    found: list[tuple[frozenset[str], Finding]] = []
    for cycle in graph.cycles():
        names = frozenset(graph.label[node][1] for node, _ in cycle)
        roles = sorted({why.split(" issues ")[0] for _, why in cycle})
        finding = Finding(
            invariant=INVARIANT,
            role=" and ".join(roles),
            operation=min(names),
            why="ranks issue collectives of several communicators in different orders",
            witness=tuple(why for _, why in reversed(cycle)),
        )
        found.append((names, finding))
    return found


def _taken(numbered: Numbered, items: list[int], taken: set[str]) -> list[int]:
    """Operations in the order of issue, branches taken as `taken` says."""
    if not numbered.sides:
        return items
    found: list[int] = []
    for number in items:
        found.append(number)
        if number in numbered.sides:
            then, otherwise = numbered.sides[number]
            side = then if numbered.operations[number].id in taken else otherwise
            found += _taken(numbered, side, taken)
    return found


def _is_collective(numbered: Numbered, number: int) -> bool:
    operation = numbered.operations[number]
    members = operation.members if isinstance(operation, Together) else (operation,)
    return any(
        isinstance(member, Communication) and not isinstance(member, Send | Receive)
        for member in members
    )
