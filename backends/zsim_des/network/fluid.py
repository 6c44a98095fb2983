"""The network as a fluid: what is in flight shares the links, from change to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import simpy

from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.network.edge_routes import CutError
from zsim_des.network.max_min_fair import Shape, fair_rates
from zsim_des.ready_queue import Alarm


@dataclass(slots=True)
class Flow:
    """An activity in flight: what is left of it, in bytes of progress, since the last change.

    One that has no end, a neighbour's, has None left. `moves` is told its rate whenever that
    changes.
    """

    shape: int
    step: int
    left: int | Fraction | None
    finish: Callable[[], None]
    moves: Callable[[Fraction], None] | None = None
    rate: Fraction = Fraction(0)


class Network:
    """Activities in flight, in the order in which they joined, and their rates.

    Progress is exact; only the time at which an activity ends is rounded, up to a picosecond. In
    another state (when other links are dead) an activity has another shape; in one that `cuts`
    names nothing can be in flight. `moved` has bytes of progress by shape, step and state.
    """

    def __init__(
        self,
        env: simpy.Environment,
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
        self._rates: dict[tuple[int, ...], dict[int, Fraction]] = {}
        self._changed_ps = 0
        self._version = 0

    def number(self, shapes: tuple[Shape, ...]) -> int:
        """Return a number for what has these shapes, one for each state, to join with."""
        found = self._numbers.setdefault(shapes, len(self._shapes))
        if found == len(self._shapes):
            self._shapes.append(shapes)
        return found

    def shapes(self, number: int) -> tuple[Shape, ...]:
        """Return the shapes that have `number`, by state."""
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

        `moves` is told the bytes of progress per second, now and at each change.
        """
        if self.state in self._cuts:
            raise CutError(self._cuts[self.state])
        self._count(shape, step, size_bytes)
        self._advance()
        self._flows.append(Flow(shape, step, size_bytes, finish, moves))
        self._arm()

    def occupy(self, shape: int) -> Callable[[], None]:
        """Traffic without end from now on; call what is returned to end it."""
        flow = Flow(shape, 0, None, _nothing)
        self._advance()
        self._flows.append(flow)
        self._arm()

        def leave() -> None:
            self._advance()
            self._flows.remove(flow)
            self._arm()

        return leave

    def scale(self, link: int, factor: Fraction) -> None:
        """Multiply the bandwidth of `link` from now on."""
        self._advance()
        self._capacities[link] *= factor
        self._rates.clear()
        self._arm()

    def turn(self, state: int) -> None:
        """From now on the links of another state are dead: what is in flight takes other ways.

        Raises:
            CutError: something is in flight that has no way then.
        """
        self._advance()
        for flow in self._flows:
            if flow.left is not None:
                self._count(flow.shape, flow.step, -flow.left)
        self.state = state
        for flow in self._flows:
            if flow.left is not None:
                if state in self._cuts and flow.left > 0:
                    raise CutError(self._cuts[state])
                self._count(flow.shape, flow.step, flow.left)
        self._rates.clear()
        self._arm()

    def _count(self, shape: int, step: int, size_bytes: int | Fraction) -> None:
        key = (shape, step, self.state)
        self.moved[key] = self.moved.get(key, 0) + size_bytes

    def _rates_now(self) -> list[Fraction]:
        """Return the rate of each activity; who joined first makes no difference to it."""
        numbers = [flow.shape for flow in self._flows]
        key = tuple(sorted(numbers))
        rates = self._rates.get(key)
        if rates is None:
            shapes = tuple([self._shapes[number][self.state] for number in key])
            per_second = _rates_of(shapes, tuple(self._capacities))
            rates = {
                number: rate / PICOSECONDS_PER_SECOND
                for number, rate in zip(key, per_second, strict=True)
            }
            self._rates[key] = rates
        return [rates[number] for number in numbers]

    def _advance(self) -> None:
        """Take off what has moved since the last change."""
        now = int(self.env.now)
        passed_ps = now - self._changed_ps
        self._changed_ps = now
        if passed_ps and self._flows:
            for flow, rate in zip(self._flows, self._rates_now(), strict=True):
                if flow.left is not None:
                    flow.left -= rate * passed_ps

    def _arm(self) -> None:
        """Wake up when the next activity ends; an earlier alarm no longer counts."""
        self._version = version = self._version + 1
        wait_ps: int | None = None
        for flow, rate in zip(self._flows, self._rates_now(), strict=True) if self._flows else ():
            if flow.moves is not None and rate != flow.rate:
                flow.rate = rate
                flow.moves(rate * PICOSECONDS_PER_SECOND)
            if (left := flow.left) is not None:
                under = left.denominator * rate.numerator
                ends_ps = -(-left.numerator * rate.denominator // under)
                if wait_ps is None or ends_ps < wait_ps:
                    wait_ps = ends_ps
        if wait_ps is not None:
            Alarm(self.env, max(0, wait_ps), lambda: self._alarm(version))

    def _alarm(self, version: int) -> None:
        if version != self._version:
            return
        if len(self._flows) == 1:  # it was alone since the last change: it has ended
            (flow,) = self._flows
            self._flows, self._changed_ps = [], int(self.env.now)
            flow.finish()
            return
        self._advance()
        done = [flow for flow in self._flows if flow.left is not None and flow.left <= 0]
        self._flows = [flow for flow in self._flows if flow.left is None or flow.left > 0]
        self._arm()
        for flow in done:
            flow.finish()


@lru_cache(maxsize=4096)
def _rates_of(
    shapes: tuple[Shape, ...], capacities: tuple[int | Fraction, ...]
) -> tuple[Fraction, ...]:
    """Return `fair_rates`, kept for the next simulation, which mostly has the same traffic."""
    return fair_rates(shapes, capacities)


def _nothing() -> None:
    """Traffic without end does not finish."""
