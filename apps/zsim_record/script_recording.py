"""`zsim record`: record a training script without a GPU; the result is an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zsim.api.answer import Answer
from zsim.backend.backend import BackendError, load_backend
from zsim.files.output_file import write
from zsim.mistake import MistakeError, mistakes

if TYPE_CHECKING:
    from zsim.backend.document import Document
    from zsim.cluster.cluster import Cluster
    from zsim.schedule.schedule import Schedule
    from zsim_record.record.finding_report import ScriptRecording

TORCH: Final = "torch"
"""The backend whose package the recorder needs."""
WORLD_MAX: Final = 1_000_000
"""Maximum ranks of the emulated world: groups hold a number for each rank."""


@dataclass(frozen=True)
class ScriptRecordingResult(Answer):
    """Findings of a recorded script.

    Attributes:
        title: the recorded command.
        recorded: findings on each recorded rank.
    """

    title: str
    recorded: "ScriptRecording"

    @property
    def is_clean(self) -> bool:
        """True if there are no findings."""
        return self.recorded.is_clean

    @property
    def failures(self) -> Sequence[str]:
        """Errors that ended the script, one for each failed rank."""
        return self.recorded.failures

    def text(self) -> str:
        """Return the findings, then the limits of recording."""
        return f"{self.title}\n{self.recorded.text()}"

    def to_dict(self) -> dict[str, object]:
        """Return the findings with full stacks, and every collective."""
        return {"command": self.title, **self.recorded.to_dict()}

    @property
    def schedule(self) -> "Schedule":
        """The step that the script repeats, as a schedule of all ranks.

        Raises:
            MistakeError: the step has no schedule, or `record` ran without `lifts`.
        """
        return self._document.schedule

    @property
    def _document(self) -> "Document":
        with mistakes(ValueError, prefix="schedule: "):
            return self.recorded.document()

    def write_schedule(
        self, path: str | PathLike[str], *, cluster: "Cluster | None" = None
    ) -> None:
        """Write the schedule as JSON for `check`; with `cluster` it can also be simulated.

        Raises:
            MistakeError: the step has no schedule.
            UnwrittenError: the file cannot be written.
        """
        from zsim.backend.document import encode

        write(Path(path), encode(replace(self._document, cluster=cluster)))

    def report(self, path: str | PathLike[str]) -> None:
        """Write an HTML page of the findings.

        Raises:
            UnwrittenError: the file cannot be written.
        """
        write(Path(path), self.recorded.page(self.title))


def record(
    command: Sequence[str],
    *,
    world: int,
    ranks: Sequence[int] = (0,),
    cuda: bool = False,
    lifts: bool = False,
) -> ScriptRecordingResult:
    """Record the Python script `command` on each of `ranks` of `world`, and compare the ranks.

    With `lifts`, also convert the step that it repeats to a schedule.

    Raises:
        MistakeError: a rank is not in the world, the script is missing, or so is torch.
    """
    if world > WORLD_MAX:
        raise MistakeError(f"world: {world} must be at most {WORLD_MAX}")
    for rank in ranks:
        if rank >= world:
            raise MistakeError(f"rank: {rank} must be from 0 to {world - 1}")
    with mistakes(BackendError):
        load_backend(TORCH)
    from zsim_record.record.script_process import record_script

    with mistakes(ValueError):
        recorded = record_script(
            command, world=world, ranks=sorted(set(ranks)), cuda=cuda, lifts=lifts
        )
    return ScriptRecordingResult(" ".join(command), recorded)


def cluster_of(scenario: str | None, world: int, *, is_used: bool = True) -> "Cluster | None":
    """Return the cluster of `scenario` with enough nodes for `world` ranks; None without scenario.

    Raises:
        MistakeError: the scenario does not exist, or `is_used` is False.
    """
    if scenario is None:
        return None
    if not is_used:
        raise MistakeError("--cluster: needs --schedule, the file that says what is simulated")
    from zsim.api.scenario import load

    found = load(scenario).cluster
    return replace(found, nodes=-(-world // found.gpus_per_node))
