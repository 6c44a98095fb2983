"""A published training run: its settings and its measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

GIB = 2**30
"""Bytes in a gibibyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of a table of published runs.

    Attributes:
        file: name of the table.
        line: line number of the row; the header is line 1.
        hardware, model, sequence_length: values shared by a sweep, in addition to the file.
        scenario: the run as scenario tables; empty if it is not modelled.
        fallbacks: scenarios of the same run with less memory, if the publication has the best of
            several; one counts if those before it do not fit.
        reason: reason why it is not modelled; empty if it is.
        refusal: reason why the trainer refuses such a run, independent of memory; empty if not.
        incomplete: parts of it that are not simulated; such a run is predicted, but not fitted.
        part: part of the file with separate errors; empty if none.
        extent: class of the run by its number of nodes, if errors are separate; empty if none.
        stalls: True if it took far longer than similar runs on other numbers of nodes, according to
            published times alone (`zsim.calibration.stalls`).
        step_time_s: published time of an optimizer step in seconds; None if not published.
        peak_bytes: published peak of device memory in bytes; None if not published.
        reserved: True if the peak is of reserved memory; False if of allocated memory.
        failed: True if it ended without a result: out of memory, crashed or too slow.
        source: the publication.
    """

    file: str
    line: int
    hardware: str
    model: str
    sequence_length: int
    scenario: Mapping[str, object]
    source: str
    fallbacks: tuple[Mapping[str, object], ...] = ()
    reason: str = ""
    refusal: str = ""
    incomplete: str = ""
    part: str = ""
    extent: str = ""
    stalls: bool = False
    step_time_s: float | None = None
    peak_bytes: int | None = None
    reserved: bool = True
    failed: bool = False

    @property
    def ways(self) -> tuple[Mapping[str, object], ...]:
        """Scenarios of the run, in the order to try; empty if it is not to be predicted."""
        return (self.scenario, *self.fallbacks) if self.scenario and not self.refusal else ()

    @property
    def sweep(self) -> tuple[str, str, str, int]:
        """Key (file, hardware, model, sequence length); a sweep is either fitted or judged."""
        return (self.file, self.hardware, self.model, self.sequence_length)

    @property
    def judged(self) -> bool:
        """True if its sweep judges predictions: half of them, by hash. Others may be fitted."""
        text = "\0".join(map(str, self.sweep))
        return sha256(text.encode()).digest()[0] % 2 == 0
