"""Host time of operations in CUDA graphs, each launched as one before its first operation."""

import re
from dataclasses import dataclass

from zsim.schedule.operation import (
    BACKWARDS,
    Action,
    Communication,
    Compute,
    Copy,
    Fill,
    Operation,
    Together,
)
from zsim.strategy.cuda_graphs import OF_ITERATION

GRAPH_PS, NODE_PS = 2_500_000, 1_000
"""Picoseconds to launch a graph without branches again, and additional ones for each node.

H. Hoffman and F. Oh, "Constant Time Launch for Straight-Line CUDA Graphs and Other Performance
Enhancements" (developer.nvidia.com/blog, 11 September 2024): 2.5 us and about 1 ns a node with CUDA
12.6, on a Xeon Silver 4208 with an RTX 3060; 2 us and 200 ns a node with CUDA 11.8."""

OF_SEGMENT = re.compile(r"/([^/]+)/(?:forward|recompute|backward)(\d+)/")
"""Unit and segment in the name of an exchange or copy that belongs to a segment."""

PASSES = (Action.FORWARD, Action.RECOMPUTE, *BACKWARDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphedWork:
    """The operations of a rank that are in CUDA graphs.

    Attributes:
        iteration: all operations of forward and backward are in one graph.
        segments: captured segments: the name of the unit, and the number of the segment.
        halved: segments with one half in a graph.
        first, last: the segments that start a graph in forward, and in backward.
        python_ps: picoseconds of Python of the rest of a block, before each graph of its half.
    """

    iteration: bool = False
    segments: frozenset[tuple[str, int]] = frozenset()
    halved: frozenset[tuple[str, int]] = frozenset()
    first: frozenset[tuple[str, int]] = frozenset()
    last: frozenset[tuple[str, int]] = frozenset()
    python_ps: int = 0

    def issue_ps(self, operation: Operation, *, alone_ps: int, call_ps: int) -> int:
        """Return the picoseconds in which the host issues `operation`.

        `alone_ps` is the time outside of graphs, `call_ps` the time to replay a graph.
        """
        if not self.iteration:
            return self._of_segment(operation, alone_ps, call_ps)
        if isinstance(operation, Compute) and operation.action is Action.LOAD:
            # the batch is copied to the graph's input
            return GRAPH_PS + call_ps if operation.micro_batch == 0 else NODE_PS
        if operation.id.startswith(OF_ITERATION):
            return NODE_PS * _nodes(operation)
        return alone_ps

    def _of_segment(self, operation: Operation, alone_ps: int, call_ps: int) -> int:
        if not isinstance(operation, Compute):
            found = OF_SEGMENT.search(operation.id)
            if found is None or (found.group(1), int(found.group(2))) not in self.segments:
                return alone_ps
            return NODE_PS * _nodes(operation)
        key = (operation.unit, operation.segment)
        if operation.action not in PASSES or key not in self.segments | self.halved:
            return alone_ps
        begin = self.last if operation.action in BACKWARDS else self.first
        launch_ps = GRAPH_PS + call_ps + self.python_ps if key in begin else 0
        rest_ps = alone_ps // 2 if key in self.halved else 0
        return launch_ps + rest_ps + NODE_PS * _nodes(operation)


def _nodes(operation: Operation) -> int:
    """Return the nodes of an operation in a graph."""
    match operation:
        case Compute():
            return max(1, len(operation.kernels))
        case Copy():
            return operation.launches
        case Fill() | Communication() | Together():
            return 1
        case _:
            return 0
