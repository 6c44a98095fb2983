"""The network as a fluid: what is in flight shares the links, from change to change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import simpy

from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.fair import Shape, fair_rates


@dataclass(slots=True)
class Flow:
    """An activity in flight: what is left of it, in bytes of progress, since the last change.

    One that has no end, a neighbour's, has None left.
    """

    shape: int
    left: Fraction | None
    finish: Callable[[], None]


class Network:
    """Activities in flight, in the order in which they joined, and their rates.

    Progress is exact; only the time at which an activity ends is rounded, up to a picosecond.
    """

    def __init__(self, env: simpy.Environment, capacities: Sequence[int | Fraction]) -> None:
        self.env = env
        self.moved: dict[tuple[int, int], int] = {}
        self._capacities = list(capacities)
        self._shapes: list[Shape] = []
        self._numbers: dict[Shape, int] = {}
        self._flows: list[Flow] = []
        self._rates: dict[tuple[int, ...], tuple[Fraction, ...]] = {}
        self._changed_ps = 0
        self._version = 0

    def number(self, shape: Shape) -> int:
        """A number for `shape`, to join with."""
        found = self._numbers.setdefault(shape, len(self._shapes))
        if found == len(self._shapes):
            self._shapes.append(shape)
        return found

    def shape(self, number: int) -> Shape:
        """The shape that has `number`."""
        return self._shapes[number]

    def join(self, shape: int, size_bytes: int, step: int, finish: Callable[[], None]) -> None:
        """Start to move `size_bytes` (more than 0) now, for `step`; call `finish` at the end."""
        self.moved[shape, step] = self.moved.get((shape, step), 0) + size_bytes
        self._advance()
        self._flows.append(Flow(shape, Fraction(size_bytes), finish))
        self._arm()

    def occupy(self, shape: int) -> Callable[[], None]:
        """Traffic without end from now on; call what is returned to end it."""
        flow = Flow(shape, None, _nothing)
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

    def _rates_now(self) -> tuple[Fraction, ...]:
        key = tuple([flow.shape for flow in self._flows])
        rates = self._rates.get(key)
        if rates is None:
            shapes = [self._shapes[number] for number in key]
            per_second = fair_rates(shapes, self._capacities)
            rates = tuple(rate / PICOSECONDS_PER_SECOND for rate in per_second)
            self._rates[key] = rates
        return rates

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
        if not self._flows:
            return
        wait_ps = min(
            (
                -(-left.numerator * rate.denominator // (left.denominator * rate.numerator))
                for flow, rate in zip(self._flows, self._rates_now(), strict=True)
                if (left := flow.left) is not None
            ),
            default=None,
        )
        if wait_ps is None:
            return
        alarm = self.env.timeout(max(0, wait_ps))
        alarm.callbacks.append(lambda _: self._alarm(version))

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


def _nothing() -> None:
    """Traffic without end does not finish."""
