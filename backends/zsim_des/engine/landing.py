"""Collectives that a host which runs operations itself has to complete.

Such a host does part of a collective: it sums the received parts and divides. It does so before the
first operation that waits for the collective, or for a later one on its stream, even if the last
byte arrived long before (`zsim_torch.execute.streams.CpuStreams`).
"""

from zsim.cluster.profile.measured import MeasuredTimes
from zsim.schedule.operation import CollectiveOperation, Communication, Together
from zsim.schedule.schedule import Schedule
from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.engine.instruction import After, Choose, Enqueue, HostNote, Instruction, Stop


class Landings:
    """Collectives in flight, in order of issue, that the host has to complete.

    Empty unless `times` are given: the measured times of a host that runs operations itself.
    """

    def __init__(self, times: MeasuredTimes | None, schedule: Schedule) -> None:
        self._times = times
        self._sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self._flying: dict[int, tuple[str, str, int]] = {}

    def hand_over(self, operation: Communication | Together, slot: int) -> None:
        """Note that `operation` is in flight."""
        if self._times is None:
            return
        members = operation.members if isinstance(operation, Together) else (operation,)
        taken_s = sum(self._landing_s(member, self._times) for member in members)
        taken_ps = round(taken_s * PICOSECONDS_PER_SECOND)
        self._flying[slot] = operation.id, operation.stream, taken_ps

    def before(self, made: Instruction) -> list[Instruction]:
        """Return the host's waits before `made`; `made` includes the host time of the last one."""
        if not self._flying or isinstance(made, HostNote):
            return []
        found: list[Instruction] = []
        for slot in self._landed(made.after):
            name, _, taken_ps = self._flying.pop(slot)
            if isinstance(made, Enqueue | Stop | Choose):
                found.append(Stop(name, After((slot,), ()), made.launch_ps))
                made.launch_ps = taken_ps
        return found

    def _landed(self, after: After) -> list[int]:
        """Return the awaited slots and the slots handed to the same streams before them."""
        awaited = [slot for slot in after.here if slot in self._flying]
        last = {self._flying[slot][1]: slot for slot in sorted(awaited)}
        order = list(self._flying)
        return [
            slot
            for place, slot in enumerate(order)
            if (end := last.get(self._flying[slot][1])) is not None and place <= order.index(end)
        ]

    def _landing_s(self, member: Communication, times: MeasuredTimes) -> float:
        ranks = self._sizes[member.group]
        if ranks == 1 or not isinstance(member, CollectiveOperation):
            return 0.0
        return times.landing_s(member.name, ranks, member.whole.size * member.wire.size_bytes)
