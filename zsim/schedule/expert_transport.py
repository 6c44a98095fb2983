"""Libraries that exchange tokens of experts in place of NCCL, as a mark of an `AllToAll`.

The result is the same: the rows of each expert arrive at its rank. But a library sends a token once
to each place that has experts of it, and it takes multiprocessors of its own.
"""

from dataclasses import dataclass
from enum import StrEnum

from zsim.model.expert_choice import ExpertChoice


class DispatchLibrary(StrEnum):
    """Libraries of `--moe-flex-dispatcher-backend`."""

    DEEPEP = "deepep"
    """DeepEP 1.x, normal kernels: a token crosses once to each node, on the rail of its GPU, and
    goes from there once to each GPU."""
    HYBRIDEP = "hybridep"
    """HybridEP, the branch hybrid-ep of DeepEP: the same with TMA copies, in fewer blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTransport:
    """A library that executes an exchange of token rows.

    Attributes:
        library: the library.
        choice: the choice of experts, on which the number of copies depends.
        width: elements of a row.
        num_sms: multiprocessors that its kernel occupies.
        plans: ranks first agree on the rows of each; exchanges of the same routing need not again.
        returns: rows go back to the ranks of their tokens, and are added on the way ("combine").
        rides: the rows are sent by the kernel of another exchange, as weights of tokens are.
    """

    library: DispatchLibrary
    choice: ExpertChoice
    width: int
    num_sms: int
    plans: bool = False
    returns: bool = False
    rides: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_sms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
