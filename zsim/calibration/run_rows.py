"""Tables of published runs of training: each row as the scenario of a run, with what was measured.

A table is a class of rows, which pydantic reads, and which says what a row means.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zsim.calibration.csv_rows import (
    Cells,
    CsvRow,
    MaybePositive,
    NotModelledError,
    Whole,
    parsed,
)
from zsim.calibration.published import Published
from zsim.calibration.stalls import Turn, stalled

GIB = 2**30


class RunRow(CsvRow):
    """A row of a table of runs. What a run is asked may raise NotModelledError."""

    gpu: str
    model: str
    seq_len_tokens: Whole
    step_time_s_derived: MaybePositive

    @property
    def name(self) -> str:
        """Return what sweeps of one model have in common."""
        return self.model

    @property
    def step_time_s(self) -> float | None:
        """Return the published time of a step, if there is one."""
        return self.step_time_s_derived

    @property
    def peak_gib(self) -> float | None:
        """Peak of what the allocator reserved, if it was published."""
        return None

    @property
    def failed(self) -> bool:
        """True if the run ended without a result."""
        return False

    def scenario(self) -> Mapping[str, object]:
        """Return the run, as the tables of a scenario file."""
        raise NotImplementedError

    def fallbacks(self) -> tuple[Mapping[str, object], ...]:
        """Return what `Published.fallbacks` says of it."""
        return ()

    def refusal(self) -> str:
        """Return what `Published.refusal` says of it."""
        return ""

    def incomplete(self) -> str:
        """Return what `Published.incomplete` says of it."""
        return ""

    def part(self) -> str:
        """Return what `Published.part` says of it."""
        return ""

    def extent(self) -> str:
        """Return what `Published.extent` says of it."""
        return ""

    def turn(self) -> Turn | None:
        """Return what is compared with runs on other nodes; None if nothing is."""
        return None


@dataclass(frozen=True, slots=True)
class RunTable:
    """A file, by its name without the ending, and its rows.

    `publication` is a short name of who published them. With `judges` no constant is fitted to any
    of them. `reserved` says that peaks are of memory that the allocator reserved, not handed out.
    """

    file: str
    row: type[RunRow]
    publication: str
    judges: bool = False
    reserved: bool = True

    def read(self, rows: Iterable[Cells]) -> list[Published]:
        """Return every row of the file, those that are not modelled with the reason.

        Raises:
            MeasuredError: a column is missing.
        """
        found: list[Published] = []
        turns: list[tuple[int, Turn]] = []
        for line, cells in enumerate(rows, start=2):
            try:
                row = parsed(self.file, self.row, cells)
            except NotModelledError as error:
                found.append(self._unmodelled(line, cells, error))
                continue
            if (turn := row.turn()) is not None:
                turns.append((line, turn))
            found.append(self._read(line, cells, row))
        stalls = stalled(turns)
        return [replace(run, stalls=run.line in stalls) for run in found]

    def _read(self, line: int, cells: Cells, row: RunRow) -> Published:
        try:
            peak_gib = None if row.failed else row.peak_gib
            return Published(
                file=self.file,
                line=line,
                hardware=row.gpu,
                model=row.name,
                sequence_length=row.seq_len_tokens,
                scenario=row.scenario(),
                fallbacks=row.fallbacks(),
                refusal=row.refusal(),
                incomplete=row.incomplete(),
                part=row.part(),
                extent=row.extent(),
                source=row.source,
                step_time_s=None if row.failed else row.step_time_s,
                peak_bytes=None if peak_gib is None else round(peak_gib * GIB),
                reserved=self.reserved,
                failed=row.failed,
            )
        except NotModelledError as error:
            return self._unmodelled(line, cells, error)

    def _unmodelled(self, line: int, cells: Cells, error: NotModelledError) -> Published:
        return Published(
            file=self.file,
            line=line,
            hardware="",
            model="",
            sequence_length=0,
            scenario={},
            source=cells.get("source", ""),
            reason=str(error),
        )
