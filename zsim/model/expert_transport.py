"""Exchange of token rows by a library in place of NCCL, as a mark of an `AllToAll`.

The result is the same: the rows of each expert arrive at its rank. But a library sends a token once
to each place that has experts of it, and it takes multiprocessors of its own.
"""

from dataclasses import dataclass

from zsim.model.architecture import Architecture
from zsim.model.expert_choice import ExpertChoice
from zsim.strategy.token_dispatch import DispatchLibrary


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


def transport_of(shape: Architecture | None) -> ExpertTransport | None:
    """Return the library that exchanges tokens of experts; None if NCCL does."""
    if shape is None or shape.experts is None or shape.execution.dispatch is None:
        return None
    return ExpertTransport(
        library=shape.execution.dispatch.library,
        choice=ExpertChoice.of(shape.experts),
        width=shape.hidden_size,
        num_sms=shape.execution.dispatch.num_sms,
    )
