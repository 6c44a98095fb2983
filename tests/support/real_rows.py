"""An oracle for training with experts: it runs a schedule, and plain training, on real rows.

Each replica has tokens that choose two experts by hashed scores; some ranks and experts get none. A
row is one number. Nothing here knows places, bindings or the proof: ranks run the operations of a
schedule in the order of issue, and the plain loop runs token by token. Numbers are residues, and
kernels are hashes of all that they read, linear in gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from experts_by_hand import HIDDEN, WEIGHTS, Plan

from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    Reduction,
    Role,
    View,
)
from zsim.schedule.schedule import Schedule

P = 2**61 - 1
TOP = 2
Row = int
State = dict[str, list[int]]
"""Parameters by name."""


class StuckError(Exception):
    """Blocks or rows do not fit."""


def h(*what: object) -> int:
    """Return a random function of its arguments."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest()) % P


def total(numbers: Sequence[int]) -> int:
    """Return a sum."""
    return sum(numbers) % P


@dataclass(frozen=True)
class Routing:
    """The experts of each token: copies in the order of experts, then of tokens."""

    copies: tuple[tuple[int, int], ...]
    experts: int

    @classmethod
    def of(
        cls, layer: int, hidden: Sequence[int], weight: Sequence[int], experts: int
    ) -> "Routing":
        """Route tokens; in layer 1 only half of the experts are open."""
        opened = range(experts // 2 if layer == 1 and experts >= 2 * TOP else experts)
        found: list[tuple[int, int]] = []
        for token, value in enumerate(hidden):
            scores = sorted(opened, key=lambda each: h("score", value, tuple(weight), each))
            found += [(each, token) for each in scores[:TOP]]
        return cls(tuple(sorted(found)), experts)

    @property
    def chosen(self) -> list[int]:
        """Copies of each expert."""
        return [sum(own == each for own, _ in self.copies) for each in range(self.experts)]


# Kernels, the same in both worlds: hashes of all that is read.


def probability(hidden: int, weight: Sequence[int], expert: int) -> int:
    """Return the weight of an expert for a token."""
    return h("probability", hidden, tuple(weight), expert)


def router_back(
    hidden: Sequence[int], weight: Sequence[int], slopes: Sequence[tuple[int, int, int]]
) -> tuple[list[int], list[int]]:
    """Return gradients of tokens and of the router; slopes are (expert, token, gradient)."""
    below = [0] * len(hidden)
    gradient = [0] * len(weight)
    for expert, token, slope in slopes:
        read = (hidden[token], tuple(weight), expert)
        below[token] = (below[token] + h("probability/x", *read) * slope) % P
        for place in range(len(weight)):
            more = h("probability/w", place, *read) * slope
            gradient[place] = (gradient[place] + more) % P
    return below, gradient


def expert(row: int, weight: int, own: Sequence[int]) -> int:
    """Return the output of an expert for a row, weighed."""
    return h("expert", row, weight, tuple(own))


def expert_back(
    row: int, weight: int, own: Sequence[int], slope: int
) -> tuple[int, int, list[int]]:
    """Return gradients of the row, of its weight, and of the expert."""
    read = (row, weight, tuple(own))
    return (
        h("expert/x", *read) * slope % P,
        h("expert/p", *read) * slope % P,
        [h("expert/w", place, *read) * slope % P for place in range(len(own))],
    )


def mixed(layer: int, hidden: Sequence[int]) -> list[int]:
    """Return hidden states that depend on all tokens of the replica."""
    return [h("mixed", layer, value, total(hidden)) for value in hidden]


def mixed_back(layer: int, hidden: Sequence[int], slope: Sequence[int]) -> list[int]:
    """Return the gradient of the states before they were mixed."""
    return [
        h("mixed/x", layer, value, total(hidden)) * (each + 7 * total(slope)) % P
        for value, each in zip(hidden, slope, strict=True)
    ]


def ends(name: str, read: Sequence[int], weight: Sequence[int]) -> list[int]:
    """Return the embedding, or the loss, of each token."""
    return [h(name, each, own) for each, own in zip(read, weight, strict=True)]


def ends_back(
    name: str, read: Sequence[int], weight: Sequence[int], slope: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return gradients of what was read, and of the parameter."""
    pairs = list(zip(read, weight, slope, strict=True))
    return (
        [h(name, "x", each, own) * by % P for each, own, by in pairs],
        [h(name, "w", each, own) * by % P for each, own, by in pairs],
    )


def batch(replica: int, micro_batch: int) -> list[int]:
    """Return the data of a replica."""
    return [h("data", replica, micro_batch, token) for token in range(HIDDEN)]


def initial(plan: Plan) -> State:
    """Return the parameters at the start."""
    found = {
        name: [h(name, place) for place in range(HIDDEN)]
        for name in ("embed", "head", *(f"router{layer}" for layer in range(plan.layers)))
    }
    for layer in range(plan.layers):
        name = f"experts{layer}"
        found[name] = [h(name, place) for place in range(plan.experts * WEIGHTS)]
    return found


def updated(parameter: int, gradient: int) -> int:
    """Return a parameter after the optimizer."""
    return h("update", parameter, gradient)


def plain(plan: Plan) -> State:
    """Return the parameters after a step of plain training, token by token."""
    state = initial(plan)
    sums = {name: [0] * len(each) for name, each in state.items()}

    def grow(name: str, gradient: Sequence[int], start: int = 0) -> None:
        for place, each in enumerate(gradient, start):
            sums[name][place] = (sums[name][place] + each) % P

    for replica in range(plan.replicas):
        for micro_batch in range(plan.micro_batches):
            read = batch(replica, micro_batch)
            hidden = [ends("embed", read, state["embed"])]
            routes: list[Routing] = []
            for layer in range(plan.layers):
                before, router = hidden[-1], state[f"router{layer}"]
                route = Routing.of(layer, before, router, plan.experts)
                after = mixed(layer, before)
                for own, token in route.copies:
                    weight = probability(before[token], router, own)
                    weights = _of_expert(state, layer, own)
                    after[token] = (after[token] + expert(before[token], weight, weights)) % P
                routes.append(route)
                hidden.append(after)
            slope, gradient = ends_back("loss", hidden[-1], state["head"], [1] * HIDDEN)
            grow("head", gradient)
            for layer in reversed(range(plan.layers)):
                before, router, route = hidden[layer], state[f"router{layer}"], routes[layer]
                below = mixed_back(layer, before, slope)
                slopes: list[tuple[int, int, int]] = []
                for own, token in route.copies:
                    weight = probability(before[token], router, own)
                    weights = _of_expert(state, layer, own)
                    row, of_weight, of_expert = expert_back(
                        before[token], weight, weights, slope[token]
                    )
                    grow(f"experts{layer}", of_expert, own * WEIGHTS)
                    below[token] = (below[token] + row) % P
                    slopes.append((own, token, of_weight))
                routed, gradient = router_back(before, router, slopes)
                grow(f"router{layer}", gradient)
                slope = [total(pair) for pair in zip(below, routed, strict=True)]
            _, gradient = ends_back("embed", read, state["embed"], slope)
            grow("embed", gradient)
    share = pow(plan.replicas * plan.micro_batches, -1, P)
    return {
        name: [
            updated(each, by * share % P) for each, by in zip(state[name], sums[name], strict=True)
        ]
        for name in state
    }


def _of_expert(state: State, layer: int, own: int) -> list[int]:
    return state[f"experts{layer}"][own * WEIGHTS : (own + 1) * WEIGHTS]


# A schedule on ranks.


@dataclass
class Held:
    """The content of a buffer on a rank: numbers, and the micro-batch of its rows."""

    numbers: list[int]
    micro_batch: int = 0
    routing: Routing | None = None


@dataclass
class Ranks:
    """All ranks of a schedule of one role."""

    plan: Plan
    schedule: Schedule
    memory: list[dict[str, Held]] = field(init=False)
    chosen: dict[tuple[int, int, int], list[int]] = field(
        default_factory=dict[tuple[int, int, int], list[int]]
    )
    """Copies of each expert, by layer, micro-batch and rank."""

    def __post_init__(self) -> None:
        self.memory = [{} for _ in range(self.schedule.mesh.size)]
        (self.program,) = self.schedule.programs

    def run(self) -> list[State]:
        """Run setup and a step; return the parameters that each rank holds, by place or None.

        Raises:
            StuckError: ranks do not fit together.
        """
        for operation in (*self.program.setup, *self.program.step):
            try:
                self._run(operation)
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise StuckError(f"{operation.id}: {error!r}") from error
        return [
            {
                name: held.numbers
                for name in self.program.persistent
                if (held := memory.get(name)) is not None
            }
            for memory in self.memory
        ]

    def _run(self, operation: Operation) -> None:
        match operation:
            case Allocate(buffer=name, micro_batch=micro_batch):
                for memory in self.memory:
                    size = self.program.by_name[name].elements
                    memory[name] = Held([h("garbage", name)] * size, micro_batch or 0)
            case Free(buffer=name):
                for memory in self.memory:
                    del memory[name]
            case Compute():
                for rank in range(len(self.memory)):
                    _Kernels(self, rank, operation).run()
            case Copy(source=source, target=target):
                self._copy(operation, source, target)
            case Fill(target=target, value=value):
                for memory in self.memory:
                    held = memory[target.buffer]
                    held.numbers = [int(value)] * len(held.numbers)
            case AllReduce() | Broadcast() | AllToAll():
                self._meet(operation)
            case _:
                pass

    def _copy(self, copy: Copy, source: View, target: View) -> None:
        share = pow(copy.divisor, -1, P)
        for memory in self.memory:
            held = memory[target.buffer]
            given = [each * share % P for each in memory[source.buffer].numbers]
            if copy.accumulate:
                if len(given) != len(held.numbers):
                    raise StuckError(copy.id)
                given = [total(pair) for pair in zip(given, held.numbers, strict=True)]
            held.numbers = given
            held.routing = memory[source.buffer].routing

    def _meet(self, operation: AllReduce | Broadcast | AllToAll) -> None:
        mesh = self.schedule.mesh
        group = self.schedule.group_by_name[operation.group]
        done: set[int] = set()
        for rank in range(mesh.size):
            if rank not in done:
                members = group.members(mesh, mesh.coordinates(rank))
                done |= set(members)
                self._meet_members(operation, members)

    def _meet_members(
        self, operation: AllReduce | Broadcast | AllToAll, members: Sequence[int]
    ) -> None:
        given = [self.memory[rank][operation.source.buffer].numbers for rank in members]
        made: list[list[int]]
        match operation:
            case AllReduce(reduction=reduction):
                whole = [total(each) for each in zip(*given, strict=True)]
                if reduction is Reduction.AVERAGE:
                    share = pow(len(members), -1, P)
                    whole = [each * share % P for each in whole]
                made = [whole] * len(members)
            case Broadcast(root=root):
                made = [given[root]] * len(members)
            case AllToAll():
                blocks = [
                    self._blocks(operation, rank, numbers, members)
                    for rank, numbers in zip(members, given, strict=True)
                ]
                made = [
                    [row for block in blocks for row in block[place]]
                    for place in range(len(members))
                ]
        for rank, numbers in zip(members, made, strict=True):
            self.memory[rank][operation.target.buffer].numbers = list(numbers)

    def _blocks(
        self, operation: AllToAll, rank: int, numbers: Sequence[int], members: Sequence[int]
    ) -> list[list[int]]:
        """Return the block of `rank` for each member."""
        rows = self.program.by_name[operation.source.buffer].rows
        if rows is None:
            size = len(numbers) // len(members)
            sizes = [size] * len(members)
        else:
            micro_batch = self.memory[rank][operation.source.buffer].micro_batch
            own = members.index(rank)
            sizes = [
                sum(self.of_member(rows.layer, micro_batch, rank, place, len(members)))
                if rows.own is RowIndex.SOURCE
                else sum(self.of_member(rows.layer, micro_batch, other, own, len(members)))
                for place, other in enumerate(members)
            ]
        if sum(sizes) != len(numbers):
            raise StuckError(f"{operation.id}: {len(numbers)} rows, {sum(sizes)} in blocks")
        found: list[list[int]] = []
        start = 0
        for size in sizes:
            found.append(list(numbers[start : start + size]))
            start += size
        return found

    def of_member(
        self, layer: int, micro_batch: int, source: int, member: int, members: int
    ) -> list[int]:
        """Return the copies of a source for each expert of a member."""
        chosen = self.chosen[layer, micro_batch, source]
        own = len(chosen) // members
        return chosen[member * own : (member + 1) * own]


@dataclass
class _Kernels:
    """The kernels of an operation on one rank."""

    ranks: Ranks
    rank: int
    compute: Compute

    def of(self, role: Role) -> list[Held]:
        """Return the operands of a role."""
        memory = self.ranks.memory[self.rank]
        return [memory[each.view.buffer] for each in self.compute.operands if each.role is role]

    def run(self) -> None:
        """Run the kernels."""
        action, unit = self.compute.action, self.compute.unit
        if action is Action.INITIALIZE:
            self._initialize()
        elif action is Action.LOAD:
            self.of(Role.OUTPUT)[0].numbers = batch(self.rank, self.compute.micro_batch)
        elif action is Action.UPDATE:
            parameter, gradient = self.of(Role.PARAMETER)[0], self.of(Role.GRADIENT)[0]
            pairs = zip(parameter.numbers, gradient.numbers, strict=True)
            parameter.numbers = [updated(*pair) for pair in pairs]
        elif unit.startswith("layer"):
            ways: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {
                0: (self._route, self._route_back),
                1: (self._permute, self._permute_back),
                2: (self._experts, self._experts_back),
                3: (self._combine, self._combine_back),
            }
            ways[self.compute.segment][action is Action.BACKWARD]()
        else:
            self._ends(unit)

    @property
    def layer(self) -> int:
        """The layer of the segment."""
        return int(self.compute.unit.removeprefix("layer"))

    def _initialize(self) -> None:
        (operand,) = self.compute.operands
        name = operand.view.buffer
        whole = initial(self.ranks.plan)[name]
        buffer = self.ranks.program.by_name[name]
        start = 0
        if buffer.shard is not None:
            coordinates = self.ranks.schedule.mesh.coordinates(self.rank)
            start = coordinates[buffer.shard] * buffer.elements
        self.of(Role.PARAMETER)[0].numbers = whole[start : start + buffer.elements]

    def _ends(self, unit: str) -> None:
        read, weight = self.of(Role.INPUT)[0].numbers, self.of(Role.PARAMETER)[0].numbers
        if self.compute.action is not Action.BACKWARD:
            self.of(Role.OUTPUT)[0].numbers = ends(unit, read, weight)
            return
        slope = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        below, gradient = ends_back(unit, read, weight, (slope * HIDDEN)[:HIDDEN])
        for each in self.of(Role.INPUT_GRADIENT):
            each.numbers = below
        self.of(Role.GRADIENT)[0].numbers = gradient

    def _route(self) -> None:
        hidden, weight = self.of(Role.INPUT)[0].numbers, self.of(Role.PARAMETER)[0].numbers
        route = Routing.of(self.layer, hidden, weight, self.ranks.plan.experts)
        probs, chosen, mapped = self.of(Role.OUTPUT)
        probs.numbers = [probability(hidden[token], weight, own) for own, token in route.copies]
        chosen.numbers = route.chosen
        mapped.numbers, mapped.routing = [0], route
        self.ranks.chosen[self.layer, self.compute.micro_batch, self.rank] = route.chosen

    def _route_back(self) -> None:
        hidden, weight = self.of(Role.INPUT)[0].numbers, self.of(Role.PARAMETER)[0].numbers
        route = Routing.of(self.layer, hidden, weight, self.ranks.plan.experts)
        slopes = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        of_copies = [
            (own, token, slope) for (own, token), slope in zip(route.copies, slopes, strict=True)
        ]
        below, gradient = router_back(hidden, weight, of_copies)
        self.of(Role.INPUT_GRADIENT)[0].numbers = below
        self.of(Role.GRADIENT)[0].numbers = gradient

    def _map(self, held: Held) -> Routing:
        if held.routing is None:
            raise StuckError(f"{self.compute.id}: reads no map")
        return held.routing

    def _permute(self) -> None:
        hidden, mapped = self.of(Role.INPUT)
        copies = self._map(mapped).copies
        self.of(Role.OUTPUT)[0].numbers = [hidden.numbers[token] for _, token in copies]

    def _permute_back(self) -> None:
        hidden, mapped = self.of(Role.INPUT)
        below = [0] * len(hidden.numbers)
        slopes = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        for (_, token), slope in zip(self._map(mapped).copies, slopes, strict=True):
            below[token] = (below[token] + slope) % P
        self.of(Role.INPUT_GRADIENT)[0].numbers = below

    def _combine(self) -> None:
        hidden, back, mapped = self.of(Role.INPUT)
        after = mixed(self.layer, hidden.numbers)
        for (_, token), row in zip(self._map(mapped).copies, back.numbers, strict=True):
            after[token] = (after[token] + row) % P
        self.of(Role.OUTPUT)[0].numbers = after

    def _combine_back(self) -> None:
        hidden, _, mapped = self.of(Role.INPUT)
        slope = self.of(Role.OUTPUT_GRADIENT)[0].numbers
        below, back = self.of(Role.INPUT_GRADIENT)
        below.numbers = mixed_back(self.layer, hidden.numbers, slope)
        back.numbers = [slope[token] for _, token in self._map(mapped).copies]

    def _experts_of_rows(self) -> list[int]:
        """Return the number of the own expert of each row, in the order of the buffer."""
        operand = next(each for each in self.compute.operands if each.role is Role.INPUT)
        buffer = self.ranks.program.by_name[operand.view.buffer]
        rows = buffer.rows
        assert rows is not None
        micro_batch = self.ranks.memory[self.rank][buffer.name].micro_batch
        if rows.own is RowIndex.SOURCE:
            chosen = self.ranks.chosen[rows.layer, micro_batch, self.rank]
            return [own for own, copies in enumerate(chosen) for _ in range(copies)]
        mesh = self.ranks.schedule.mesh
        group = self.ranks.schedule.group_by_name["ep"]
        members = group.members(mesh, mesh.coordinates(self.rank))
        place = members.index(self.rank)
        return [
            own
            for source in members
            for own, copies in enumerate(
                self.ranks.of_member(rows.layer, micro_batch, source, place, len(members))
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
        self.of(Role.GRADIENT)[0].numbers = gradient
        for place, held in enumerate(self.of(Role.INPUT_GRADIENT)):
            held.numbers = [each[place] for each in below]


def trains_plainly(plan: Plan, schedule: Schedule) -> bool:
    """Return True if every rank ends with the parameters of plain training."""
    wanted = plain(plan)
    try:
        states = Ranks(plan, schedule).run()
    except StuckError:
        return False
    (program,) = schedule.programs
    for rank, state in enumerate(states):
        at = schedule.mesh.coordinates(rank)
        for name, numbers in state.items():
            buffer = program.by_name[name]
            start = at[buffer.shard] * buffer.elements if buffer.shard else 0
            if numbers != wanted[name][start : start + buffer.elements]:
                return False
    return True
