"""The network as a fluid: activities in flight share links at rates that change with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.clock.ready_queue import Clock
from zsim_des.network.edge_routes import CutError
from zsim_des.network.max_min_fair import Shape, fair_rates

Rate = tuple[Fraction, Fraction]
"""Bytes of progress per picosecond, and per second."""


@dataclass(slots=True)
class Flow:
    """An activity in flight, with `left` bytes of progress when its rate last changed.

    That was at `since_ps`; at this rate it ends at `ends_ps`. For a neighbour's traffic, which has
    no end, `left` is None. `moves` is called with the rate whenever it changes.
    """

    shape: int
    step: int
    left: int | Fraction | None
    finish: Callable[[], None]
    moves: Callable[[Fraction], None] | None = None
    rate: Fraction = Fraction(0)
    since_ps: int = 0
    ends_ps: int | None = None

    def settle(self, now_ps: int) -> None:
        """Subtract the bytes that have moved by now."""
        if self.left is not None and now_ps != self.since_ps:
            self.left -= self.rate * (now_ps - self.since_ps)
        self.since_ps = now_ps


class Network:
    """Activities in flight, in the order in which they joined, and their rates.

    Progress is exact; only the end of an activity is rounded, up to a picosecond. An activity has
    one shape per state (the set of dead links). `cuts` names the states in which ranks cannot reach
    each other, so that nothing may be in flight. `moved` has bytes of progress by shape, step and
    state.
    """

    def __init__(
        self,
        env: Clock,
        capacities: Sequence[int | Fraction],
        cuts: Mapping[int, str] | None = None,
    ) -> None:
        self.env = env
        self.moved: dict[tuple[int, int, int], int | Fraction] = {}
        self.state = 0
        self._cuts = cuts or {}
        self._capacities = list(capacities)
        self._shapes: list[tuple[Shape, ...]] = []
        self._numbers: dict[tuple[Shape, ...], int] = {}
        self._flows: list[Flow] = []
        self._rates: dict[tuple[int, ...], dict[int, Rate]] = {}
        self._rates_beside: dict[tuple[int, ...], dict[int, Rate]] = {}
        self._alone: dict[tuple[int, int], tuple[Fraction, Fraction, int]] = {}
        self._links: dict[tuple[int, int], frozenset[int]] = {}
        self._version = 0

    def number(self, shapes: tuple[Shape, ...]) -> int:
        """Return the number under which an activity with these shapes, one per state, can join."""
        found = self._numbers.setdefault(shapes, len(self._shapes))
        if found == len(self._shapes):
            self._shapes.append(shapes)
        return found

    def shapes(self, number: int) -> tuple[Shape, ...]:
        """Return the shapes of `number`, by state."""
        return self._shapes[number]

    def join(
        self,
        shape: int,
        size_bytes: int,
        step: int,
        finish: Callable[[], None],
        *,
        moves: Callable[[Fraction], None] | None = None,
    ) -> None:
        """Start to move `size_bytes` (more than 0) now, for `step`; call `finish` at the end.

        `moves` is called with the bytes of progress per second, now and at each change.
        """
        if self.state in self._cuts:
            raise CutError(self._cuts[self.state])
        self.count(shape, step, size_bytes)
        flow = Flow(shape, step, size_bytes, finish, moves, since_ps=self.env.now)
        self._flows.append(flow)
        if len(self._flows) == 1:
            self._arm_alone(flow, size_bytes)
        else:
            self._arm()

    def alone_ps(self, shape: int, size_bytes: int) -> int:
        """Return the time of `size_bytes` (more than 0) if nothing else is in flight.

        Raises:
            CutError: ranks cannot reach each other.
        """
        if self.state in self._cuts:
            raise CutError(self._cuts[self.state])
        return self._cost_alone(shape, size_bytes)[2]

    def occupy(self, shape: int) -> Callable[[], None]:
        """Start traffic without end now; return a function that ends it."""
        flow = Flow(shape, 0, None, _nothing)
        self._flows.append(flow)
        self._arm()

        def leave() -> None:
            self._flows.remove(flow)
            self._arm()

        return leave

    def scale(self, link: int, factor: Fraction) -> None:
        """Multiply the bandwidth of `link` by `factor` from now on."""
        self._capacities[link] *= factor
        self._forget_rates()
        self._arm()

    def set_state(self, state: int) -> None:
        """Switch to `state`, with other dead links: activities in flight take other routes.

        Raises:
            CutError: an activity in flight has no route in the new state.
        """
        for flow in self._flows:
            flow.settle(self.env.now)
            if flow.left is not None:
                self.count(flow.shape, flow.step, -flow.left)
        self.state = state
        for flow in self._flows:
            if flow.left is not None:
                if state in self._cuts and flow.left > 0:
                    raise CutError(self._cuts[state])
                self.count(flow.shape, flow.step, flow.left)
        self._forget_rates()
        self._arm()

    def count(self, shape: int, step: int, size_bytes: int | Fraction) -> None:
        """Add `size_bytes` of progress of a shape in `step`."""
        key = (shape, step, self.state)
        self.moved[key] = self.moved.get(key, 0) + size_bytes

    def _rates_now(self) -> list[Rate]:
        """Return the rate of each activity; the order of joining does not affect it."""
        numbers = [flow.shape for flow in self._flows]
        key = tuple(sorted(numbers))
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = {}
            for beside in self._sharing(key):
                rates |= self._rates_of(beside)
        return [rates[number] for number in numbers]

    def _rates_of(self, key: tuple[int, ...]) -> dict[int, Rate]:
        """Return by shape the rates of activities, which share links only with each other."""
        rates = self._rates_beside.get(key)
        if rates is None:
            shapes = tuple([self._shapes[number][self.state] for number in key])
            per_second = _rates_of(shapes, tuple(self._capacities))
            rates = self._rates_beside[key] = {
                number: (rate / PICOSECONDS_PER_SECOND, rate)
                for number, rate in zip(key, per_second, strict=True)
            }
        return rates

    def _sharing(self, key: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes in `key`, grouped by the links that they share, directly or indirectly.

        Activities in different groups do not affect each other's rates.
        """
        found: list[tuple[list[int], frozenset[int]]] = []
        for number in key:
            links, own = self._links_of(number), [number]
            apart: list[tuple[list[int], frozenset[int]]] = []
            for numbers, taken in found:
                if taken.isdisjoint(links):
                    apart.append((numbers, taken))
                else:
                    own, links = [*numbers, *own], links | taken
            found = [*apart, (own, links)]
        return [tuple(sorted(numbers)) for numbers, _ in found]

    def _links_of(self, number: int) -> frozenset[int]:
        key = (number, self.state)
        if key not in self._links:
            self._links[key] = frozenset(link for link, _ in self._shapes[number][self.state])
        return self._links[key]

    def _forget_rates(self) -> None:
        self._rates.clear()
        self._rates_beside.clear()
        self._alone.clear()

    def _arm(self) -> None:
        """Set an alarm for the next activity to end; it replaces earlier alarms.

        Progress is updated only when the rate of an activity changes; until then its end is fixed.
        """
        self._version = version = self._version + 1
        now_ps = self.env.now
        next_ps: int | None = None
        rates = self._rates_now() if self._flows else []
        for flow, (rate, per_second) in zip(self._flows, rates, strict=True):
            if rate is not flow.rate and rate != flow.rate:
                flow.settle(now_ps)
                flow.rate = rate
                if flow.left is not None:
                    under = flow.left.denominator * rate.numerator
                    taken_ps = -(-flow.left.numerator * rate.denominator // under)
                    flow.ends_ps = now_ps + taken_ps
                if flow.moves is not None:
                    flow.moves(per_second)
            if flow.ends_ps is not None and (next_ps is None or flow.ends_ps < next_ps):
                next_ps = flow.ends_ps
        if next_ps is not None:
            self.env.at(max(next_ps, now_ps), lambda: self._alarm(version))

    def _arm_alone(self, flow: Flow, size_bytes: int) -> None:
        """Set the alarm for a new activity that shares its links with no other."""
        self._version = version = self._version + 1
        flow.rate, per_second, taken_ps = self._cost_alone(flow.shape, size_bytes)
        flow.ends_ps = ends_ps = self.env.now + taken_ps
        if flow.moves is not None:
            flow.moves(per_second)
        self.env.at(ends_ps, lambda: self._alarm(version))

    def _cost_alone(self, shape: int, size_bytes: int) -> tuple[Fraction, Fraction, int]:
        """Return both rates of an activity that shares its links with no other, and its time."""
        key = (shape, size_bytes)
        found = self._alone.get(key)
        if found is None:
            rate, per_second = self._rates_of((shape,))[shape]
            taken_ps = -(-size_bytes * rate.denominator // rate.numerator)
            found = self._alone[key] = rate, per_second, taken_ps
        return found

    def _alarm(self, version: int) -> None:
        if version != self._version:
            return
        if len(self._flows) == 1:  # alone since the last change, so this one has ended
            (flow,) = self._flows
            self._flows = []
            flow.finish()
            return
        now_ps = self.env.now
        done = [each for each in self._flows if each.ends_ps is not None and each.ends_ps <= now_ps]
        self._flows = [
            each for each in self._flows if each.ends_ps is None or each.ends_ps > now_ps
        ]
        self._arm()
        for flow in done:
            flow.finish()


@lru_cache(maxsize=4096)
def _rates_of(
    shapes: tuple[Shape, ...], capacities: tuple[int | Fraction, ...]
) -> tuple[Fraction, ...]:
    """Return `fair_rates`; cached, since simulations of one schedule have mostly equal traffic."""
    return fair_rates(shapes, capacities)


def _nothing() -> None:
    """Do nothing: traffic without end does not finish."""
