"""The page of one run: the answer, then sections on time, memory and the network."""

from collections.abc import Sequence

from zsim.analysis.summary import Summary, last_step
from zsim.backend.backend import Job
from zsim.report.experts_section import experts
from zsim.report.memory_section import memory
from zsim.report.network_section import network
from zsim.report.page import Page, Section
from zsim.report.streams_section import streams
from zsim.report.time_section import split
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_seconds


def run_page(
    job: Job,
    trace: Trace,
    found: Summary,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    settings: Section | None = None,
) -> Page:
    """Return the page of `trace`, a run of `job` with the figures `found`.

    `facts` are the lines that the command prints; `settings` is the section on the scenario.
    """
    begin_ps, end_ps = last_step(trace)
    sections: list[Section] = []
    if end_ps > begin_ps:
        sections += [split(job, trace), streams(job, trace)]
    sections.append(memory(job, trace))
    if trace.links:
        sections.append(network(job, trace, found))
    if (of_experts := experts(job, trace)) is not None:
        sections.append(of_experts)
    if settings is not None:
        sections.append(settings)
    return Page(
        title=title,
        answer=_answer(found),
        facts=tuple(facts),
        sections=tuple(sections),
    )


def _answer(found: Summary) -> str:
    """Return a sentence on memory and step time, with the needed memory if the run does not fit."""
    needed = found.needed_bytes
    if not found.fits and 0 < found.usable_bytes < needed:
        text = f"It does not fit: it needs {format_bytes(needed)} of the "
        text += f"{format_bytes(found.usable_bytes)} that a GPU has"
        if found.step_time_s:
            took = format_seconds(found.step_time_s)
            text += f". A step would take {took} if there were more memory"
        return f"{text}."
    if found.reserved_bytes is not None:
        memory_used = f"{format_bytes(found.reserved_bytes)} are reserved at most"
    else:
        memory_used = f"{format_bytes(found.peak_allocated_bytes)} are alive at the peak"
    text = f"It {'fits' if found.fits else 'does not fit'}: {memory_used}"
    if found.usable_bytes:
        text += f", of {format_bytes(found.usable_bytes)}"
    if found.step_time_s:
        text += f". A step takes {format_seconds(found.step_time_s)}, bound by {found.bound_by}"
    return f"{text}."
