"""What comes before what, and where that goes round in a circle."""

from collections.abc import Iterator


class WaitGraph:
    """What waits for what. Each node has the nodes that come before it, and why they do."""

    def __init__(self) -> None:
        self.before: list[list[tuple[int, str]]] = []
        self.label: list[tuple[str, str]] = []

    def node(self, role: str, operation: str) -> int:
        """A new node."""
        self.before.append([])
        self.label.append((role, operation))
        return len(self.before) - 1

    def wait(self, node: int, other: int | None, why: str) -> None:
        """`node` does not happen before `other`."""
        if other is not None:
            self.before[node].append((other, why))

    def cycles(self) -> Iterator[list[tuple[int, str]]]:
        """Cycles that share no node, each from a node to what it waits for, until none is left."""
        waiting = [len(before) for before in self.before]
        behind: list[list[int]] = [[] for _ in self.before]
        for node, before in enumerate(self.before):
            for other, _ in before:
                behind[other].append(node)
        ready = [node for node, count in enumerate(waiting) if not count]
        happened = [False] * len(self.before)
        first = 0
        while True:
            while ready:
                node = ready.pop()
                if happened[node]:
                    continue
                happened[node] = True
                for other in behind[node]:
                    waiting[other] -= 1
                    if not waiting[other]:
                        ready.append(other)
            while first < len(happened) and happened[first]:
                first += 1
            if first == len(happened):
                return
            cycle = self._cycle(first, happened)
            yield cycle
            ready = [node for node, _ in cycle]

    def _cycle(self, start: int, happened: list[bool]) -> list[tuple[int, str]]:
        """Follow what has not happened from `start` on, until it comes round."""
        path: list[tuple[int, str]] = []
        place: dict[int, int] = {}
        node = start
        while node not in place:
            place[node] = len(path)
            other, why = next(each for each in self.before[node] if not happened[each[0]])
            path.append((node, why))
            node = other
        return path[place[node] :]
