"""Broken files: every command answers, or says in one line why not, in time and within 1 GiB."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutated_files import Case, case
from valid_files import bases

from zsim.cli.main import answer

READER = Path(__file__).parents[2] / "support" / "read_mutated.py"
RIGHT = "right"


def faults(first: int, count: int) -> list[str]:
    """What is wrong with cases `first` and on, read in a process of their own."""
    done = subprocess.run(
        [sys.executable, READER, str(first), str(count)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    found = [line for line in lines if not line.endswith(f": {RIGHT}")]
    if done.returncode:
        found.append(f"exit {done.returncode}: {done.stderr}")
    assert done.returncode or len(lines) >= count
    return found


RIGHT_FILES = [base for kind in bases() for base in kind]


@pytest.mark.matrix(15)
@pytest.mark.parametrize("number", range(len(RIGHT_FILES)))
def test_a_file_that_is_not_broken_is_read(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the others would say nothing."""
    base = RIGHT_FILES[number]
    command = base.commands[0]
    files = (
        (base.name, base.text.encode()),
        *((name, text.encode()) for name, text in base.others),
    )
    words = (command[0], base.read, *command[1:])
    assert answer(Case(number=0, files=files, words=words).write(tmp_path)) in (0, 1)
    assert capsys.readouterr().out


def test_a_case_is_a_function_of_its_number() -> None:
    assert case(7) == case(7)
    assert len({case(number).files for number in range(60)}) > 55


@pytest.mark.one_commit_in(24)
def test_broken_files_are_read_or_refused_in_one_line() -> None:
    assert faults(0, 200) == []


def test_a_reader_that_a_large_process_starts_is_not_charged_for_its_memory() -> None:
    """A test worker may hold more than a reader may."""
    started = f"{Path(__file__).parent!s}", f"{READER.parent!s}"
    code = f"""
import sys
sys.path[:0] = {started!r}
from test_mutated_files import faults
held = bytearray({2**30 + 2**27})
print(faults(0, 1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_broken_files_are_read_or_refused_in_one_line() -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda first: faults(first, 500), range(200, 10_200, 500)))
    assert [line for lines in found for line in lines] == []
