"""Wear of drives: what a node writes to them in a day, and how long they are rated to bear it."""

from dataclasses import dataclass

from zsim.backend.backend import Job
from zsim.compute.drive import wear_per_day
from zsim.schedule.host_traffic import file_bytes
from zsim.units import format_bytes

SECONDS_PER_DAY, DAYS_PER_YEAR = 86_400, 365


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLife:
    """Bytes that the ranks of a node write in a day of steps, and the days that its drives bear it.

    `days` is None where nobody has published what may be written to a drive.
    """

    drives: int
    bytes_per_day: float
    days: float | None

    @property
    def lasts(self) -> str:
        """Return the time that the drives last, in words; empty if that is not known."""
        if self.days is None:
            return ""
        if self.days < 2:
            return f"{24 * self.days:,.0f} hours"
        if self.days < DAYS_PER_YEAR:
            return f"{self.days:,.0f} days"
        return f"{self.days / DAYS_PER_YEAR:,.1f} years"

    def text(self) -> str:
        """Return what is written, and how long the drives last."""
        each = format_bytes(round(self.bytes_per_day / self.drives))
        drives = f"to each of {self.drives} drives" if self.drives > 1 else "to one drive"
        if not self.lasts:
            return f"{each} a day {drives}, whose endurance is not known"
        bear = "bear" if self.drives > 1 else "bears"
        return f"{each} a day {drives}, which {bear} it for {self.lasts} as rated"


def written_bytes(job: Job) -> int:
    """Return what a rank writes to files in a step; of several roles, the one that writes most."""
    return max(file_bytes(program).written for program in job.schedule.programs)


def drive_life(job: Job, written: int, step_s: float) -> DriveLife | None:
    """Return the wear of a node whose ranks each write so many bytes; None if they write none."""
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
