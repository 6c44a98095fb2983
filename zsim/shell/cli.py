"""The command line: `zsim run`, `check`, `plan`, `topology`, `list`, `show` and others.

Exit codes: 0 done; 1 the answer is no (findings, does not fit); 2 the caller's mistake; 3 the run
itself failed; 130 interrupted. What is heavy is imported by the command that needs it.
"""

# ruff: noqa: FBT002, PLR0913, PLR0917  (the arguments of a command are its options)

import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer

from zsim.shell.mistake import MistakeError, one_line


class Code(IntEnum):
    """What the process returns."""

    DONE = 0
    NO = 1
    MISTAKE = 2
    FAILED = 3
    INTERRUPTED = 130


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers from `minimum` on, for an option."""

    def parse(given: str | int) -> int:
        text = str(given)  # a default comes as it is
        if not text.isdecimal() or int(text) < minimum:
            raise typer.BadParameter(f"{text!r} must be a whole number, at least {minimum}")
        return int(text)

    return parse


app = typer.Typer(
    help="One ZeRO schedule, simulated on a cluster or run on real ranks.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Scenario = Annotated[
    str, typer.Argument(help="A scenario that ships (zsim list), or a file.", show_default=False)
]
Schedulish = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO|FILE.json",
        help="A scenario that ships (zsim list), a file, or a schedule in JSON.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the scenario: zero.stage=3. Many are allowed."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def run(
    scenario: Schedulish,
    backend: Annotated[str, typer.Option(help="Where it runs: sim, torch or null.")] = "sim",
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="So many ranks, not the cluster's."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to train on, bytes as tokens (torch).")
    ] = None,
    settings: Settings = None,
    seed: Annotated[
        int, typer.Option(metavar="N", parser=at_least(0), help="Seed of all that is drawn.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", parser=at_least(1), help="Optimizer steps.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what happened there, as JSON.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the last step there: .svg or .png.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Prove the schedule before it runs.")
    ] = True,
    json: Json = False,
) -> Code:
    """Does it fit, how long does a step take, what bounds it."""
    from zsim.shell.running import Request
    from zsim.shell.running import run as run_request
    from zsim.shell.source import Changes

    request = Request(
        source=scenario,
        changes=Changes(settings=tuple(settings or ()), ranks=ranks, steps=steps),
        backend=backend,
        data=data,
        seed=seed,
        trace=trace,
        timeline=timeline,
        check=check,
        as_json=json,
    )
    return Code.DONE if run_request(request) else Code.NO


@app.command()
def check(
    scenario: Schedulish,
    settings: Settings = None,
    explain: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Show finding N with its witness."),
    ] = None,
    json: Json = False,
) -> Code:
    """Prove a schedule: no deadlock, no race, lifetimes, memory, volume."""
    from zsim.check import check as findings_of
    from zsim.shell.answer import explain_finding, findings_object, print_findings, print_json
    from zsim.shell.source import Changes, read

    document = read(scenario, Changes(settings=tuple(settings or ()))).document
    findings = findings_of(document.schedule, document.model)
    if json:
        print_json(findings_object(findings))
    elif explain is None:
        print_findings(document.schedule, findings)
    elif explain <= len(findings):
        explain_finding(explain, findings[explain - 1])
    else:
        raise MistakeError(
            f"--explain: {explain} must be at most {len(findings)}, the findings there are"
        )
    return Code.NO if findings else Code.DONE


@app.command()
def plan(
    scenario: Scenario,
    settings: Settings = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule to this file, as JSON.")
    ] = None,
    json: Json = False,
) -> Code:
    """What it will hold and move: memory, bytes on the wire."""
    from zsim.document import encode
    from zsim.plan import plan as plan_of
    from zsim.shell.answer import plan_object, print_json, print_plan
    from zsim.shell.source import Changes, read
    from zsim.shell.written import write

    source = read(scenario, Changes(settings=tuple(settings or ())))
    document = source.document
    if document.model is None:
        raise MistakeError(f"{scenario}: model: missing; a plan needs it")
    found = plan_of(document.schedule, document.model)
    if schedule is not None:
        write(schedule, encode(document))
    if json:
        print_json(plan_object(found))
    else:
        print_plan(source.title, found)
    return Code.DONE


@app.command()
def topology(
    name: Annotated[
        str, typer.Argument(help="A system or node that ships, or a file.", show_default=False)
    ],
    nodes: Annotated[
        int, typer.Option(metavar="N", parser=at_least(1), help="So many nodes of it.")
    ] = 1,
    fabric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The fabric that a node is put on.")
    ] = None,
    drawing: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE", help="Draw it there: .svg or .png.")
    ] = None,
    json: Json = False,
) -> Code:
    """What a cluster is made of and can carry; draws it."""
    from zsim.shell.topology import Request, describe

    describe(Request(name=name, nodes=nodes, fabric=fabric, drawing=drawing, as_json=json))
    return Code.DONE


@app.command("list")
def list_() -> Code:
    """Name what is installed."""
    import tomllib

    from zsim.backend import names
    from zsim.shell.answer import print_installed
    from zsim.shell.installed import part_names, scenarios
    from zsim.topology import Part

    titles = [(name, tomllib.loads(text)["title"]) for name, text in scenarios().items()]
    parts = {
        "topologies": part_names(Part.SYSTEM),
        "nodes": part_names(Part.NODE),
        "fabrics": part_names(Part.FABRIC),
        "gpus": part_names(Part.GPU),
        "backends": names(),
    }
    print_installed(titles, parts)
    return Code.DONE


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A scenario, topology or part of one.", show_default=False)
    ],
) -> Code:
    """Print what ships: a scenario, topology, node, fabric or GPU."""
    from zsim.shell.source import shipped_text

    print(shipped_text(name), end="")
    return Code.DONE


@app.command()
def calibrate(
    source: Annotated[
        Path, typer.Option("--from", metavar="DIR", help="Folder of published tables, in CSV.")
    ],
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that the profiles are written to.")
    ] = Path("profiles"),
) -> Code:
    """Fit the constants of networks to published rows; writes profiles."""
    from zsim.shell.calibrate import calibrate as calibrate_from

    calibrate_from(source, to)
    return Code.DONE


@app.command()
def validate(
    what: Annotated[str, typer.Argument(metavar="network", help="What is predicted.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of published tables, in CSV.")],
    json: Json = False,
) -> Code:
    """What is predicted beside what was published, with errors."""
    from zsim.shell.validate import validate_network

    if what != "network":
        raise MistakeError(f"{what!r} must be network")
    validate_network(data, as_json=json)
    return Code.DONE


class _Usage(Protocol):
    """typer's word for a wrong command line."""

    def format_message(self) -> str: ...


USAGE = cast("type[Exception]", typer.BadParameter.__base__)
"""Every wrong command line; typer gives the class no public name."""


def answer(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`; the exit code."""
    try:
        found = app(args=list(arguments), prog_name="zsim", standalone_mode=False)
        print(end="", flush=True)
    except MistakeError as mistake:
        return _refuse(str(mistake), Code.MISTAKE)
    except USAGE as error:
        message = cast("_Usage", error).format_message()
        return _refuse(message, Code.MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        found = Code.INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the reader has seen enough; typer ends on it
        sys.stdout = None
        return Code.DONE
    except Exception as error:  # whatever it is, the caller gets one line
        from zsim.shell.failure import report

        return _refuse(report(error), Code.FAILED)
    if found == Code.INTERRUPTED:  # typer returns it too
        return _refuse("interrupted", Code.INTERRUPTED)
    return found if isinstance(found, int) else Code.DONE


def _refuse(message: str, code: Code) -> Code:
    """One line on standard error, whatever the message holds."""
    print(one_line(message), file=sys.stderr)
    return code


def main() -> None:
    """The command `zsim`."""
    for stream in (sys.stdout, sys.stderr):  # a name may hold what the terminal cannot show
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(answer(sys.argv[1:]))
