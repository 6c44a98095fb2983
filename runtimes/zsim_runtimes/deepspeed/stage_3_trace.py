"""Gathers and frees of ZeRO-3 at each submodule, given the recorded order.

The first iteration records the order; the schedule is that of the second and later ones. Every unit
is one submodule here. Its visits are its forward, and its backward with any recompute. Parameters
are numbers, in the order in which the model created them. Sizes are elements without padding.

Functions named in comments are from `PartitionedParameterCoordinator` in
`runtime/zero/partitioned_param_coordinator.py`, DeepSpeed 0.19.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.model.model import ModelError
from zsim_runtimes.deepspeed.options import DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Gathers and frees of one visit.

    Attributes:
        needed: gathered before the visit, which waits for them.
        ahead: gathered after that, for later visits.
        freed: freed after the visit.
        read: parameters in files that are read ahead after the gathers, for later gathers.
    """

    needed: tuple[int, ...]
    ahead: tuple[int, ...]
    freed: tuple[int, ...]
    read: tuple[int, ...] = ()


def fetches(
    needs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    persistent: Collection[int],
    options: DeepSpeed,
    *,
    filed: Collection[int] = (),
) -> tuple[Fetch, ...]:
    """Return the fetch of each visit of a micro-batch; `needs` has the parameters of each visit.

    A micro-batch starts and ends with only the persistent parameters gathered. `filed` parameters
    hold a slot from their read until they are freed.

    Raises:
        ModelError: more slots are needed at once than there are.
    """
    given = needed = options.offload_param.buffer_count
    while True:
        coordinator = _Coordinator(needs, sizes, persistent, options, filed=filed)
        coordinator.count = needed
        try:
            found = tuple(coordinator.visit(number) for number in range(len(needs)))
        except _TooFewSlotsError as error:
            needed = error.needed
            continue
        if needed > given:
            # swap_in of partitioned_param_swapper.py asserts that there are enough buffers
            raise ModelError(
                f"zero.deepspeed.offload_param.buffer_count: {given} must be at least {needed}: so "
                "many shards are in slots while their parameters are whole"
            )
        return found


class _TooFewSlotsError(Exception):
    """More slots are needed at a visit than there are."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class _Coordinator:
    """Parameters that are whole or in flight, and the queue of later uses."""

    def __init__(
        self,
        needs: Sequence[Sequence[int]],
        sizes: Sequence[int],
        persistent: Collection[int],
        options: DeepSpeed,
        *,
        filed: Collection[int],
    ) -> None:
        self.filed = set(filed)
        self.count = options.offload_param.buffer_count
        self.slots: set[int] = set()
        self.under_way: set[int] = set()
        self.needs = needs
        self.sizes = sizes
        self.options = options
        self.persistent = set(persistent)
        self.there = set(self.persistent)
        self.queue = deque((each, visit) for visit, own in enumerate(needs) for each in own)
        self.looked: dict[int, int] = {}  # the latest use of each parameter that left the queue
        self.live_elements = 0
        # elements traversed before each visit; by visit, the next visit that uses a parameter
        self._before = [0, *accumulate(sum(sizes[each] for each in own) for own in needs)]
        self._again: list[dict[int, int]] = []
        following: dict[int, int] = {}
        for visit in reversed(range(len(needs))):
            self._again.append({each: following.get(each, len(needs)) for each in needs[visit]})
            following |= dict.fromkeys(needs[visit], visit)
        self._again.reverse()

    def visit(self, number: int) -> Fetch:
        """Fetch the parameters of a visit, and free those not needed soon."""
        # fetch_sub_module: gathers needed parameters, drops uses up to here from the queue, then
        # gathers ahead. release_sub_module follows the visit.
        own = self.needs[number]
        needed = self._gather([each for each in own if each not in self.there])
        self.under_way.difference_update(own)
        for _ in range(sum(self.looked.get(each, -1) < number for each in own)):
            self._look()
        ahead, read = self._ahead(), self._read()
        return Fetch(needed=needed, ahead=ahead, freed=self._free(number), read=read)

    def _look(self) -> int:
        """Remove the next use from the queue and return its parameter."""
        # __most_recent_step_id_param_fetched_for
        each, visit = self.queue.popleft()
        self.looked[each] = max(self.looked.get(each, visit), visit)
        return each

    def _gather(self, found: list[int]) -> tuple[int, ...]:
        self.there.update(found)
        self.under_way.update(found)
        self.slots.update(self.filed.intersection(found))
        if len(self.slots) > self.count:
            raise _TooFewSlotsError(len(self.slots))
        self.live_elements += sum(self.sizes[each] for each in found)  # __n_available_params
        return tuple(sorted(found))

    def _ahead(self) -> tuple[int, ...]:
        """Gather parameters ahead until the limit is reached; the last one may exceed it."""
        # max_params_to_prefetch: __max_n_available_params bounds only gathers ahead
        limit = min(
            self.options.stage3_max_live_parameters - self.live_elements,
            self.options.stage3_prefetch_bucket_size,
        )
        found: dict[int, None] = {}
        filled = 0
        while self.queue and filled < limit:
            if self._is_in_file(self.queue[0][0]):
                break
            each = self._look()
            if each not in self.there and each not in found:
                found[each] = None
                filled += self.sizes[each]
        return self._gather([*found])

    def _is_in_file(self, each: int) -> bool:
        return each in self.filed and each not in self.slots

    def _read(self) -> tuple[int, ...]:
        """Read ahead up to twice the elements in flight, or until all slots are used."""
        # __prefetch_nvme_param_partitions, called only if gathers ahead are on
        if not self.filed or self.options.stage3_prefetch_bucket_size <= 0:
            return ()
        most = 2 * sum(self.sizes[each] for each in self.under_way)
        free = self.count - len(self.slots)
        found: dict[int, None] = {}
        considered = 0
        for each, _ in self.queue:
            if considered > most or len(found) >= free:
                break
            if self._is_in_file(each):
                found[each] = None
            considered += self.sizes[each]
        self.slots.update(found)
        return tuple(found)

    def _free(self, number: int) -> tuple[int, ...]:
        """Free the visit's parameters, unless persistent, used soon, or skipped as whole.

        A parameter is skipped if the look-ahead found it whole for a use after the next visit.
        """
        # __params_to_release: checks __max_reuse_dist_in_numel before each later submodule
        near = self._before[number + 1] + self.options.stage3_max_reuse_distance
        found = tuple(
            each
            for each in self.needs[number]
            if each not in self.persistent
            and self.looked[each] <= number + 1
            and not self._is_near(self._again[number][each], near)
        )
        self.there.difference_update(found)
        self.slots.difference_update(found)
        self.live_elements -= sum(self.sizes[each] for each in found)
        return found

    def _is_near(self, visit: int, near: int) -> bool:
        """Return True if `visit` exists and fewer than `near` elements are traversed before it."""
        return visit < len(self.needs) and self._before[visit] < near
