"""Kernels of a schedule on real rows: what each computation of a rank reads and writes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts_by_hand import WEIGHTS
from real_tokens import (
    P,
    Router,
    Routing,
    Rule,
    auxiliary_back,
    batch,
    clipping,
    ends,
    ends_back,
    expert,
    expert_back,
    h,
    initial,
    mixed,
    mixed_back,
    plus,
    total,
    updated,
)

from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import Action, Compute, Role

if TYPE_CHECKING:
    from real_rows import Ranks

LAYER, SHARED, AUXILIARY = "layer", "shared", "auxiliary"


class StuckError(Exception):
    """Blocks or rows do not fit, or ranks wait for each other."""


@dataclass
class Held:
    """The content of a buffer on a rank.

    Attributes:
        numbers: its elements, or its rows.
        micro_batch: the micro-batch of its rows.
        routing: the routing, if it holds a map.
        bad: whether a number is not finite.
    """

    numbers: list[int]
    micro_batch: int = 0
    routing: Routing | None = None
    bad: bool = False


def trained_by(backward: Compute) -> str:
    """Return the parameter whose gradient a backward makes; "" for none."""
    unit = backward.unit
    if unit.startswith(LAYER):
        kind = {0: "router", 2: "experts"}.get(backward.segment)
        return f"{kind}{unit.removeprefix(LAYER)}" if kind else ""
    if unit.startswith(SHARED):
        return f"common{unit.removeprefix(SHARED)}"
    return {"embed": "embed", "loss": "head"}.get(unit, "")


@dataclass
class Kernels:
    """The kernels of an operation on one rank."""

    ranks: "Ranks"
    rank: int
    compute: Compute

    def of(self, role: Role) -> list[Held]:
        """Return the operands of a role."""
        memory = self.ranks.memory[self.rank]
        return [memory[each.view.buffer] for each in self.compute.operands if each.role is role]

    def rule(self, role: Role, place: int = 0) -> Rule:
        """Return the rule of the rows of an operand."""
        views = [each.view for each in self.compute.operands if each.role is role]
        return self.ranks.rule(self.rank, views[place].buffer)

    def run(self) -> None:
        """Run the kernels."""
        others: dict[Action, Callable[[], None]] = {
            Action.INITIALIZE: self._initialize,
            Action.LOAD: self._load,
            Action.UPDATE: self._update,
            Action.UNSCALE: self._unscale,
            Action.NORM: self._norm,
            Action.CLIP: self._clip,
            Action.FINITE: self._finite,
        }
        if self.compute.action in others:
            others[self.compute.action]()
            return
        backward = self.compute.action is Action.BACKWARD
        unit = self.compute.unit
        if unit.startswith(LAYER):
            ways: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {
                0: (self._route, self._route_back),
                1: (self._permute, self._permute_back),
                2: (self._experts, self._experts_back),
                3: (self._combine, self._combine_back),
            }
            ways[self.compute.segment][backward]()
        elif unit.startswith(AUXILIARY):
            self._auxiliary(backward=backward)
        else:
            self._ends(unit, backward=backward)
        if backward:
            self._overflow()

    def _overflow(self) -> None:
        """Mark the gradient that is not finite, if it is one of these."""
        found = self.ranks.overflow
        if found is None or found.rank != self.rank:
            return
        if found.micro_batch == self.compute.micro_batch:
            for each in self.of(Role.GRADIENT):
                each.bad = trained_by(self.compute) == found.parameter

    @property
    def layer(self) -> int:
        """The layer of the segment."""
        return int(self.compute.unit.lstrip("abcdefghijklmnopqrstuvwxyz"))

    def _initialize(self) -> None:
        (operand,) = self.compute.operands
        buffer = self.ranks.programs[self.rank].by_name[operand.view.buffer]
        whole = initial(self.ranks.plan)[buffer.layout or buffer.name]
        start = 0
        if buffer.shard is not None:
            coordinates = self.ranks.schedule.mesh.coordinates(self.rank)
            start = coordinates[buffer.shard] * buffer.elements
        self.of(Role.PARAMETER)[0].numbers = whole[start : start + buffer.elements]

    def _load(self) -> None:
        source = self.ranks.source(self.rank)
        self.of(Role.OUTPUT)[0].numbers = batch(source, self.compute.micro_batch)

    def _update(self) -> None:
        parameter, gradient = self.of(Role.PARAMETER)[0], self.of(Role.GRADIENT)[0]
        pairs = zip(parameter.numbers, gradient.numbers, strict=True)
        parameter.numbers = [updated(self.compute.rule, *pair) for pair in pairs]

    def _unscale(self) -> None:
        share = pow(self.ranks.scalars[self.compute.scalars[0]], -1, P)
        for each in self.of(Role.GRADIENT):
            each.numbers = [number * share % P for number in each.numbers]

    def _norm(self) -> None:
        squares = [number * number for each in self.of(Role.GRADIENT) for number in each.numbers]
        self.of(Role.OUTPUT)[0].numbers = [total(squares)]

    def _clip(self) -> None:
        factor = clipping(self.compute.rule, self.of(Role.INPUT)[0].numbers[0])
        for each in self.of(Role.GRADIENT):
            each.numbers = [number * factor % P for number in each.numbers]

    def _finite(self) -> None:
        self.of(Role.OUTPUT)[0].numbers = [int(any(each.bad for each in self.of(Role.GRADIENT)))]

    def _ends(self, unit: str, *, backward: bool) -> None:
        read, weight = self.of(Role.INPUT)[0].numbers, self.of(Role.PARAMETER)[0].numbers
        if not backward:
            self.of(Role.OUTPUT)[0].numbers = ends(unit, read, weight)
            return
        slope = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        each = slope * len(read) if len(slope) == 1 else slope
        below, gradient = ends_back(unit, read, weight, each)
        for held in self.of(Role.INPUT_GRADIENT):
            held.numbers = below
        self._gradient(gradient)

    def _gradient(self, gradient: list[int]) -> None:
        held = self.of(Role.GRADIENT)[0]
        held.numbers, held.bad = gradient, False

    def _auxiliary(self, *, backward: bool) -> None:
        scores, load = (each.numbers for each in self.of(Role.INPUT))
        if not backward:
            self.of(Role.OUTPUT)[0].numbers = [h("auxiliary", self.layer, tuple(scores))]
            return
        slope = self.of(Role.OUTPUT_GRADIENT)[0].numbers[0]
        made = auxiliary_back(self.layer, scores, load, slope)
        self.of(Role.INPUT_GRADIENT)[0].numbers = made

    def _routed(self) -> tuple[list[int], Router, Routing]:
        """Return hidden states, and the router's kernels and choice."""
        hidden = self.of(Role.INPUT)[0].numbers
        weight, *bias = (tuple(each.numbers) for each in self.of(Role.PARAMETER))
        router = Router(weight, bias[0] if bias else ())
        return hidden, router, Routing.of(self.ranks.plan, self.layer, hidden, router)

    def _route(self) -> None:
        hidden, router, route = self._routed()
        plan = self.ranks.plan
        probs, *others = self.of(Role.OUTPUT)
        probs.numbers = [
            0 if row is None else router.probability(hidden[row[1]], row[0])
            for row in route.rows(self.rule(Role.OUTPUT))
        ]
        if plan.auxiliary is not None:
            others.pop(0).numbers = router.scores(hidden, plan.experts)
        others.pop(0).numbers = [*route.chosen]
        if plan.drops is not None:
            others.pop(0).numbers = [*map(len, route.kept(self.rule(Role.OUTPUT)))]
        (mapped,) = others
        mapped.numbers, mapped.routing = [0], route
        if self.compute.action is Action.FORWARD:
            self.ranks.routes[self.layer, self.compute.micro_batch, self.rank] = route

    def _route_back(self) -> None:
        hidden, router, route = self._routed()
        slopes, *of_scores = (each.numbers for each in self.of(Role.OUTPUT_GRADIENT))
        of_copies = [
            (*row, slope)
            for row, slope in zip(route.rows(self.rule(Role.OUTPUT_GRADIENT)), slopes, strict=True)
            if row is not None
        ]
        below, gradient = router.backward(hidden, of_copies, of_scores[0] if of_scores else [])
        self.of(Role.INPUT_GRADIENT)[0].numbers = below
        self._gradient(gradient)

    def _map(self, held: Held) -> Routing:
        if held.routing is None:
            raise StuckError(f"{self.compute.id}: reads no map")
        return held.routing

    def _permute(self) -> None:
        hidden, mapped = self.of(Role.INPUT)
        self.of(Role.OUTPUT)[0].numbers = [
            0 if row is None else hidden.numbers[row[1]]
            for row in self._map(mapped).rows(self.rule(Role.OUTPUT))
        ]

    def _permute_back(self) -> None:
        hidden, mapped = self.of(Role.INPUT)
        below = [0] * len(hidden.numbers)
        slopes = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        rows = self._map(mapped).rows(self.rule(Role.OUTPUT_GRADIENT))
        for row, slope in zip(rows, slopes, strict=True):
            if row is not None:
                below[row[1]] = (below[row[1]] + slope) % P
        self.of(Role.INPUT_GRADIENT)[0].numbers = below

    def _combine(self) -> None:
        hidden, back, *shared, mapped = self.of(Role.INPUT)
        after = mixed(self.layer, hidden.numbers)
        for each in shared:
            after = plus(after, each.numbers)
        rows = self._map(mapped).rows(self.rule(Role.INPUT, 1))
        for row, made in zip(rows, back.numbers, strict=True):
            if row is not None:
                after[row[1]] = (after[row[1]] + made) % P
        self.of(Role.OUTPUT)[0].numbers = after

    def _combine_back(self) -> None:
        hidden, *_, mapped = self.of(Role.INPUT)
        slope = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        below, back, *shared = self.of(Role.INPUT_GRADIENT)
        below.numbers = mixed_back(self.layer, hidden.numbers, slope)
        rows = self._map(mapped).rows(self.rule(Role.INPUT_GRADIENT, 1))
        back.numbers = [0 if row is None else slope[row[1]] for row in rows]
        for each in shared:
            each.numbers = list(slope)

    def _experts_of_rows(self) -> list[int]:
        """Return the number of the own expert of each row, in the order of the buffer."""
        operand = next(each for each in self.compute.operands if each.role is Role.INPUT)
        ranks = self.ranks
        buffer = ranks.programs[self.rank].by_name[operand.view.buffer]
        rows = buffer.rows
        assert rows is not None
        micro_batch = ranks.memory[self.rank][buffer.name].micro_batch
        mesh = ranks.schedule.mesh
        members = ranks.schedule.group_by_name["ep"].members(mesh, mesh.coordinates(self.rank))
        place, sources = members.index(self.rank), members
        size = len(members)
        if rows.own is RowIndex.SOURCE:
            place, sources, size = 0, (self.rank,), 1
        return [
            own
            for source in sources
            for own, copies in enumerate(
                ranks.blocks(rows.count, (rows.layer, micro_batch, source), size)[place]
            )
            for _ in range(copies)
        ]

    def _experts(self) -> None:
        rows, weights = (each.numbers for each in self.of(Role.INPUT))
        own = self.of(Role.PARAMETER)[0].numbers
        self.of(Role.OUTPUT)[0].numbers = [
            expert(row, weight, own[number * WEIGHTS : (number + 1) * WEIGHTS])
            for row, weight, number in zip(rows, weights, self._experts_of_rows(), strict=True)
        ]

    def _experts_back(self) -> None:
        rows, weights = (each.numbers for each in self.of(Role.INPUT))
        own = self.of(Role.PARAMETER)[0].numbers
        slopes = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        gradient = [0] * len(own)
        below: list[tuple[int, int]] = []
        for row, weight, slope, number in zip(
            rows, weights, slopes, self._experts_of_rows(), strict=True
        ):
            start = number * WEIGHTS
            *each, of_expert = expert_back(row, weight, own[start : start + WEIGHTS], slope)
            below.append((each[0], each[1]))
            for place, more in enumerate(of_expert, start):
                gradient[place] = (gradient[place] + more) % P
        self._gradient(gradient)
        for place, held in enumerate(self.of(Role.INPUT_GRADIENT)):
            held.numbers = [each[place] for each in below]
