"""What commands print: one JSON object, or a few lines with the answer first."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from zsim.analysis.plan import Plan
from zsim.schedule.schedule import Schedule, WireBytes
from zsim.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from zsim.api.proof_result import ProofResult
    from zsim.proof.finding import Finding


def print_json(found: object) -> None:
    """`found` as one JSON object."""
    print(json.dumps(found, indent=2, allow_nan=False))


NAME_WIDTH = 23
LINE_WIDTH = 100
NUMBER_AND_UNIT = re.compile(r"(?<=[0-9]) (?=(?:[kMGTPEmunp]?(?:B|s)|[kMGTPE]?FLOP/s|tokens/s)\b)")
NO_BREAK = "\N{NO-BREAK SPACE}"


def print_title(title: str) -> None:
    """Print the title of an answer, on more lines where settings make it long."""
    print(title if len(title) <= LINE_WIDTH else fill(title, LINE_WIDTH, subsequent_indent="  "))


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Names and what they are, in two columns; a number and its unit stay on one line."""
    indent = " " * (NAME_WIDTH + 1)
    for name, text in lines:
        first = f"{name:<{NAME_WIDTH}} "
        print(
            fill(
                NUMBER_AND_UNIT.sub(NO_BREAK, text),
                LINE_WIDTH,
                initial_indent=first,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            ).replace(NO_BREAK, " ")
        )


def plan_object(title: str, plan: Plan) -> dict[str, object]:
    """`zsim plan --json`."""
    return {
        "title": title,
        "ranks": plan.ranks,
        "mesh": dict(plan.mesh),
        "parameters": plan.parameters,
        "trained_parameters": plan.trained_parameters,
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
        "operations": plan.operations,
    }


def _by_group(volumes: Iterable[WireBytes], *, scalar: bool) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for volume in volumes:
        if volume.scalar is scalar:
            found.setdefault(volume.group, {})[volume.collective] = volume.bytes
    return found


def _parameters(plan: Plan) -> str:
    if plan.trained_parameters == plan.parameters:
        return f"{plan.parameters:,}"
    share = plan.trained_parameters / plan.parameters
    return f"{plan.parameters:,}, {plan.trained_parameters:,} of them trained ({share:.2%})"


def print_plan(title: str, plan: Plan) -> None:
    """`zsim plan`: what is held at the peak, and what is sent in a step."""
    mesh = " x ".join(f"{size} {axis}" for axis, size in plan.mesh)
    whose, who = "each GPU", "every rank"
    if plan.roles > 1:  # stages of a pipeline
        whose, who = f"each GPU of {plan.role}, which holds most", f"every rank of {plan.role}"
    print_title(title)
    print_lines(
        [
            ("ranks", f"{plan.ranks}: {mesh}"),
            ("parameters", _parameters(plan)),
            ("model state", f"{format_bytes(plan.model_state_bytes)} on {whose}"),
            (
                "peak memory",
                f"{format_bytes(plan.peak.bytes)} on each GPU, at {plan.peak.operation}",
            ),
            *_host(plan),
            ("operations", f"{plan.operations:,} in a step, on {who}"),
        ]
    )
    memory = _table("held at the peak", "bytes", "")
    for kind, size in plan.peak.by_kind:
        if size:
            memory.add_row(kind.value, f"{size:,}", format_bytes(size))
    wire = _table("sent by a rank in a step", "bytes", "")
    for volume in plan.wire_bytes:
        name = f"{volume.group} {volume.collective}{' (scalars)' if volume.scalar else ''}"
        wire.add_row(name, f"{volume.bytes:,}", format_bytes(volume.bytes))
    for name, size in (
        ("device to host", plan.host_bytes.to_host),
        ("host to device", plan.host_bytes.from_host),
    ):
        if size:
            wire.add_row(name, f"{size:,}", format_bytes(size))
    from rich.console import Console

    console = Console(highlight=False)
    for table in (memory, wire):
        if table.row_count:
            console.print()
            console.print(table)


def _host(plan: Plan) -> list[tuple[str, str]]:
    """What the host's memory holds for each rank, where it holds something."""
    if plan.host_peak is None:
        return []
    return [("host memory", f"{format_bytes(plan.host_peak.bytes)} for each GPU at the peak")]


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def print_findings(schedule: Schedule, findings: Sequence["Finding"]) -> None:
    """Print how many findings there are, then each in a line."""
    print(f"{schedule.name}: {len(findings)} finding{'s' if len(findings) > 1 else ''}")
    for number, finding in enumerate(findings, start=1):
        print(f"{number}. {finding.invariant}: {finding.where}: {finding.why}")


def print_proof(proof: "ProofResult") -> None:
    """Print the answer of `zsim check`: findings or no findings, what is proved and what is not."""
    if proof.findings:
        print_findings(proof.schedule, proof.findings)
    else:
        print(f"{proof.schedule.name}: no findings")
    for name, lines in (("proved", proof.proved), ("not shown", proof.not_shown)):
        if lines:
            print(f"{name}: {'; '.join(lines) if name == 'not shown' else ', '.join(lines)}")


def explain_finding(number: int, finding: "Finding") -> None:
    """`zsim check --explain N`: one finding with its witness, a line for each step of it."""
    print(f"{number}. {finding.invariant}")
    print(f"where: {finding.where}")
    print(f"why: {finding.why}")
    for line in finding.witness:
        print(f"  {line}")


def print_installed(
    titled: Mapping[str, Sequence[tuple[str, str]]], parts: Mapping[str, Sequence[str]]
) -> None:
    """`zsim list`: what can be run, on what, and where, section by section; some with titles."""
    for what, titles in titled.items():
        width = max((len(name) for name, _ in titles), default=0)
        print(what)
        for name, title in titles:
            print(f"  {name:<{width}}  {title}")
    for what, names in parts.items():
        print(what)
        for name in names:
            print(f"  {name}")
