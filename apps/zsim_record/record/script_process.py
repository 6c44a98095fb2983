"""Record scripts in separate processes, one for each rank."""

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from zsim.backend.document import encode
from zsim_record.lift.lifted_schedule import document
from zsim_record.lift.step_events import LiftError
from zsim_record.record.finding_report import Document, ScriptRecording, document_of
from zsim_record.record.recording import recording
from zsim_record.record.tape import Tape


class ScriptError(ValueError):
    """The script cannot be started."""


def record_script(
    command: Sequence[str],
    *,
    world: int,
    ranks: Sequence[int],
    cuda: bool,
    lifts: bool = False,
) -> ScriptRecording:
    """Record `command`, a script and its arguments, on each of `ranks`, one process per rank.

    With `lifts`, the repeated step becomes a schedule, if it can be expressed as one.

    Raises:
        ScriptError: `command` is not a readable Python script.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or (words[0] != "-m" and not Path(words[0]).is_file()):
        raise ScriptError(
            f"{words[0] if words else 'no command'!r} must be a Python script that can be read, "
            "or -m and a module"
        )
    options = [f"--world={world}"] + ["--cuda"] * cuda + ["--lifts"] * lifts
    return ScriptRecording([_recorded(words, [*options, f"--rank={rank}"], rank) for rank in ranks])


def _recorded(words: Sequence[str], options: Sequence[str], rank: int) -> Document:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recording.json"
        module = "zsim_record.record"
        command = [sys.executable, "-m", module, *options, f"--out={file}", "--", *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                sys.stderr.write(line)  # output of the script is not part of the result
        if not file.is_file():
            raise ScriptError(f"rank {rank}: the process ended with code {process.returncode}")
        document: Document = json.loads(file.read_text("utf-8"))
        return document


def main(arguments: Sequence[str]) -> None:
    """Record one rank of a script and write its findings as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--lifts", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    failure = ""
    with recording(world=given.world, rank=given.rank, cuda=given.cuda, lifts=given.lifts) as tape:
        try:
            _run(given.command)
        except SystemExit as ended:
            failure = f"it exits with {ended.code}" if ended.code else ""
        except Exception as error:  # the findings so far are still useful
            traceback.print_exc()
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = document_of(tape, failure)
    if given.lifts:
        found |= _lifted(tape, " ".join(given.command))
    given.out.write_text(json.dumps(found), "utf-8")


def _lifted(tape: Tape, name: str) -> Document:
    """Return the repeated step as the JSON of a schedule, or the reason why there is none."""
    try:
        return {"schedule": encode(document(tape.schedule(name)))}
    except LiftError as error:
        return {"not_lifted": str(error)}


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")
