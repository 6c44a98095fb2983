"""A published training run: its settings and its measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

MIB, GIB = 2**20, 2**30
"""Bytes in a mebibyte and in a gibibyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of a table of published runs.

    Attributes:
        file: name of the table.
        line: line number of the row in the table; the header is line 1.
        hardware, model, sequence_length: with `file`, the key of the sweep that the row is part of.
        scenario: the run, as the tables of a scenario file; empty if it is not modelled.
        fallbacks: variants of the run that need less memory, if the publication has the best of
            several settings. The first variant that fits is used if `scenario` does not fit.
        reason: why the run is not modelled; empty if it is.
        refusal: why the trainer itself refuses such a run, whatever the memory; empty if it runs.
        incomplete: features of the run that are not simulated. Such a run is predicted, but not
            used to fit constants.
        part: part of the file with separate error statistics, if any.
        extent: class of the number of nodes, if `part` has separate statistics by nodes.
        step_time_s: published time of an optimizer step in seconds, or None.
        peak_bytes: published peak of device memory in bytes, or None.
        reserved: True if the peak counts reserved memory, False if it counts allocated memory.
        of_last_rank: True if the peak is that of the last rank, False if it is the largest.
        library_bytes: bytes of libraries in PyTorch's allocator, which zsim counts outside of it.
        failed: the run ended without a result: it ran out of memory, crashed or took too long.
        fitted: a constant, or a choice of the reader, was derived from this run; it is not scored.
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
    step_time_s: float | None = None
    peak_bytes: int | None = None
    reserved: bool = True
    of_last_rank: bool = False
    library_bytes: int = 0
    failed: bool = False
    fitted: bool = False

    @property
    def alternatives(self) -> tuple[Mapping[str, object], ...]:
        """Scenarios of the run, in the order to try; empty if it is not predicted."""
        return (self.scenario, *self.fallbacks) if self.scenario and not self.refusal else ()

    @property
    def sweep(self) -> tuple[str, str, str, int]:
        """Key (file, hardware, model, sequence length); a whole sweep is used to fit or to test."""
        return (self.file, self.hardware, self.model, self.sequence_length)

    @property
    def judged(self) -> bool:
        """True if its sweep only tests predictions: half of the sweeps, chosen by hash."""
        text = "\0".join(map(str, self.sweep))
        return sha256(text.encode()).digest()[0] % 2 == 0
