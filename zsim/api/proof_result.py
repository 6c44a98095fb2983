"""`zsim.check`: the result of proving a schedule before it runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.api.answer import Answer
from zsim.api.notebook import facts_html
from zsim.api.pipeline_fold import MicroBatchFold
from zsim.api.run_result import RunResult
from zsim.api.scenario import Changed, LoadedScenario, load
from zsim.files.trace_file import read_trace
from zsim.mistake import MistakeError, mistakes
from zsim.model.model import Model
from zsim.proof import prove as proof_of
from zsim.proof.families import bound_memory
from zsim.proof.finding import Finding
from zsim.schedule.operation import Allocate, Free, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.trace.trace import RankTrace, Trace

if TYPE_CHECKING:
    from zsim.backend.document import Document


NOT_OF_ALL = "values and totals of the micro-batches that are left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult(Answer):
    """Result of proving a schedule.

    Attributes:
        schedule: the checked schedule.
        findings: errors of the schedule, each with place, reason and witness; empty if proved.
        proved: properties that hold, and their scope.
        not_shown: properties that were not checked, and the reasons.
        folded: the micro-batches that are proved of a pipeline too large to write; else None.
    """

    schedule: Schedule = field(repr=False)
    findings: tuple[Finding, ...]
    proved: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()
    folded: MicroBatchFold | None = None

    @property
    def is_right(self) -> bool:
        """True if the proof has no findings."""
        return not self.findings

    @property
    def title(self) -> str:
        """Name of the schedule, and the number of findings."""
        count = len(self.findings)
        said = f"{count} finding{'s' if count > 1 else ''}" if count else "no findings"
        return f"{self.schedule.name}: {said}"

    def text(self) -> str:
        """Return one line per finding, then the proved and the unchecked properties."""
        lines = [self.title]
        lines += [] if self.folded is None else [f"micro-batches: {self.folded.proved}"]
        for number, each in enumerate(self.findings, start=1):
            lines.append(f"{number}. {each.invariant}: {each.where}: {each.why}")
        lines += [f"proved: {', '.join(self.proved)}"] * bool(self.proved)
        lines += [f"not shown: {'; '.join(self.not_shown)}"] * bool(self.not_shown)
        return "\n".join(lines)

    def explanation(self, number: int) -> str:
        """Return finding `number`, counted from 1, with a line for each step of its witness.

        Raises:
            MistakeError: there are fewer findings.
        """
        if number > len(self.findings):
            many = len(self.findings)
            why = f"must be at most {many}, the number of findings" if many else "has no finding"
            raise MistakeError(f"--explain: {number} {why}")
        finding = self.findings[number - 1]
        return "\n".join(
            [
                f"{number}. {finding.invariant}",
                f"where: {finding.where}",
                f"why: {finding.why}",
                *(f"  {line}" for line in finding.witness),
            ]
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim check --json` prints."""
        return {
            "findings": [
                {"invariant": each.invariant, "where": each.where, "why": each.why}
                for each in self.findings
            ],
            "proved": list(self.proved),
            "not_shown": list(self.not_shown),
            **({} if self.folded is None else {"folded": asdict(self.folded)}),
        }

    def _repr_html_(self) -> str:
        findings = [(each.invariant, f"{each.where}: {each.why}") for each in self.findings]
        proved = [("proved", ", ".join(self.proved)), ("not shown", "; ".join(self.not_shown))]
        return facts_html(self.title, [*findings, *(each for each in proved if each[1])])


def check(
    scenario: LoadedScenario | Schedule | str | PathLike[str] | Mapping[str, object],
    changes: Changed = None,
    *,
    model: Model | None = None,
    against: RunResult | str | PathLike[str] | None = None,
) -> ProofResult:
    """Prove a schedule: no deadlock, no race, no use after free, the values of plain training.

    Of a pipeline that is too large to write, a step with fewer micro-batches is proved.

    Args:
        scenario: scenario as in `load`, or a schedule built by hand.
        changes: values by key, as in `load`.
        model: model of a schedule built by hand; without it, values are not compared.
        against: a run, or the trace file of `RunResult.trace`; checked against the schedule.

    Raises:
        MistakeError: the scenario or the trace cannot be read.
    """
    document: Document | None = None
    large = None
    if isinstance(scenario, Schedule):
        schedule = scenario
    else:
        loaded = load(scenario, changes)
        try:
            document = loaded.document
        except MistakeError:
            large = loaded.shortest_fold() if against is None else None
            if large is None:
                raise
            document = large[1].document
        schedule, model = document.schedule, document.model
    trace = _trace_of(against)
    proof = proof_of(schedule, model)
    if document is not None and schedule.counts:
        proof = replace(proof, proved=_with_bound_peak(document, proof.proved))
    if trace is not None:
        from zsim.proof import against_trace as refinement

        ran = schedule
        if document is not None and schedule.counts:
            ran, trace = _with_counts_of(document, trace)
        found = refinement.examine(ran, trace)
        proved, not_shown = refinement.proved_properties(trace, found)
        proof = replace(
            proof,
            findings=(*proof.findings, *found),
            proved=(*proof.proved, *proved),
            not_shown=(*proof.not_shown, *not_shown),
        )
    return ProofResult(
        schedule=schedule,
        findings=proof.findings,
        proved=proof.proved,
        not_shown=(*proof.not_shown, *([] if large is None else [NOT_OF_ALL])),
        folded=None if large is None else large[0],
    )


def _trace_of(against: RunResult | str | PathLike[str] | None) -> Trace | None:
    """Return the trace of a run, or in a file; None if there is neither."""
    if isinstance(against, RunResult):
        return against.whole.recorded
    return None if against is None else read_trace(Path(str(against)))


def _with_counts_of(document: "Document", trace: Trace) -> tuple[Schedule, Trace]:
    """Return the schedule with the numbers of a real run, or of its binding, and its trace.

    A real run names the roles and buffers of the schedule with counts.

    Raises:
        MistakeError: the numbers do not fit the schedule, or a real run has several steps.
    """
    from zsim.backend.document import DocumentError
    from zsim.schedule.binding import CountTrace

    rows = [row for rank in trace.ranks for row in rank.rows]
    if rows and trace.steps > 1:
        raise MistakeError("against: counts of rows differ in each step; use train.steps=1")
    if rows:
        numbers = CountTrace(rows=tuple((a, b, c, d, e, n) for _, a, b, c, d, e, n in rows))
        document = replace(document, binding=numbers)
    with mistakes(DocumentError):
        found = document.bound()[1].schedule
    ranks = tuple(_renamed(rank, found.program_of(rank.rank)) for rank in trace.ranks)
    return found, replace(trace, ranks=ranks) if rows else trace


def _renamed(rank: RankTrace, program: Program) -> RankTrace:
    """Return the trace of a real run with the role and the buffers of `program`."""
    memory = (each for each in walk(program.step) if isinstance(each, Allocate | Free))
    names = {each.id: each.buffer for each in memory}
    book = tuple(replace(e, buffer=names.get(e.operation, e.buffer)) for e in rank.book)
    return replace(rank, role=program.role, book=book)


def _with_bound_peak(document: "Document", proved: tuple[str, ...]) -> tuple[str, ...]:
    """Return the proved properties with the peak of memory at the document's binding.

    Raises:
        MistakeError: the binding does not fit the schedule.
    """
    from zsim.backend.document import DocumentError
    from zsim.memory.ledger import memory_ledger
    from zsim.memory.peak import peak_bytes

    with mistakes(DocumentError):
        binding, found = document.bound()
    peaks = (
        peak_bytes(memory_ledger(program, 1), pool.name)
        for program in found.schedule.programs
        for pool in found.schedule.pools
        if pool.place is Place.DEVICE
    )
    return bound_memory(proved, max(peaks), binding.words)
