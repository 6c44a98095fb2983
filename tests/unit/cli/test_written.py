"""Files beside an answer: whole or not at all, never instead of the answer."""

import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_answers import Ask, without_notice

from zsim.backend.document import decode, decode_trace
from zsim.cli.option import Code
from zsim.files.output_file import write

ZSIM = Path(sys.executable).parent / "zsim"
FULL = Path("/dev/full")
STUDY = """
question = "Which stage?"
[base]
scenario = "tiny"
[[axis]]
field = "zero.stage"
values = [1, 2]
[goal]
minimize = "step_time"
"""


def full(path: Path) -> Path:
    """A name in the folder of `path` behind which no space is left."""
    path.symlink_to(FULL)
    return path


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("words", "option", "name"),
    [
        ("run tiny", "--trace", "trace.json"),
        ("run tiny", "--timeline", "step.svg"),
        ("run tiny", "--timeline", "step.png"),
        ("run tiny", "--picture", "memory.svg"),
        ("run tiny", "--report", "page.html"),
        ("plan tiny", "--schedule", "schedule.json"),
        ("topology dgx_h100", "--draw", "node.svg"),
    ],
)
def test_an_answer_stands_where_a_file_beside_it_cannot_be_written(
    ask: Ask, tmp_path: Path, words: str, option: str, name: str
) -> None:
    _, answer, _ = ask(*words.split())
    path = full(tmp_path / name)
    code, out, error = ask(*words.split(), option, path)
    assert code == Code.UNWRITTEN
    assert out == answer
    assert error == f"zsim: done, but {path} could not be written: no space left on device\n"


def test_the_answer_of_a_sweep_stands_and_every_file_that_cannot_be_written_is_named(
    ask: Ask, tmp_path: Path
) -> None:
    study = tmp_path / "stages.toml"
    study.write_text(STUDY, "utf-8")
    table, drawn = full(tmp_path / "runs.csv"), full(tmp_path / "runs.svg")
    page = tmp_path / "page.html"
    words = ["sweep", study, "--workers", "1", "--store", tmp_path / "runs.sqlite"]
    code, out, error = ask(*words, "--csv", table, "--picture", drawn, "--report", page)
    assert code == Code.UNWRITTEN
    assert out.startswith("Which stage?\n")
    why = "could not be written: no space left on device"
    assert error == f"zsim: done, but {table} {why}; {drawn} {why}\n"
    assert page.read_text("utf-8").endswith("</html>")


@pytest.mark.one_commit_in(9)
def test_real_ranks_tell_their_losses_where_the_trace_cannot_be_written(ask: Ask) -> None:
    words = "run tiny --backend torch --ranks 2 --steps 2 --json --trace"
    code, out, error = ask(*words.split(), FULL)
    assert code == Code.UNWRITTEN
    assert len(json.loads(out)["losses"]) == 2
    assert error == "zsim: done, but /dev/full could not be written: no space left on device\n"


@pytest.mark.one_commit_in(15)
def test_a_disk_that_fills_up_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there", "utf-8")

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [ZSIM, "run", "tiny", "--trace", path],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=small_files,
    )
    assert (done.returncode, done.stderr) == (
        4,
        f"zsim: done, but {path} could not be written: file too large\n",
    )
    assert done.stdout.startswith("Tiny: ")
    assert path.read_text("utf-8") == "what was there"
    assert [*tmp_path.iterdir()] == [path]


def test_a_symbolic_link_stays_one_and_its_target_is_written(ask: Ask, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert ask("plan", "tiny", "--schedule", link)[0] == 0
    assert link.is_symlink()
    assert decode(target.read_text("utf-8")).schedule.programs


def test_a_disk_that_fills_up_leaves_the_target_of_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("what was there", "utf-8")
    link.symlink_to(target)
    program = (
        "import resource; from pathlib import Path; from zsim.files.output_file import write;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        f"write(Path({str(link)!r}), 'x' * 10000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert b"could not be written: file too large" in done.stderr
    assert target.read_text("utf-8") == "what was there"
    assert sorted(tmp_path.iterdir()) == [link, target]


@pytest.mark.parametrize("has_nameless_files", [True, False])
def test_a_process_killed_while_it_writes_leaves_what_was_there(
    tmp_path: Path, *, has_nameless_files: bool
) -> None:
    path = tmp_path / "page.html"
    path.write_text("what was there", "utf-8")
    program = f"""
import os, signal
from pathlib import Path
from zsim.files.output_file import write
if not {has_nameless_files}:
    del os.O_TMPFILE
    os.O_TMPFILE = os.O_DIRECTORY | os.O_EXCL  # refused, as by a file system without them
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write(Path({str(path)!r}), "x" * 10000)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text("utf-8") == "what was there"
    beside = [each for each in tmp_path.iterdir() if each != path]
    assert len(beside) == (0 if has_nameless_files else 1)


@pytest.mark.one_commit_in(15)
def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = f"{ZSIM} run tiny --trace {pipe} > {tmp_path / 'answer'} & timeout 60 cat {pipe}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert decode_trace(done.stdout).steps
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_file_written_to_standard_output_follows_the_answer(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.txt"
    end = "| cat" if kind == "pipe" else ""
    command = f"{ZSIM} plan tiny --json --schedule /dev/stdout {end} > {path}"
    subprocess.run(["bash", "-c", command], check=True)
    answer, end_of_it = json.JSONDecoder().raw_decode(text := path.read_text("utf-8"))
    assert answer["ranks"]
    assert decode(text[end_of_it:]).schedule.programs


@pytest.mark.one_commit_in(12)
def test_files_are_written_for_a_reader_that_has_left(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = f"set -o pipefail; {ZSIM} run tiny --trace {trace} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert decode_trace(trace.read_text("utf-8")).steps


def test_a_file_keeps_its_permissions_and_a_new_one_has_those_of_any_other(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.write_text("", "utf-8")
    old.chmod(0o640)
    other.write_text("", "utf-8")
    for path in (old, new):
        write(path, "content")
        assert path.read_text("utf-8") == "content"
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert new.stat().st_mode == other.stat().st_mode


def test_a_folder_in_place_of_a_file_is_refused_before_anything_runs(
    ask: Ask, tmp_path: Path
) -> None:
    code, out, error = ask("plan", "tiny", "--schedule", tmp_path)
    assert (code, out) == (2, "")
    assert error == f"zsim: --schedule: {tmp_path}: is a folder, must be a file\n"


MANY = """
question = "Which bucket?"
[base]
scenario = "tiny"
[[axis]]
field = "zero.stage"
values = [1, 2, 3]
[[axis]]
field = "zero.bucket_elements"
values = [1000, 2000, 4000, 8000]
[goal]
minimize = "step_time"
"""


def sweep_below(limit_bytes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A study whose store, a file like all others, may have so many bytes."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    (folder / "buckets.toml").write_text(MANY, "utf-8")
    return subprocess.run(
        [ZSIM, "sweep", "buckets.toml", "--workers", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        preexec_fn=small_files,
    )


@pytest.mark.one_commit_in(21)
def test_a_sweep_goes_on_when_its_store_is_full_and_the_next_one_keeps_the_rest(
    tmp_path: Path,
) -> None:
    full = sweep_below(20_000, tmp_path)
    assert full.returncode == Code.UNWRITTEN
    line = r"zsim: done, but buckets\.sqlite could not be written: .+; (\d+) of 12 runs are not in"
    found = re.match(f"{line} it; the same command goes on\n$", without_notice(full.stderr))
    assert found is not None, full.stderr
    assert 0 < int(found[1]) < 12
    again = sweep_below(10**9, tmp_path)
    assert (again.returncode, without_notice(again.stderr)) == (0, "")
    assert json.loads(again.stdout) == json.loads(full.stdout)
    assert json.loads(full.stdout)["best"]


@pytest.mark.one_commit_in(12)
def test_a_store_for_which_there_is_no_space_ends_a_sweep_before_it_begins(tmp_path: Path) -> None:
    done = sweep_below(100, tmp_path)
    assert (done.returncode, done.stdout) == (Code.FAILED, "")
    assert re.match(r"zsim: --store: buckets\.sqlite: .+\n$", without_notice(done.stderr))
