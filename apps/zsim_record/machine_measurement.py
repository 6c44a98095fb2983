"""`zsim.measure`: measure the local ranks as a node, for predictions on it."""

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Final

from zsim.api.answer import AnswerInFacts
from zsim.backend.backend import BackendError, load_backend
from zsim.cluster.files.measured_node import MeasuredNode
from zsim.files.output_file import write
from zsim.mistake import mistakes
from zsim.report.svg.note import rate
from zsim.units import format_bytes, format_rate, format_seconds

TORCH: Final = "torch"
"""The backend on whose ranks this measures."""

SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementResult(AnswerInFacts):
    """Measurements of a machine.

    Attributes:
        title: name of the machine.
        node: all measured numbers; writes the node file.
    """

    title: str
    node: MeasuredNode = field(repr=False)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the node file, for `--node` and `[cluster] node`.

        Raises:
            UnwrittenError: the file cannot be written.
        """
        write(Path(path), self.node.text())

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the measurements, and a line about those missing."""
        node, times = self.node, self.node.times
        facts = [("measured", node.source)]
        facts += [
            ("products of matrices", f"{dtype}: at most {format_rate(each)}")
            for dtype, each in node.flops_per_s.items()
        ]
        facts.append(("memory of a rank", f"copies move {rate(int(node.memory_bytes_per_s))}"))
        facts += [
            (
                each.collective.replace("_", "-"),
                f"{format_seconds(each.curve.seconds[0])} at least; "
                f"{format_bytes(int(each.curve.sizes[-1]))} in "
                f"{format_seconds(each.curve.seconds[-1])}",
            )
            for each in times.collectives
        ]
        facts += [
            (
                "host, each operation",
                f"{format_seconds(times.host.stream_s)}, collectives "
                f"{format_seconds(times.host.collective_s)}, others "
                f"{format_seconds(times.host.book_s)}",
            ),
            ("beside a collective", f"kernels lose {node.collective_share:.0%} of its time"),
        ]
        if node.drives is not None:
            reads, writes = node.drives.read_bytes_per_s, node.drives.write_bytes_per_s
            facts.append(("drive", f"reads {rate(int(reads))}, writes {rate(int(writes))}"))
        if times.hurried:
            facts.append(("seconds were short", "; ".join(times.hurried)))
        return [*facts, ("not measured", ", ".join(times.missing))]

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim measure --json` prints."""
        node, times = self.node, self.node.times
        return {
            "title": self.title,
            "source": node.source,
            "ranks": node.ranks,
            "memory_bytes": node.memory_bytes,
            "memory_bytes_per_s": node.memory_bytes_per_s,
            "flops_per_s": {str(dtype): each for dtype, each in node.flops_per_s.items()},
            "collective_share": node.collective_share,
            "collectives": [
                {
                    "collective": each.collective,
                    "ranks": each.ranks,
                    "size_bytes": list(each.curve.sizes),
                    "time_s": list(each.curve.seconds),
                }
                for each in times.collectives
            ],
            "operations": [
                {
                    "operation": str(each.name),
                    "own_s": each.own_s,
                    "kernel_s": each.kernel_s,
                    "product": each.product,
                    "moving": each.moving,
                }
                for each in times.operations
            ],
            "host": {
                "stream_s": times.host.stream_s,
                "collective_s": times.host.collective_s,
                "book_s": times.host.book_s,
            },
            "drive": None
            if node.drives is None
            else {
                "read_bytes_per_s": node.drives.read_bytes_per_s,
                "write_bytes_per_s": node.drives.write_bytes_per_s,
                "latency_s": node.drives.latency_s,
            },
            "not_measured": list(times.missing),
            "repeated_less": list(times.hurried),
        }


def measure(
    *,
    ranks: int | None = None,
    seconds: float = SECONDS,
    drive: str | PathLike[str] | None = None,
) -> MeasurementResult:
    """Measure the ranks of this machine and return them as a node; `write` saves its file.

    Args:
        ranks: number of local ranks; default one per GPU, or two without GPUs. Under torchrun,
            the ranks that it started.
        seconds: time limit for repeating kernels and collectives, and again for reference steps.
            Everything is measured at least once, even if that takes longer.
        drive: path of a folder on the drive to measure.

    Raises:
        MistakeError: torch is not installed, or the folder cannot be measured.
        RunFailedError: a rank failed.
    """
    with mistakes(BackendError):
        load_backend(TORCH)
    from zsim_record.measure.machine import measure_machine

    with mistakes(ValueError):
        node = measure_machine(
            ranks=ranks, seconds=seconds, drive=None if drive is None else Path(drive)
        )
    return MeasurementResult(title=node.title, node=node)
