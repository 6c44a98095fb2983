"""Buckets: which parameters are gathered and reduced as one, and where each lies.

A bucket holds whole parameters and is padded to a multiple of the data axis, so that every rank
owns an equal shard. In stage 3 a bucket never crosses a unit; in the others it may, and is filled
in the order of backward, so that it is complete as early as can be. A parameter that several units
use is a bucket of its own.
"""

from collections import Counter
from dataclasses import dataclass

from zsim.layout import Layout, Piece
from zsim.model import Model, Parameter
from zsim.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parameters that one unit has in one bucket: `size` elements from `start` on."""

    bucket: int
    start: int
    size: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat tensor: `elements` of parameters, then padding up to `padded`."""

    index: int
    layout: Layout
    elements: int
    shard: int
    units: tuple[int, ...]

    @property
    def padded(self) -> int:
        """Elements with padding."""
        return self.layout.elements

    @property
    def name(self) -> str:
        """Prefix of its buffers and operations."""
        return self.layout.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All buckets, in the order of their first use in forward, and each unit's runs in them."""

    all: tuple[Bucket, ...]
    runs: tuple[tuple[Run, ...], ...]


def fill(model: Model, strategy: Strategy) -> Buckets:
    """Distribute the parameters of `model` over buckets."""
    uses = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    groups: list[list[Parameter]] = []
    open_group: list[Parameter] = []
    for unit in reversed(model.units):
        if strategy.stage == 3:
            open_group = []
        for parameter in unit.parameters:
            if uses[parameter.name] > 1:
                if all(parameter not in group for group in groups):
                    groups.append([parameter])
                continue
            size = sum(member.elements for member in open_group)
            if not open_group or size + parameter.elements > strategy.bucket_elements:
                open_group = []
                groups.append(open_group)
            open_group.append(parameter)
    return _number(model, strategy, groups)


def _number(model: Model, strategy: Strategy, groups: list[list[Parameter]]) -> Buckets:
    """Name the groups in the order of their first use in forward, and find each unit's runs."""
    owner = {member.name: id(group) for group in groups for member in group}
    by_id = {id(group): group for group in groups}
    order: list[int] = []
    users: dict[int, list[int]] = {}
    for index, unit in enumerate(model.units):
        for parameter in unit.parameters:
            group = owner[parameter.name]
            if group not in users:
                order.append(group)
            if index not in users.setdefault(group, []):
                users[group].append(index)
    number = {group: position for position, group in enumerate(order)}
    starts: dict[str, int] = {}
    made: list[Bucket] = []
    for position, group in enumerate(order):
        pieces: list[Piece] = []
        end = 0
        for member in by_id[group]:
            copies = ("tensor",) if model.tensor > 1 and not member.tensor_sharded else ()
            pieces.append(
                Piece(parameter=member.name, start=end, size=member.elements, copies=copies)
            )
            starts[member.name] = end
            end += member.elements
        shard = -(-end // strategy.data)
        layout = Layout(
            name=f"bucket{position}",
            pieces=tuple(pieces),
            elements=shard * strategy.data,
            axis="data",
        )
        made.append(
            Bucket(
                index=position,
                layout=layout,
                elements=end,
                shard=shard,
                units=tuple(users[group]),
            )
        )
    return Buckets(all=tuple(made), runs=_runs(model, owner, number, starts))


def _runs(
    model: Model, owner: dict[str, int], number: dict[int, int], starts: dict[str, int]
) -> tuple[tuple[Run, ...], ...]:
    runs: list[tuple[Run, ...]] = []
    for unit in model.units:
        members: dict[int, list[Parameter]] = {}
        for parameter in unit.parameters:
            members.setdefault(number[owner[parameter.name]], []).append(parameter)
        runs.append(
            tuple(
                Run(
                    bucket=bucket,
                    start=starts[own[0].name],
                    size=sum(parameter.elements for parameter in own),
                    parameters=tuple(own),
                )
                for bucket, own in members.items()
            )
        )
    return tuple(runs)
