"""Ends of collectives that a host which runs operations itself has to learn of.

Such a host has a part in a collective: it sums what came and divides. It does so before the first
operation that waits for the collective, or for a later one of its stream, even if the last byte has
come long before (`zsim_torch.execute.streams.CpuStreams`).
"""

from zsim.cluster.profile.measured import MeasuredTimes
from zsim.schedule.operation import CollectiveOperation, Communication, Together
from zsim.schedule.schedule import Schedule
from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.engine.instruction import After, Choose, Enqueue, HostNote, Instruction, Stop


class Landings:
    """Collectives of a program that were handed over, in order, and that the host has to end.

    Without `times` of a host that runs operations itself there are none.
    """

    def __init__(self, times: MeasuredTimes | None, schedule: Schedule) -> None:
        self._times = times
        self._sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self._flying: dict[int, tuple[str, str, int]] = {}

    def hand_over(self, operation: Communication | Together, slot: int) -> None:
        """Note that `operation` is under way."""
        if self._times is None:
            return
        members = operation.members if isinstance(operation, Together) else (operation,)
        taken_s = sum(self._landing_s(member, self._times) for member in members)
        taken_ps = round(taken_s * PICOSECONDS_PER_SECOND)
        self._flying[slot] = operation.id, operation.stream, taken_ps

    def before(self, made: Instruction) -> list[Instruction]:
        """Return the waits of the host before `made`, which takes the part of the last as well."""
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
        """Return the slots of what is awaited, and of what was handed to a stream before it."""
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
