"""The command line: `zsim run`, `check`, `plan`, `topology`, `list`, `show` and others."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import EntryPoint
from io import TextIOWrapper
from typing import Annotated, Protocol, cast

import typer

from zsim.cli.notice import noticed
from zsim.cli.option import Code
from zsim.entry_point import duplicate, entries, load
from zsim.mistake import (
    MistakeError,
    UnwrittenError,
    is_out_of_memory,
    one_line,
    reason_of,
)

OUT_OF_MEMORY = (
    b"zsim: out of memory: the command needs more than there is, or than --limit memory allows\n"
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota or a file that is too large."""

HELP = {"-h", "--help"}
GROUP = "zsim.commands"
"""Entry points of commands of apps: the name of each, and its function."""

TALKING = {"", "record", "serve"}
"""Commands that print while they work."""

CORE = {
    "run": "zsim.cli.run:run",
    "check": "zsim.cli.check:check",
    "plan": "zsim.cli.plan:plan",
    "compare": "zsim.cli.compare:compare",
    "topology": "zsim.cli.topology:topology",
    "list": "zsim.cli.listing:list_",
    "show": "zsim.cli.show:show",
}
"""Commands of the core, as entry points of the same form."""


def _print_version(given: bool) -> None:  # noqa: FBT001  (typer hands it over)
    if given:
        from importlib.metadata import version

        print(f"zsim {version('zsim')}")
        raise typer.Exit


def options(
    context: typer.Context,
    *,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="KEY=VALUE",
            help="Bound the command: memory=8 GB, time=60 s, operations=1e7, ranks, runs, "
            "file, config, values, depth, run-memory, run-time. Many are allowed.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Simulate ZeRO training on a cluster, or run the same schedule on real ranks."""
    if context.obj:  # the user asks for help, which needs no limits
        return
    from zsim.api.limited import chosen_limits, limited

    context.with_resource(limited(**chosen_limits(limit or ())))


def commands() -> dict[str, EntryPoint]:
    """Return the commands by name: first the core, then installed apps.

    Raises:
        EntryPointError: two commands have one name.
    """
    known = {name: EntryPoint(name, value, GROUP) for name, value in CORE.items()}
    for entry in entries(GROUP):
        if entry.name in known:
            raise duplicate(entry)
        known[entry.name] = entry
    return known


def app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line for `arguments`: the command that they name alone, or else all.

    Imports the modules of those commands.
    """
    name = _command(arguments)
    if name in CORE:  # without reading the metadata of installed packages
        chosen = {name: EntryPoint(name, CORE[name], GROUP)}
    else:
        known = commands()
        chosen = {name: known[name]} if name in known else known
    found = typer.Typer(
        context_settings={"help_option_names": sorted(HELP)},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    found.callback()(options)
    for each, entry in chosen.items():
        found.command(each)(cast("Callable[..., object]", load(entry)))
    return found


def _command(arguments: Sequence[str]) -> str:
    """Return the first argument that is neither an option of `zsim` nor its value; "" if none."""
    left = iter(arguments)
    for argument in left:
        if argument == "--limit":
            next(left, "")
        elif argument in HELP:
            return ""
        elif not argument.startswith("-"):
            return argument
    return ""


class _Usage(Protocol):
    """The part of typer's usage error that this module reads."""

    ctx: typer.Context | None

    def format_message(self) -> str: ...


USAGE = cast("type[Exception]", typer.BadParameter.__base__)
"""Base class of all usage errors; typer does not export it under a public name."""


def answer(arguments: Sequence[str]) -> int:
    """Run the command line `arguments` and return the exit code; print help if it is empty."""
    try:
        found = app(arguments)(
            args=list(arguments) or ["--help"],
            prog_name="zsim",
            standalone_mode=False,
            obj=not HELP.isdisjoint(arguments),
        )
        print(end="", flush=True)
    except MistakeError as mistake:
        return _refuse(str(mistake), Code.MISTAKE)
    except UnwrittenError as failure:
        return _refuse(f"done, but {failure}", Code.UNWRITTEN)
    except USAGE as error:
        usage = cast("_Usage", error)
        command = "zsim" if usage.ctx is None else usage.ctx.command_path
        message = usage.format_message().rstrip(".")
        return _refuse(f"{message} (see {command} --help)", Code.MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        found = Code.INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the reader closed the pipe; typer exits
        sys.stdout = None
        return Code.DONE
    except OSError as error:
        return _out_of_memory() if is_out_of_memory(error) else _refuse_unwritten(error)
    except Exception as error:  # the user gets one line for any error
        if is_out_of_memory(error):
            return _out_of_memory()
        from zsim.cli.failure import report

        return _refuse(report(error), Code.FAILED)
    if found == Code.INTERRUPTED:  # typer returns it too
        return _refuse("interrupted", Code.INTERRUPTED)
    return found if isinstance(found, int) else Code.DONE


def _out_of_memory() -> Code:
    """Write a preallocated message: there may be no memory to build another one."""
    with suppress(OSError):
        os.write(2, OUT_OF_MEMORY)
    return Code.FAILED


def _refuse_unwritten(error: OSError) -> Code:
    """Report an error in writing standard output or another file; return the exit code."""
    try:
        # a failed flush drops its data: print again to test whether stdout is the cause
        print(flush=True)
    except OSError as why:
        sys.stdout = None  # the rest of its buffer could not be written at exit either
        reason = reason_of(why)
        return _refuse(f"the answer could not be written: {reason}", Code.UNWRITTEN)
    from zsim.cli.failure import report

    if error.errno in FULL:
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{reason_of(error)}", Code.FAILED)
    return _refuse(report(error), Code.FAILED)


def _refuse(message: str, code: Code) -> Code:
    """Print `message` as one line on standard error if possible; return `code`."""
    with suppress(OSError):
        print(one_line(message), file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Run the command `zsim`."""
    for stream in (sys.stdout, sys.stderr):  # names may not be printable on this terminal
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    name = _command(words)
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this command on each rank
    with noticed(name) if is_first and name not in TALKING else nullcontext():
        code = answer(words)
    sys.exit(code)
