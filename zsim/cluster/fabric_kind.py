"""Kinds of fabrics: how the NICs of different nodes (or domains) are connected.

A kind holds the properties that its fabrics share; `zsim.cluster.files.fabric` reads fabric files.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from zsim.config_error import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricKind:
    """One kind of fabric.

    Attributes:
        name: name of the kind in fabric files.
        has_tiers: it may have tiers of switches; needs_tiers: it has at least one tier.
        has_edges: it is a list of links, without tiers.
        leaf_rails: each leaf has one switch for every rail (index of a NIC in its node).
        rails_meet: NICs of different rails reach each other over the fabric.
        above_nics: name of the level above the NICs if there are no tiers.
        summary: text about the fabric, where {edges} is the number of links; if empty, the name.
    """

    name: str
    has_tiers: bool = False
    needs_tiers: bool = False
    has_edges: bool = False
    leaf_rails: bool = False
    rails_meet: bool = True
    above_nics: str = "switch"
    summary: str = ""

    def __str__(self) -> str:
        return self.name

    def as_json(self) -> object:
        """Return the JSON of the kind in job files: its name, or all its fields if it is new."""
        return self.name if self in SHIPPED else asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "FabricKind":
        """Return the kind from the JSON that `as_json` returned."""
        for kind in SHIPPED:
            if value == kind.name:
                return kind
        if not isinstance(value, dict):
            names = ", ".join(kind.name for kind in SHIPPED)
            raise ValueError(f"{shown(value)} must be one of {names}, or an object")  # noqa: TRY004 (told as a line)
        given = cast("dict[str, Any]", value)
        wanted = {each.name: type(getattr(SINGLE_SWITCH, each.name)) for each in fields(cls)}
        wrong = [name for name in given if not isinstance(given[name], wanted.get(name, ()))]
        if wrong or set(given) != set(wanted):
            raise ValueError(f"an object must have {', '.join(wanted)}, true or false or a string")
        return cls(**given)

    @property
    def on_rails(self) -> bool:
        """True if bytes leave a node on the same rail on which they enter the other node."""
        return self.leaf_rails or not self.rails_meet

    def has_rails(self, tier: int) -> bool:
        """Return True if a group of the tier at index `tier` has one switch for each rail."""
        return not self.rails_meet or (self.leaf_rails and not tier)


SINGLE_SWITCH = FabricKind(name="single_switch", summary="one switch that limits nothing")
"""All NICs on one switch."""

FAT_TREE = FabricKind(name="fat_tree", has_tiers=True, needs_tiers=True)
"""All NICs of a node on one leaf; leaves meet on spines, these on cores."""

RAIL_OPTIMIZED = FabricKind(
    name="rail_optimized", has_tiers=True, needs_tiers=True, leaf_rails=True
)
"""NIC j of every node on leaf j of its group of nodes; leaves meet on spines."""

RAIL_ONLY = FabricKind(
    name="rail_only", has_tiers=True, rails_meet=False, above_nics="switch of its rail"
)
"""One network for each NIC number; bytes change rails only inside a node."""

EXPLICIT = FabricKind(
    name="explicit", has_edges=True, above_nics="fabric", summary="{edges} links as listed"
)
"""The switches and links that a file lists."""

TORUS = FabricKind(name="torus", has_edges=True, above_nics="torus", summary="torus, {edges} links")
"""Nodes in rings along each dimension, without switches."""

DRAGONFLY = FabricKind(
    name="dragonfly", has_edges=True, above_nics="router", summary="dragonfly, {edges} links"
)
"""Groups of routers; the routers of a group, and all groups, are joined pairwise."""

SHIPPED = (SINGLE_SWITCH, FAT_TREE, RAIL_OPTIMIZED, RAIL_ONLY, EXPLICIT, TORUS, DRAGONFLY)
