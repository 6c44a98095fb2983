"""Host time to issue operations; a stream cannot start one before the host has issued it."""

from dataclasses import dataclass, fields
from typing import Any, assert_never

from zsim.cluster.profile.graph_launch import GraphedWork
from zsim.schedule.operation import (
    BACKWARDS,
    Action,
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operation,
    SetScalar,
    Together,
)
from zsim.units import PICOSECONDS_PER_SECOND

FORWARD = (Action.FORWARD, Action.RECOMPUTE)


class LaunchError(ValueError):
    """Invalid cost; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCosts:
    """Picoseconds of the host's thread; all 0 if unknown.

    Each kernel in the list of a `Compute` is one launch; a `Compute` without a list is one launch.

    Attributes:
        forward_ps: for each kernel of forward and recompute: the call of the module, the operator,
            and the launch.
        backward_ps: for each kernel of backward: the node of autograd, the operator, the launch.
        operation_ps: for any other kernel, such as those of the optimizer, for each Fill, and for
            each launch of a Copy.
        collective_ps: for each operation of a communicator; operations issued together are one.
        wait_ps: for each dependency of an operation: an event recorded and waited for by a stream
            or by the host.
        segment_ps, unit_ps: for each forward, recompute or backward of a segment, or of a whole
            unit, in addition to its kernels: the Python of the trainer. No profile has them: they
            are not the host's (`zsim.runtimes.host_costs`).
        graphs: the operations in CUDA graphs, which the host launches together; None if there are
            none.
    """

    forward_ps: int = 0
    backward_ps: int = 0
    operation_ps: int = 0
    collective_ps: int = 0
    wait_ps: int = 0
    segment_ps: int = 0
    unit_ps: int = 0
    graphs: GraphedWork | None = None

    def __post_init__(self) -> None:
        for name in (*NAMES, *OF_TRAINER):
            if getattr(self, name) < 0:
                raise LaunchError(f"{name}: {getattr(self, name)} must be at least 0")

    def issue_ps(self, operation: Operation) -> int:
        """Return the picoseconds in which the host issues `operation`, without waiting."""
        alone_ps = self._alone_ps(operation)
        if self.graphs is None:
            return alone_ps
        return self.graphs.issue_ps(operation, alone_ps=alone_ps, call_ps=self.operation_ps)

    def _alone_ps(self, operation: Operation) -> int:
        """Return the picoseconds in which the host issues `operation` outside of graphs."""
        match operation:
            case Compute():
                each = self._kernel_ps(operation.action)
                own = 0
                if operation.unit:
                    own = self.segment_ps + (0 if operation.segment else self.unit_ps)
                kernels = each * max(1, len(operation.kernels))
                return own + kernels + self.wait_ps * len(operation.after)
            case Copy():
                return self.operation_ps * operation.launches + self.wait_ps * len(operation.after)
            case Fill():
                return self.operation_ps + self.wait_ps * len(operation.after)
            case Communication() | Together():
                return self.collective_ps + self.wait_ps * len(operation.after)
            case Free():
                uses = 0 if operation.mode is FreeMode.DEFERRED else len(operation.uses)
                return self.wait_ps * uses
            case HostWait():
                return self.wait_ps
            case Branch(value=None):
                return self.wait_ps * len(operation.after)
            case Branch():  # it also reads a value from the device
                return self.operation_ps + self.wait_ps * len(operation.after)
            case Allocate() | SetScalar():
                return 0
            case _:
                assert_never(operation)

    def _kernel_ps(self, action: Action) -> int:
        if action in FORWARD:
            return self.forward_ps
        return self.backward_ps if action in BACKWARDS else self.operation_ps


OF_TRAINER = ("segment_ps", "unit_ps")
"""Costs of the trainer's own Python, which no file of a host has."""

NAMES = tuple(
    field.name for field in fields(LaunchCosts) if field.name not in (*OF_TRAINER, "graphs")
)
"""Names of all costs of a host, in the order of a file."""

FREE = LaunchCosts()
"""Costs of a host that issues in no time."""


def launch_costs(seconds: dict[str, float]) -> LaunchCosts:
    """Return costs from seconds by name: `forward_s` and so on; missing ones are 0.

    Raises:
        LaunchError: a name is unknown, or a cost is less than 0.
    """
    known = {name.removesuffix("_ps") + "_s": name for name in NAMES}
    for name in seconds:
        if name not in known:
            raise LaunchError(f"{name}: must be one of {', '.join(known)}")
    costs: dict[str, Any] = {
        known[name]: round(each * PICOSECONDS_PER_SECOND) for name, each in seconds.items()
    }
    return LaunchCosts(**costs)


def seconds_of(costs: LaunchCosts) -> dict[str, float]:
    """Return the seconds by name from which `launch_costs` makes `costs`."""
    return {
        name.removesuffix("_ps") + "_s": getattr(costs, name) / PICOSECONDS_PER_SECOND
        for name in NAMES
    }


EAGER = LaunchCosts(
    # PyTorch's operator with its launch: 7.1 us for an addition of 8 kB in bf16 on the host of an
    # A100, called in a loop (github.com/flagos-ai/FlagGems/issues/4558; 8 us in
    # github.com/flagos-ai/Torch-FL/pull/27). nn.Linear takes 5 us more than its operator
    # (github.com/pytorch/pytorch/pull/50431).
    forward_ps=12_100_000,
    # The operator, and the engine's own 3.5 us for each node (the profile of a training with FSDP
    # in github.com/huggingface/blog/issues/1649: 28.3 ms for 8,025 ViewBackward0).
    backward_ps=10_600_000,
    operation_ps=7_100_000,
    # CPU time of c10d::_allgather_base_, mean of 810, in the profile of a training with FSDP
    # (github.com/pytorch/pytorch/issues/102434): 75.7 us.
    collective_ps=75_700_000,
    # An event recorded and waited for, about 1 us (github.com/chelsea0x3b/cudarc/pull/335).
    wait_ps=1_000_000,
)
"""PyTorch without compilation or CUDA graphs, on servers of 2021 to 2025, of any host.

Published times differ more between versions of PyTorch than between hosts.
"""
