"""`zsim.check`: what is proved of a schedule before it runs, and what is wrong with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer
from zsim.api.notebook import facts_html
from zsim.api.run_result import RunResult
from zsim.api.scenario import Changed, LoadedScenario, load
from zsim.files.trace_file import read_trace
from zsim.mistake import MistakeError
from zsim.model.model import Model
from zsim.proof import against_trace as refinement
from zsim.proof import prove as proof_of
from zsim.proof.finding import Finding
from zsim.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult(Answer):
    """Result of proving a schedule.

    Attributes:
        schedule: what was proved.
        findings: what is wrong, each with where, why and a witness; none if it is proved.
        proved: what holds, and for what.
        not_shown: what was not looked at, and why.
    """

    schedule: Schedule = field(repr=False)
    findings: tuple[Finding, ...]
    proved: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    @property
    def title(self) -> str:
        """Name of the schedule, and the number of findings."""
        count = len(self.findings)
        said = f"{count} finding{'s' if count > 1 else ''}" if count else "no findings"
        return f"{self.schedule.name}: {said}"

    def text(self) -> str:
        """Return the findings in a line each, then what is proved and what is not shown."""
        lines = [self.title]
        for number, each in enumerate(self.findings, start=1):
            lines.append(f"{number}. {each.invariant}: {each.where}: {each.why}")
        lines += [f"proved: {', '.join(self.proved)}"] * bool(self.proved)
        lines += [f"not shown: {'; '.join(self.not_shown)}"] * bool(self.not_shown)
        return "\n".join(lines)

    def explanation(self, number: int) -> str:
        """Return finding `number`, from 1 on, with its witness: a line for each step of it.

        Raises:
            MistakeError: there are not so many.
        """
        if number > len(self.findings):
            most = f"at most {len(self.findings)}, the findings there are"
            raise MistakeError(f"--explain: {number} must be {most}")
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
        """Return what `zsim check --json` prints."""
        return {
            "findings": [
                {"invariant": each.invariant, "where": each.where, "why": each.why}
                for each in self.findings
            ],
            "proved": list(self.proved),
            "not_shown": list(self.not_shown),
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

    Args:
        scenario: what to prove: a scenario as `load` takes it, or a schedule made by hand.
        changes: values by key, as `load` takes them.
        model: what a schedule made by hand trains; without it no values are compared.
        against: a run, or the file that `RunResult.trace` wrote; it must be one of the schedule.

    Raises:
        MistakeError: it cannot be read.
    """
    if isinstance(scenario, Schedule):
        schedule = scenario
    else:
        document = load(scenario, changes).document
        schedule, model = document.schedule, document.model
    trace = against.recorded if isinstance(against, RunResult) else None
    if trace is None and against is not None:
        trace = read_trace(Path(str(against)))
    proof = proof_of(schedule, model)
    if trace is not None:
        found = refinement.examine(schedule, trace)
        proved, not_shown = refinement.says(trace, found)
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
        not_shown=proof.not_shown,
    )
