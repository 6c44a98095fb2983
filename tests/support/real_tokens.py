"""Training with experts, token by token in one process: kernels, routing, and one step.

Each source has tokens that choose two experts by hashed scores; some ranks and experts get none. A
row is one number. Nothing here knows places, bindings or the proof. Numbers are residues, and
kernels are hashes of all that they read, linear in gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from experts_by_hand import BIAS, CLIP, HIDDEN, WEIGHTS, Plan

from zsim.model.experts import Drops
from zsim.strategy.optimizer_rule import SGD, Optimizer

P = 2**61 - 1
TOP = 2
State = dict[str, list[int]]
"""Parameters by name."""


def h(*what: object) -> int:
    """Return a random function of its arguments."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest()) % P


def total(numbers: Sequence[int]) -> int:
    """Return a sum."""
    return sum(numbers) % P


def plus(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return sums, element by element."""
    return [total(pair) for pair in zip(one, other, strict=True)]


@dataclass(frozen=True)
class Rule:
    """Which rows of an expert are sent: all, or `capacity` of them; `padded` fills up to `size`."""

    drops: Drops | None = None
    size: int | None = None


@dataclass(frozen=True)
class Routing:
    """The experts of each token: for each expert, (token, weight) in the order of tokens."""

    of_experts: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, plan: Plan, layer: int, hidden: Sequence[int], router: "Router") -> "Routing":
        """Route tokens; in layer 1 only half of the experts are open."""
        experts = plan.experts
        opened = range(experts // 2 if layer == 1 and experts >= 2 * TOP else experts)
        rows: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
        for token, value in enumerate(hidden):
            for each in sorted(opened, key=lambda own: router.choice(value, own))[:TOP]:
                rows[each].append((token, router.probability(value, each)))
        return cls(tuple(map(tuple, rows)))

    @property
    def chosen(self) -> list[int]:
        """Rows of each expert before any is dropped."""
        return [*map(len, self.of_experts)]

    def kept(self, rule: Rule) -> list[list[int]]:
        """Return the tokens of each expert that are not dropped."""
        found: list[list[int]] = []
        for rows in self.of_experts:
            ranked = rows
            if rule.drops is not None:
                if rule.drops.by == "probs":
                    ranked = tuple(sorted(rows, key=lambda row: -row[1]))
                ranked = ranked[: rule.drops.capacity]
            found.append(sorted(token for token, _ in ranked))
        return found

    def sent(self, rule: Rule) -> list[int]:
        """Return the rows of each expert that are sent, with padding."""
        kept = [*map(len, self.kept(rule))]
        return kept if rule.size is None else [rule.size] * len(kept)

    def copies(self, rule: Rule) -> list[tuple[int, int]]:
        """Return (expert, token) of the rows that are kept, in that order."""
        return [(own, token) for own, tokens in enumerate(self.kept(rule)) for token in tokens]

    def rows(self, rule: Rule) -> list[tuple[int, int] | None]:
        """Return the rows of a buffer by expert; None for padding."""
        found: list[tuple[int, int] | None] = []
        for own, tokens in enumerate(self.kept(rule)):
            padding = 0 if rule.size is None else rule.size - len(tokens)
            if padding < 0:
                raise ValueError(f"{len(tokens)} rows where {rule.size} fit")
            found += [*((own, token) for token in tokens), *[None] * padding]
        return found


def rule_of(plan: Plan) -> Rule:
    """Return the rule of a plan."""
    return Rule(plan.drops, plan.sent // plan.experts if plan.padded else None)


@dataclass(frozen=True)
class Router:
    """The kernels of a router, on its weight and the bias of experts."""

    weight: tuple[int, ...]
    bias: tuple[int, ...]

    def choice(self, hidden: int, expert: int) -> int:
        """Return the score by which a token chooses experts."""
        return h("choice", hidden, self.weight, expert, self.bias[expert : expert + 1])

    def probability(self, hidden: int, expert: int) -> int:
        """Return the weight of an expert for a token."""
        return h("probability", hidden, self.weight, expert)

    def scores(self, hidden: Sequence[int], experts: int) -> list[int]:
        """Return the mean score of each expert over all tokens."""
        return [
            total([h("score", value, self.weight, own) for value in hidden])
            for own in range(experts)
        ]

    def backward(
        self,
        hidden: Sequence[int],
        slopes: Sequence[tuple[int, int, int]],
        of_scores: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Return gradients of tokens and of the weight; slopes are (expert, token, gradient)."""
        below, gradient = [0] * len(hidden), [0] * len(self.weight)
        terms = [(token, slope, ("probability", own)) for own, token, slope in slopes]
        for own, slope in enumerate(of_scores):
            terms += [(token, slope, ("score", own)) for token in range(len(hidden))]
        for token, slope, name in terms:
            read = (name, hidden[token], self.weight)
            below[token] = (below[token] + h("router/x", *read) * slope) % P
            for place in range(len(gradient)):
                gradient[place] = (gradient[place] + h("router/w", place, *read) * slope) % P
        return below, gradient


# Kernels, the same in both worlds: hashes of all that is read.


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
    """Return hidden states that depend on all tokens of the source."""
    return [h("mixed", layer, value, total(hidden)) for value in hidden]


def mixed_back(layer: int, hidden: Sequence[int], slope: Sequence[int]) -> list[int]:
    """Return the gradient of the states before they were mixed."""
    return [
        h("mixed/x", layer, value, total(hidden)) * (each + 7 * total(slope)) % P
        for value, each in zip(hidden, slope, strict=True)
    ]


def ends(name: str, read: Sequence[int], weight: Sequence[int]) -> list[int]:
    """Return the embedding, the loss, or the output of a shared expert for each token."""
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


def auxiliary_back(layer: int, scores: Sequence[int], load: Sequence[int], slope: int) -> list[int]:
    """Return the gradient of the mean scores in an auxiliary loss."""
    read = (layer, tuple(scores), tuple(load))
    return [h("auxiliary/x", *read, own) * slope % P for own in range(len(scores))]


def batch(source: int, micro_batch: int) -> list[int]:
    """Return the data of a source."""
    return [h("data", source, micro_batch, token) for token in range(HIDDEN)]


@cache
def initial(plan: Plan) -> State:
    """Return the parameters at the start; nobody changes the lists."""
    return {
        each.name: [h(each.name, place) for place in range(each.elements)]
        for each in plan.model().parameters
    }


def updated(rule: object, parameter: int, gradient: int) -> int:
    """Return a parameter after the optimizer."""
    return h("update", repr(rule), parameter, gradient)


def clipping(rule: object, squares: int) -> int:
    """Return the factor of gradients with a sum of squares."""
    return h("clip", repr(rule), squares)


def router_of(plan: Plan, state: State, layer: int) -> Router:
    """Return the router of a layer."""
    bias = state[f"bias{layer}"] if plan.bias else []
    return Router(tuple(state[f"router{layer}"]), tuple(bias))


@cache
def plain(plan: Plan, *, overflows: bool = False) -> State:
    """Return the parameters after a step; one that overflows moves biases only."""
    step = _Step(plan)
    step.run()
    state = initial(plan)
    share = pow(plan.divisor, -1, P)
    means = {name: [each * share % P for each in own] for name, own in step.sums.items()}
    if plan.clipped:
        factor = clipping(CLIP, total([each * each for own in means.values() for each in own]))
        means = {name: [each * factor % P for each in own] for name, own in means.items()}

    def moved(name: str, by: Sequence[int], rule: Optimizer) -> list[int]:
        return [updated(rule, *pair) for pair in zip(state[name], by, strict=True)]

    found = state if overflows else {name: moved(name, by, SGD()) for name, by in means.items()}
    loads = {f"bias{layer}": load for layer, load in step.loads.items()} if plan.bias else {}
    return found | {name: moved(name, load, BIAS) for name, load in loads.items()}


@dataclass
class _Forward:
    """What backward reads of a source in a micro-batch."""

    read: list[int]
    hidden: list[list[int]]
    routes: list[Routing] = field(default_factory=list[Routing])


@dataclass
class _Step:
    """A step: micro-batches of all sources, a layer at a time."""

    plan: Plan
    sums: State = field(init=False)
    loads: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.state = initial(plan)
        self.sums = {name: [0] * len(own) for name, own in self.state.items() if name[:4] != "bias"}
        self.loads = {layer: [0] * plan.experts for layer in range(plan.layers)}

    def grow(self, name: str, gradient: Sequence[int], start: int = 0) -> None:
        """Add to a gradient."""
        own = self.sums[name]
        for place, each in enumerate(gradient, start):
            own[place] = (own[place] + each) % P

    def run(self) -> None:
        """Run forward and backward."""
        for micro_batch in range(self.plan.micro_batches):
            runs = [self.begun(source, micro_batch) for source in range(self.plan.sources)]
            for layer in range(self.plan.layers):
                for run in runs:
                    self.forward(run, layer)
                    self.loads[layer] = plus(self.loads[layer], run.routes[layer].chosen)
            for source in range(self.plan.sources):
                self.backward(runs, source)

    def begun(self, source: int, micro_batch: int) -> _Forward:
        """Return the embedded tokens of a source."""
        read = batch(source, micro_batch)
        return _Forward(read, [ends("embed", read, self.state["embed"])])

    def forward(self, run: _Forward, layer: int) -> None:
        """Run a layer on the tokens of a source."""
        before, router = run.hidden[-1], router_of(self.plan, self.state, layer)
        route = Routing.of(self.plan, layer, before, router)
        after = mixed(layer, before)
        if self.plan.shared:
            after = plus(after, ends(f"shared{layer}", before, self.state[f"common{layer}"]))
        for own, token in route.copies(rule_of(self.plan)):
            weight = router.probability(before[token], own)
            made = expert(before[token], weight, self.of_expert(layer, own))
            after[token] = (after[token] + made) % P
        run.routes.append(route)
        run.hidden.append(after)

    def backward(self, runs: Sequence[_Forward], source: int) -> None:
        """Run backward on the tokens of a source."""
        run = runs[source]
        slope, gradient = ends_back("loss", run.hidden[-1], self.state["head"], [1] * HIDDEN)
        self.grow("head", gradient)
        for layer in reversed(range(self.plan.layers)):
            slope = self.layer_back(runs, source, layer, slope)
        _, gradient = ends_back("embed", run.read, self.state["embed"], slope)
        self.grow("embed", gradient)

    def layer_back(
        self, runs: Sequence[_Forward], source: int, layer: int, slope: Sequence[int]
    ) -> list[int]:
        """Return the gradient of the tokens before a layer."""
        run, router = runs[source], router_of(self.plan, self.state, layer)
        before = run.hidden[layer]
        below = mixed_back(layer, before, slope)
        if self.plan.shared:
            name = f"common{layer}"
            more, gradient = ends_back(f"shared{layer}", before, self.state[name], slope)
            self.grow(name, gradient)
            below = plus(below, more)
        slopes: list[tuple[int, int, int]] = []
        for own, token in run.routes[layer].copies(rule_of(self.plan)):
            weight = router.probability(before[token], own)
            row, of_weight, of_expert = expert_back(
                before[token], weight, self.of_expert(layer, own), slope[token]
            )
            self.grow(f"experts{layer}", of_expert, own * WEIGHTS)
            below[token] = (below[token] + row) % P
            slopes.append((own, token, of_weight))
        of_scores = self.score_slopes(runs, source, layer)
        routed, gradient = router.backward(before, slopes, of_scores)
        self.grow(f"router{layer}", gradient)
        return plus(below, routed)

    def score_slopes(self, runs: Sequence[_Forward], source: int, layer: int) -> list[int]:
        """Return the gradient of the mean scores of a source in the auxiliary loss."""
        plan = self.plan
        if plan.auxiliary is None:
            return []
        router = router_of(plan, self.state, layer)
        scores = router.scores(runs[source].hidden[layer], plan.experts)
        if plan.auxiliary == "batch":
            load = self.loads[layer]  # of this micro-batch and those before it
        else:
            first = source // plan.tensor * plan.tensor
            among = {
                "rank": [source],
                "sequence": range(first, first + plan.tensor),
                "micro_batch": range(plan.sources),
            }[str(plan.auxiliary)]
            load = [0] * plan.experts
            for other in among:
                load = plus(load, runs[other].routes[layer].chosen)
        return auxiliary_back(layer, scores, load, 1)

    def of_expert(self, layer: int, own: int) -> list[int]:
        """Return the weights of an expert."""
        return self.state[f"experts{layer}"][own * WEIGHTS : (own + 1) * WEIGHTS]
