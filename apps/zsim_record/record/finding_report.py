"""Report the findings of a recording as an object for JSON, as text and as an HTML page."""

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zsim.backend.document import Document as JobDocument
from zsim.backend.document import decode
from zsim_record.clocks.access_history import RecordedAccess
from zsim_record.clocks.call_stack import CallStack, StackFrame
from zsim_record.clocks.finding import BlockOrigin, Hazard
from zsim_record.lift.lifted_schedule import one_for_all
from zsim_record.lift.step_events import LiftError
from zsim_record.record.rank_comparison import divergences
from zsim_record.record.tape import Tape, informative_frames

Document = dict[str, Any]
_PACKAGES = str(Path(torch.__file__).parents[1])
FRAMES = 6
"""Lines of a stack in the text; the page and the JSON object have more."""
STACK_MAX = 64
LIMITS = (
    "One order of the host is recorded: branches that it did not take are not judged.",
    "Values are not computed: wrong numbers are not found, and what the script asks a tensor for "
    "is made up where it is listed.",
    "Kernels below torch's dispatcher (Triton, Transformer Engine, CUDA graphs, symmetric memory) "
    "are not seen: those that were met are listed.",
    "The allocator is the worst case: any freed block of a stream may serve its next allocation.",
    "Ranks are compared by each communicator alone, without sends and receives: orders of two "
    "communicators, and sends that wait for each other, are not judged.",
    "One recording per process: what a library caches belongs to the first.",
)


def document_of(tape: Tape, failure: str = "") -> Document:
    """Return all findings of a recording of one rank."""
    return {
        "rank": tape.rank,
        "world": tape.world,
        "operations": tape.operation_count,
        "peak_device_bytes": tape.peak_bytes,
        "findings": [_hazard(each) for each in tape.findings],
        "refused": dict(tape.refused),
        "invented": dict(tape.invented),
        "failure": failure,
        "collectives": {
            name: [
                {
                    "kind": each.kind,
                    "ranks": list(each.ranks),
                    "sizes": list(each.sizes),
                    "dtype": each.dtype,
                    "detail": each.detail,
                    "at": [str(frame) for frame in informative_frames(each.stack)[:3]],
                }
                for each in issued
            ]
            for name, issued in tape.collectives.items()
        },
    }


def _hazard(hazard: Hazard) -> Document:
    return {
        "kind": hazard.kind.value,
        "count": hazard.count,
        "missing_edge": hazard.missing_edge,
        "earlier": _access(hazard.earlier),
        "later": _access(hazard.later),
        "block": _origin(hazard.block),
        "former_block": _origin(hazard.former) if hazard.former else None,
        "last_wait": _stack(hazard.last_wait),
    }


def _access(access: RecordedAccess) -> Document:
    return {
        "operation": access.operation,
        "does": "writes" if access.writes else "reads",
        "stream": access.timeline.name,
        "first_byte": access.region.start,
        "end_byte": access.region.end,
        "stack": _stack(access.stack),
    }


def _origin(origin: BlockOrigin) -> Document:
    return {
        "label": origin.label,
        "kind": origin.kind.value,
        "bytes": origin.size,
        "home": origin.home,
        "allocated": _stack(origin.allocated),
        "dropped": _stack(origin.dropped),
    }


def _stack(stack: CallStack | None) -> list[Document]:
    """Return the relevant lines of a stack, the innermost first."""
    frames: Iterable[StackFrame] = informative_frames(stack)
    return [{"file": each.file, "line": each.line, "function": each.function} for each in frames]


@dataclass(frozen=True)
class ScriptRecording:
    """Recordings of one script on one or several ranks."""

    ranks: Sequence[Document]

    @property
    def divergences(self) -> list[str]:
        """Return the first disagreements between two recorded ranks on each communicator."""
        return divergences(self.ranks)

    @property
    def findings(self) -> list[Document]:
        """Return the hazards of all recorded ranks, each code location once."""
        found: dict[str, Document] = {}
        for rank in self.ranks:
            for each in rank["findings"]:
                found.setdefault(_signature(each), each)
        return list(found.values())

    @property
    def failures(self) -> list[str]:
        """Return the errors that ended the script, for each rank that has one."""
        return [f"rank {each['rank']}: {each['failure']}" for each in self.ranks if each["failure"]]

    @property
    def is_clean(self) -> bool:
        """Return True if there are no findings and no divergences."""
        return not self.findings and not self.divergences

    def document(self) -> JobDocument:
        """Return the schedule of the repeated step, which all recorded ranks must share.

        Raises:
            LiftError: there is none, none was requested, or two ranks have different ones.
        """
        for each in self.ranks:
            if "schedule" not in each:
                raise LiftError(each.get("not_lifted", "the script was not recorded for a lift"))
        return one_for_all({each["rank"]: decode(each["schedule"]) for each in self.ranks})

    def to_dict(self) -> Document:
        """Return the report as a dict, as printed by `--json`."""
        return {
            "findings": self.findings,
            "divergences": self.divergences,
            "failures": self.failures,
            "limits": list(LIMITS),
            "ranks": [
                {key: value for key, value in each.items() if key != "schedule"}
                for each in self.ranks
            ],
        }

    def text(self) -> str:
        """Return the findings, then made-up and unseen parts, then the limits, as text."""
        lines = [self._summary()]
        for number, each in enumerate(self.findings, 1):
            lines += [
                "",
                f"{number}. {each['kind']}: {each['missing_edge']}",
                *_finding_lines(each),
            ]
        lines += [line for each in self.divergences for line in ("", f"divergence: {each}")]
        lines += [line for each in self.failures for line in ("", f"the script failed: {each}")]
        lines += [
            line
            for each in self.ranks
            if "not_lifted" in each
            for line in ("", f"no schedule: rank {each['rank']}: {each['not_lifted']}")
        ]
        for title, name in (("not seen", "refused"), ("made up", "invented")):
            counts = self._counted(name)
            if counts:
                lines += ["", f"{title}:", *(f"  {what} ({count} times)" for what, count in counts)]
        return "\n".join([*lines, "", "limits:", *(f"  {limit}" for limit in LIMITS)])

    def page(self, title: str) -> str:
        """Return the findings, made-up and unseen parts and limits as an HTML page."""
        body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(self._summary())}</p>"]
        for number, each in enumerate(self.findings, 1):
            body.append(f"<h2>{number}. {html.escape(each['kind'])}</h2>")
            body.append(f"<p><b>{html.escape(each['missing_edge'])}</b></p>")
            told = "\n".join(_finding_lines(each, STACK_MAX))
            body.append(f"<pre>{html.escape(told)}</pre>")
        for line in (*self.divergences, *self.failures):
            body.append(f"<h2>divergence or failure</h2><p>{html.escape(line)}</p>")
        for heading, name in (("Not seen", "refused"), ("Made up", "invented")):
            items = "".join(
                f"<li>{html.escape(what)} ({count} times)</li>"
                for what, count in self._counted(name)
            )
            body.append(f"<h2>{heading}</h2><ul>{items}</ul>" if items else "")
        limits = "".join(f"<li>{html.escape(limit)}</li>" for limit in LIMITS)
        body.append(f"<h2>Limits</h2><ul>{limits}</ul>")
        return _PAGE.format(title=html.escape(title), body="\n".join(body))

    def _summary(self) -> str:
        names = ", ".join(str(each["rank"]) for each in self.ranks)
        world = self.ranks[0]["world"]
        operations = sum(each["operations"] for each in self.ranks)
        found = len(self.findings) + len(self.divergences)
        noun = "finding" if found == 1 else "findings"
        which = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{found} {noun}; {which} {names} of {world}, {operations} operations"

    def _counted(self, name: str) -> list[tuple[str, int]]:
        counts: dict[str, int] = {}
        for rank in self.ranks:
            for what, count in rank[name].items():
                counts[what] = counts.get(what, 0) + count
        return list(counts.items())


def _finding_lines(finding: Mapping[str, Any], frames: int = FRAMES) -> list[str]:
    earlier, later, block = finding["earlier"], finding["later"], finding["block"]
    lines = [
        f"   {earlier['operation']} on {earlier['stream']} {earlier['does']}",
        *_frames(earlier["stack"], frames),
        f"   {later['operation']} on {later['stream']} {later['does']}, and nothing orders the two",
        *_frames(later["stack"], frames),
    ]
    former = finding["former_block"]
    if former is not None:
        lines += [
            f"   the memory was {_named(former)}, allocated",
            *_frames(former["allocated"], 3),
        ]
        lines += ["   dropped", *_frames(former["dropped"], 3)]
        lines += [f"   and may be that of {_named(block)}, allocated"]
    else:
        lines += [f"   of {_named(block)}, allocated"]
    lines += _frames(block["allocated"], 3)
    if finding["last_wait"]:
        lines += [f"   {later['stream']} last waited for {earlier['stream']}, too early, at"]
        lines += _frames(finding["last_wait"], 3)
    if finding["count"] > 1:
        lines.append(f"   {finding['count']} times")
    return lines


def _named(block: Mapping[str, Any]) -> str:
    home = f" on {block['home']}" if block["home"] else ""
    return f"{block['label']} ({block['kind']} memory, {block['bytes']} bytes){home}"


def _frames(stack: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    return [
        f"      {_short(each['file'])}:{each['line']} {each['function']}" for each in stack[:count]
    ]


def _short(file: str) -> str:
    """Return a path relative to the package folder or the working folder."""
    for root in (_PACKAGES, str(Path.cwd())):
        if file.startswith(root):
            return file[len(root) :].lstrip(os.sep)
    return file


def _signature(finding: Mapping[str, Any]) -> str:
    places = [
        [(line["file"], line["line"]) for line in finding[which]["stack"][:3]]
        for which in ("earlier", "later")
    ]
    return f"{finding['kind']} {finding['missing_edge']} {places}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
pre {{ overflow-x: auto; background: #f4f4f4; padding: 1rem }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
