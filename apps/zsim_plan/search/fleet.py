"""GPUs that a setting may use, and their division into parallel axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Changes = Mapping[str, object]
"""Values by key of a scenario: `{"zero.stage": 3}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """GPUs of one kind: their number, the GPUs per node, and the changes that select them."""

    gpus: int
    gpus_per_node: int
    changes: Changes = field(default_factory=dict[str, object])

    @property
    def nodes(self) -> int:
        """Number of nodes of the GPUs."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of the axes other than data.

    `context` ranks of the data axis share a sequence. Experts of a block are distributed over
    `expert` ranks of the tensor, context and data axes.
    """

    tensor: int
    pipeline: int
    replicate: int
    context: int = 1
    expert: int = 1

    @property
    def cuts_axes(self) -> bool:
        """True if expert ranks cut the tensor or the context axis, which is not modelled."""
        return (
            self.expert > 1
            and self.expert % (self.tensor * self.context) != 0
            and (self.expert != self.tensor)
        )

    def data(self, gpus: int) -> int | None:
        """Return the degree of the data axis; None if the axes do not divide the GPUs."""
        data, left = divmod(gpus, self.tensor * self.pipeline * self.replicate)
        if left or data % self.context or data * self.tensor % self.expert:
            return None
        is_sharded = self.replicate == 1 or data > 1
        return data if is_sharded else None
