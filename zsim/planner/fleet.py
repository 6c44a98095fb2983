"""GPUs that may be used, and how they are dealt out to axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Changes = Mapping[str, object]
"""Values by key of a scenario: `{"zero.stage": 3}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """GPUs of one kind: how many, how many of them are on a node, and the changes that say so."""

    gpus: int
    gpus_per_node: int
    changes: Changes = field(default_factory=dict[str, object])

    @property
    def nodes(self) -> int:
        """Nodes that the GPUs are on."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Ranks of the axes beside the data axis, and of it those that share a sequence."""

    tensor: int
    pipeline: int
    replicate: int
    context: int = 1

    def data(self, gpus: int) -> int | None:
        """Return the ranks that are left for the data axis; None if the axes do not fill GPUs."""
        data, left = divmod(gpus, self.tensor * self.pipeline * self.replicate)
        if left or data % self.context:
            return None
        is_sharded = self.replicate == 1 or data > 1
        return data if is_sharded else None
