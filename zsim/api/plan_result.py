"""Result of a plan: the memory and communication of a schedule, before it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zsim.analysis.schedule_plan import Plan, StagePlan, plan
from zsim.api.answer import AnswerInFacts
from zsim.api.answer_text import table_text
from zsim.mistake import MistakeError, mistakes
from zsim.schedule.schedule import WireBytes
from zsim.units import format_bytes

if TYPE_CHECKING:
    from zsim.api.pipeline_fold import MicroBatchFold
    from zsim.backend.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(AnswerInFacts):
    """Memory of the role that needs most, and bytes that a rank sends in a step.

    Attributes:
        title: title of the scenario, with the changes made to it.
        plan: all figures, in bytes.
        folded: the micro-batches that are written of a pipeline too large to write; else None.
    """

    title: str
    plan: Plan = field(repr=False)
    folded: "MicroBatchFold | None" = None

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.plan.parameters

    @property
    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state on a GPU."""
        return self.plan.model_state_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Bytes of device memory that are allocated at the peak."""
        return self.plan.peak.bytes

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the main figures at the memory peak."""
        plan = self.plan
        whose, who = "each GPU", "every rank"
        if plan.stages:
            whose, who = f"each GPU of {plan.role}, which holds most", f"every rank of {plan.role}"
        mesh = " x ".join(f"{size} {axis}" for axis, size in plan.mesh)
        at_peak = f"{format_bytes(plan.peak.bytes)} on each GPU, at {plan.peak.operation}"
        lines = [
            ("ranks", f"{plan.ranks}: {mesh}"),
            ("parameters", self._parameters()),
            ("model state", f"{format_bytes(plan.model_state_bytes)} on {whose}"),
            ("peak memory", at_peak),
        ]
        if plan.host_peak is not None:
            host = f"{format_bytes(plan.host_peak.bytes)} for each GPU at the peak"
            lines.append(("host memory", host))
        if plan.file_peak is not None:
            files = f"{format_bytes(plan.file_peak.bytes)} for each GPU"
            lines.append(("files on NVMe", files))
        if (fold := self.folded) is not None:
            lines.append(("micro-batches", f"{fold.simulated} of {fold.micro_batches} written"))
        return [*lines, ("operations", f"{plan.operations:,} in a step, on {who}")]

    def text(self) -> str:
        """Return the facts, then bytes by kind of memory and by communication."""
        return "\n\n".join([AnswerInFacts.text(self), *self._tables()])

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim plan --json` prints."""
        plan = self.plan
        return {
            "title": self.title,
            "ranks": plan.ranks,
            "mesh": dict(plan.mesh),
            "parameters": plan.parameters,
            "trained_parameters": plan.trained_parameters,
            **self._active(),
            "model_state_bytes": plan.model_state_bytes,
            "peak_allocated_bytes": plan.peak.bytes,
            "memory_bytes": dict(plan.peak.by_kind),
            "wire_bytes_per_rank": _by_group(plan.wire_bytes, scalar=False),
            "scalar_wire_bytes_per_rank": _by_group(plan.wire_bytes, scalar=True),
            "peak_host_bytes_per_rank": 0 if plan.host_peak is None else plan.host_peak.bytes,
            "host_bytes_per_rank": {
                "to_host": plan.host_bytes.to_host,
                "from_host": plan.host_bytes.from_host,
            },
            "peak_file_bytes_per_rank": 0 if plan.file_peak is None else plan.file_peak.bytes,
            "file_bytes_per_rank": {
                "read": plan.file_bytes.read,
                "written": plan.file_bytes.written,
            },
            "operations": plan.operations,
            "stages": [
                {
                    "stage": each.role,
                    "units": list(each.units),
                    "parameters": each.parameters,
                    "model_state_bytes": each.model_state_bytes,
                    "peak_allocated_bytes": each.peak.bytes,
                    "wire_bytes_per_rank": _by_group(each.wire_bytes, scalar=False),
                    "scalar_wire_bytes_per_rank": _by_group(each.wire_bytes, scalar=True),
                    "operations": each.operations,
                }
                for each in plan.stages
            ],
        }

    def _active(self) -> dict[str, object]:
        """Return the active parameters, if they are not all."""
        plan = self.plan
        if plan.active_parameters == plan.parameters:
            return {}
        return {"active_parameters": plan.active_parameters}

    def _parameters(self) -> str:
        every, trained = self.plan.parameters, self.plan.trained_parameters
        active = self.plan.active_parameters
        parts = [f"{every:,}"]
        if active != every:
            parts.append(f"{active:,} of them active for a token")
        if trained != every:
            parts.append(f"{trained:,} of them trained ({trained / every:.2%})")
        return ", ".join(parts)

    def _tables(self) -> Iterator[str]:
        """Yield the tables that have rows."""
        plan = self.plan
        held = {kind.value: size for kind, size in plan.peak.by_kind}
        sent = {
            f"{each.group} {each.collective}{' (scalars)' if each.scalar else ''}": each.bytes
            for each in plan.wire_bytes
        }
        sent["device to host"] = plan.host_bytes.to_host
        sent["host to device"] = plan.host_bytes.from_host
        sent["read from files"] = plan.file_bytes.read
        sent["written to files"] = plan.file_bytes.written
        for title, sizes in (("held at the peak", held), ("sent by a rank in a step", sent)):
            rows = [(name, f"{size:,}", format_bytes(size)) for name, size in sizes.items() if size]
            if rows:
                yield table_text((title, "bytes", ""), rows, ruled=True)
        if plan.stages:
            yield _stages_text(plan.stages)


def plan_of(name: str, document: "Document") -> Plan:
    """Return the plan of a schedule; `name` starts messages about it.

    Raises:
        MistakeError: the model is missing, or the binding does not fit the schedule.
    """
    if document.model is None:
        raise MistakeError(f"{name}: model: missing; a plan needs it")
    schedule = document.schedule
    if schedule.counts:
        from zsim.backend.document import DocumentError

        with mistakes(DocumentError, prefix=f"{name}: "):
            schedule = document.bound()[1].schedule
    return plan(schedule, document.model)


def _stages_text(stages: Sequence[StagePlan]) -> str:
    """Return a table of the memory and communication of a rank of each pipeline stage."""
    columns = ("stage", "units", "parameters", "model state", "peak memory", "sent in a step")
    rows = [
        (
            each.role,
            each.units[0] if len(each.units) == 1 else f"{each.units[0]} to {each.units[-1]}",
            f"{each.parameters:,}",
            format_bytes(each.model_state_bytes),
            format_bytes(each.peak.bytes),
            format_bytes(sum(volume.bytes for volume in each.wire_bytes)),
        )
        for each in stages
    ]
    return table_text(columns, rows, words=(0, 1), ruled=True)


def _by_group(volumes: Sequence[WireBytes], *, scalar: bool) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for volume in volumes:
        if volume.scalar is scalar:
            found.setdefault(volume.group, {})[volume.collective] = volume.bytes
    return found
