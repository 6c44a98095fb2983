"""Tables of published runs, read: a row in, what was run and what was measured of it out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from zsim.calibration.measured import MeasuredError
from zsim.validation.cell import NotModelledError, Row
from zsim.validation.published import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row says of a run that was made; nothing is known of what is None.

    Attributes:
        peak_bytes: peak of device memory, `reserved` by the allocator, else allocated.
        failed: the run ended without a result.
    """

    step_time_s: float | None = None
    peak_bytes: int | None = None
    reserved: bool = True
    failed: bool = False


def _none(_row: Row) -> tuple[Mapping[str, object], ...]:
    """A run that was made in one way alone."""
    return ()


def _nothing(_row: Row) -> str:
    """Nothing to say of a row."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """How the rows of one file are read. Each function may raise KeyError: a column is missing.

    Attributes:
        file: the name of the file, without its ending.
        sweep: hardware, model and sequence length of a row.
        measured: what was measured; may raise NotModelledError.
        scenario: the run, as the tables of a scenario file; may raise NotModelledError.
        fallbacks: the same of `Published.fallbacks`, of a row whose scenario there is.
        refusal, part: the same of those of `Published`.
    """

    file: str
    sweep: Callable[[Row], tuple[str, str, int]]
    measured: Callable[[Row], Measured]
    scenario: Callable[[Row], Mapping[str, object]]
    fallbacks: Callable[[Row], tuple[Mapping[str, object], ...]] = _none
    refusal: Callable[[Row], str] = _nothing
    part: Callable[[Row], str] = _nothing

    def read(self, rows: Iterable[Row]) -> list[Published]:
        """Every row of the file, those that are not modelled with the reason.

        Raises:
            MeasuredError: a column is missing.
        """
        try:
            return [self._read(line, row) for line, row in enumerate(rows, start=2)]
        except KeyError as missing:
            raise MeasuredError(f"{self.file}: no column {missing.args[0]!r}") from None

    def _read(self, line: int, row: Row) -> Published:
        hardware, model, sequence_length, refusal, part = "", "", 0, "", ""
        fallbacks: tuple[Mapping[str, object], ...] = ()
        try:
            hardware, model, sequence_length = self.sweep(row)
            measured, scenario, reason = self.measured(row), self.scenario(row), ""
            fallbacks = self.fallbacks(row)
            refusal, part = self.refusal(row), self.part(row)
        except NotModelledError as error:
            measured, scenario, reason = Measured(), {}, str(error)
        return Published(
            file=self.file,
            line=line,
            hardware=hardware,
            model=model,
            sequence_length=sequence_length,
            scenario=scenario,
            fallbacks=fallbacks,
            reason=reason,
            refusal=refusal,
            part=part,
            source=row["source"],
            step_time_s=measured.step_time_s,
            peak_bytes=measured.peak_bytes,
            reserved=measured.reserved,
            failed=measured.failed,
        )
