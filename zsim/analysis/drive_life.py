"""Wear of drives: the bytes that a node writes per day, and the rated lifetime at that rate."""

from dataclasses import dataclass

from zsim.backend.backend import Job
from zsim.compute.drive import wear_per_day
from zsim.schedule.host_traffic import file_bytes
from zsim.units import format_bytes

SECONDS_PER_DAY, DAYS_PER_YEAR = 86_400, 365


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLife:
    """Bytes that the ranks of a node write per day, and the lifetime of its drives in days.

    `days` is None if the drive has no published endurance.
    """

    drives: int
    bytes_per_day: float
    days: float | None

    @property
    def lasts(self) -> str:
        """Return the lifetime as text in hours, days or years; empty if unknown."""
        if self.days is None:
            return ""
        if self.days < 2:
            return f"{24 * self.days:,.0f} hours"
        if self.days < DAYS_PER_YEAR:
            return f"{self.days:,.0f} days"
        return f"{self.days / DAYS_PER_YEAR:,.1f} years"

    def text(self) -> str:
        """Return the bytes written per drive and day, and the lifetime, as text."""
        each = format_bytes(round(self.bytes_per_day / self.drives))
        drives = f"to each of {self.drives} drives" if self.drives > 1 else "to one drive"
        if not self.lasts:
            return f"{each} a day {drives}, whose endurance is not known"
        bear = "bear" if self.drives > 1 else "bears"
        return f"{each} a day {drives}, which {bear} it for {self.lasts} as rated"


def written_bytes(job: Job) -> int:
    """Return the bytes that a rank of the role with the most writes to files in a step."""
    return max(file_bytes(program).written for program in job.schedule.programs)


def drive_life(job: Job, written: int, step_s: float) -> DriveLife | None:
    """Return the wear of a node's drives if each rank writes `written` bytes per step.

    Return None if the ranks write nothing, the step takes no time or the node has no drives.
    """
    drives = job.cluster.drives
    if not written or not step_s or drives is None:
        return None
    on_node = written * min(job.cluster.gpus_per_node, job.schedule.mesh.size)
    wear = wear_per_day(on_node, step_s, drives)
    return DriveLife(
        drives=drives.count,
        bytes_per_day=on_node * SECONDS_PER_DAY / step_s,
        days=None if wear is None else 1 / wear,
    )
