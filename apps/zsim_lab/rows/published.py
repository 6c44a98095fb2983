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
        line: of the row in it; the header is line 1.
        hardware, model, sequence_length: what a sweep has in common, beside the file.
        scenario: the run, as the tables of a scenario file; empty if it is not modelled.
        fallbacks: the same run in other ways that need less memory, where the publication has the
            best of several; one counts where those before it do not fit.
        reason: why it is not modelled; empty if it is.
        refusal: why the trainer itself begins no such run, whatever the memory; empty if it does.
        incomplete: what of it is not simulated; such a run is predicted, and fits nothing.
        part: the part of the file whose errors are told apart from the others', if any.
        extent: what of its part it is, by the nodes it ran on, if errors are told apart so.
        step_time_s: published time of an optimizer step in seconds, if it was published.
        peak_bytes: published peak of device memory in bytes, if it was published.
        reserved: the peak is of memory that the allocator reserved; else of what was allocated.
        failed: the run ended without a result: it ran out of memory, crashed or took too long.
        fitted: a constant or a choice of the reader was read from its figures; it gives no score.
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
    failed: bool = False
    fitted: bool = False

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
