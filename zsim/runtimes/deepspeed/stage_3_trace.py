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

from zsim.model.model import ModelError
from zsim.runtimes.deepspeed.options import DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Gathers and frees of one visit.

    Attributes:
        needed: gathered before the visit, which waits for them.
        ahead: gathered after that, for visits that follow.
        freed: freed after the visit.
        read: of what is in files, read ahead after the gathers, for gathers that follow.
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
    """Return what happens at each visit of a micro-batch, which needs what `needs` has for it.

    A micro-batch ends with the parameters gathered with which it began: the persistent ones. Those
    that are `filed` pass through slots, which they hold from their read until they are freed.

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
    """Parameters that are there or on their way, and the queue of uses ahead."""

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
        self.under_way.difference_update(own)
        for _ in range(sum(self.looked.get(each, -1) < number for each in own)):
            self._look()
        ahead, read = self._ahead(), self._read()
        return Fetch(needed=needed, ahead=ahead, freed=self._free(number), read=read)

    def _look(self) -> int:
        """Take the next use from the queue."""
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
        """Look at uses until enough is gathered; the last parameter may be too much."""
        # max_params_to_prefetch: __max_n_available_params bounds what is gathered ahead alone
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
        """Look at uses ahead until twice what is under way, or until there is no slot."""
        # __prefetch_nvme_param_partitions, called where something can be fetched ahead at all
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
        self.slots.difference_update(found)
        self.live_elements -= sum(self.sizes[each] for each in found)
        return found

    def _is_near(self, visit: int, near: int) -> bool:
        """Tell whether fewer than `near` elements are traversed before a visit, if there is one."""
        return visit < len(self.needs) and self._before[visit] < near
