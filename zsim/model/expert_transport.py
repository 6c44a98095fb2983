"""Exchange of token rows by a library in place of NCCL, as a mark of an `AllToAll`.

The result is the same: the rows of each expert arrive at its rank. But a library sends a token once
to each place where it has experts, and it occupies multiprocessors. The expected number of
places follows from a uniform choice of experts, without repetition. If experts are chosen from some
of several groups, the groups are chosen uniformly, then the experts in them (DeepSeek-AI 2024,
"DeepSeek-V3", section 2.1.2).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import comb

from zsim.model.architecture import Architecture
from zsim.model.experts import Experts
from zsim.strategy.execution import DispatchLibrary


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """A token's choice of `top_k` of `experts`, from `top_groups` of `groups` equal groups."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups or self.experts % self.groups:
            raise ValueError(
                f"choice: top_groups {self.top_groups} and groups {self.groups} do not fit "
                f"{self.experts} experts"
            )
        if not 1 <= self.top_k <= self.open_to:
            raise ValueError(f"choice: top_k {self.top_k} must be 1 to {self.open_to}")

    @classmethod
    def of(cls, experts: Experts) -> "ExpertChoice":
        """Return the choice of a router."""
        return cls(
            experts=experts.count,
            top_k=experts.top_k,
            groups=experts.groups,
            top_groups=experts.top_groups,
        )

    @property
    def open_to(self) -> int:
        """Number of experts in the chosen groups."""
        return self.experts // self.groups * self.top_groups

    def places(self, count: int) -> float:
        """Return the expected number of places with experts of a token, of `count` equal places.

        If places cut groups, or groups cut places, the choice is taken as without groups.

        Raises:
            ValueError: `count` does not divide the experts.
        """
        if count < 1 or self.experts % count:
            raise ValueError(f"places: {count} must divide the {self.experts} experts")
        return _places(self, count)


@lru_cache(maxsize=1024)
def _places(choice: ExpertChoice, count: int) -> float:
    experts, groups = choice.experts, choice.groups
    own = experts // count
    if groups % count == 0:  # a place has whole groups
        missed = _missed_groups(choice, groups // count)
    elif count % groups == 0:  # a group has whole places
        chosen = choice.top_groups / groups
        missed = 1 - chosen * (1 - _missed(choice.open_to, own, choice.top_k))
    else:
        missed = _missed(experts, own, choice.top_k)
    return count * (1 - missed)


def _missed(experts: int, own: int, top_k: int) -> float:
    """Return the probability that none of `top_k` of `experts` is one of `own`."""
    return comb(experts - own, top_k) / comb(experts, top_k)


def _missed_groups(choice: ExpertChoice, own: int) -> float:
    """Return the probability that no chosen expert is in one of `own` groups."""
    groups, top, each = choice.groups, choice.top_groups, choice.experts // choice.groups
    return sum(
        comb(own, chosen)
        * comb(groups - own, top - chosen)
        / comb(groups, top)
        * _missed(choice.open_to, chosen * each, choice.top_k)
        for chosen in range(min(own, top) + 1)
        if top - chosen <= groups - own
    )


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
