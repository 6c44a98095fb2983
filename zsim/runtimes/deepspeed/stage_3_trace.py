"""Gathers and frees of ZeRO-3 at each submodule, once it knows their order.

From the second iteration on: the first records the order. Every unit is one submodule here; its
forward, and its backward with what is run again for it, are visits of it. Parameters are numbers,
in the order in which the model made them, and sizes are elements without padding.

Functions named in comments are those of `PartitionedParameterCoordinator` in
`runtime/zero/partitioned_param_coordinator.py`, DeepSpeed 0.19.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.runtimes.deepspeed.options import DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Gathers and frees of one visit.

    Attributes:
        needed: gathered before the visit, which waits for them.
        ahead: gathered after that, for visits that follow.
        freed: freed after the visit.
    """

    needed: tuple[int, ...]
    ahead: tuple[int, ...]
    freed: tuple[int, ...]


def fetches(
    needs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    persistent: Collection[int],
    options: DeepSpeed,
) -> tuple[Fetch, ...]:
    """Return what happens at each visit of a micro-batch, which needs what `needs` has for it.

    A micro-batch ends with the parameters gathered with which it began: the persistent ones.
    """
    coordinator = _Coordinator(needs, sizes, persistent, options)
    return tuple(coordinator.visit(number) for number in range(len(needs)))


class _Coordinator:
    """Parameters that are there or on their way, and the queue of uses ahead."""

    def __init__(
        self,
        needs: Sequence[Sequence[int]],
        sizes: Sequence[int],
        persistent: Collection[int],
        options: DeepSpeed,
    ) -> None:
        self.needs = needs
        self.sizes = sizes
        self.options = options
        self.persistent = set(persistent)
        self.there = set(self.persistent)
        self.queue = deque((each, visit) for visit, own in enumerate(needs) for each in own)
        self.looked: dict[int, int] = {}  # the latest use of each parameter that left the queue
        self.live_elements = 0
        # Elements that are traversed before each visit, and by visit the next one of a parameter.
        self._before = [0, *accumulate(sum(sizes[each] for each in own) for own in needs)]
        self._again: list[dict[int, int]] = []
        following: dict[int, int] = {}
        for visit in reversed(range(len(needs))):
            self._again.append({each: following.get(each, len(needs)) for each in needs[visit]})
            following |= dict.fromkeys(needs[visit], visit)
        self._again.reverse()

    def visit(self, number: int) -> Fetch:
        """Fetch, and free what is not needed soon."""
        # fetch_sub_module: what is needed, then uses that the queue has up to here are dropped,
        # then what comes ahead. release_sub_module follows the visit.
        own = self.needs[number]
        needed = self._gather([each for each in own if each not in self.there])
        for _ in range(sum(self.looked.get(each, -1) < number for each in own)):
            self._look()
        return Fetch(needed=needed, ahead=self._ahead(), freed=self._free(number))

    def _look(self) -> int:
        """Take the next use from the queue."""
        # __most_recent_step_id_param_fetched_for
        each, visit = self.queue.popleft()
        self.looked[each] = max(self.looked.get(each, visit), visit)
        return each

    def _gather(self, found: list[int]) -> tuple[int, ...]:
        self.there.update(found)
        self.live_elements += sum(self.sizes[each] for each in found)  # __n_available_params
        return tuple(sorted(found))

    def _ahead(self) -> tuple[int, ...]:
        """Look at uses until enough is gathered; the last parameter may be too much."""
        # max_params_to_prefetch: __max_n_available_params bounds what is gathered ahead alone
        limit = min(
            self.options.stage3_max_live_parameters - self.live_elements,
            self.options.stage3_prefetch_bucket_size,
        )
        found: dict[int, None] = {}
        filled = 0
        while self.queue and filled < limit:
            each = self._look()
            if each not in self.there and each not in found:
                found[each] = None
                filled += self.sizes[each]
        return self._gather([*found])

    def _free(self, number: int) -> tuple[int, ...]:
        """Free all but what is persistent, used soon, or was passed over as there for a later use.

        The use of the very next visit does not count as passed over.
        """
        # __params_to_release: __max_reuse_dist_in_numel is asked before each submodule that follows
        near = self._before[number + 1] + self.options.stage3_max_reuse_distance
        found = tuple(
            each
            for each in self.needs[number]
            if each not in self.persistent
            and self.looked[each] <= number + 1
            and not self._is_near(self._again[number][each], near)
        )
        self.there.difference_update(found)
        self.live_elements -= sum(self.sizes[each] for each in found)
        return found

    def _is_near(self, visit: int, near: int) -> bool:
        """Tell whether fewer than `near` elements are traversed before a visit, if there is one."""
        return visit < len(self.needs) and self._before[visit] < near
