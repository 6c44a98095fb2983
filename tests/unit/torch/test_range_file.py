"""Files without names: any range is read and written past the page cache, and nothing is left."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim_torch.execute.host_memory import HostBlock, HostPool
from zsim_torch.execute.range_file import (
    ALIGNMENT,
    CHUNK_BYTES,
    FileRangeError,
    RangeFile,
    space_refusal,
)

SIZE = 5 * ALIGNMENT


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of a folder, as Linux names it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    holding = [each for each in mounts if folder.resolve().is_relative_to(each[1])]
    return max(holding, key=lambda each: len(each[1]))[2]


@pytest.fixture(scope="module", params=["direct", "through the page cache"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RangeFile:
    folder = tmp_path_factory.mktemp("files")
    if request.param == "direct":
        if file_system_of(folder) == "tmpfs":
            pytest.skip("tmpfs takes O_DIRECT with any alignment, which proves nothing")
        made = RangeFile(folder, SIZE)
        assert made.direct
        return made
    with pytest.MonkeyPatch.context() as patch:
        refuse_direct(patch)
        made = RangeFile(folder, SIZE)
    assert not made.direct
    return made


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """A file system that has no O_DIRECT."""
    right = os.open

    def refused(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return right(path, flags, mode)

    patch.setattr(os, "open", refused)


def block(size: int) -> HostBlock:
    return HostPool(size, pinned=False, poison=False).take(size)


def whole(file: RangeFile) -> torch.Tensor:
    found = block(SIZE).tensor(SIZE, torch.uint8)
    file.read(0, found)
    return found


@pytest.mark.one_commit_in(6)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, SIZE),
            st.integers(0, SIZE),
            st.integers(0, 2 * ALIGNMENT),
            st.booleans(),
        ),
        max_size=4,
    ),
    st.integers(0, 255),
)
def test_any_range_is_read_and_written_from_any_address(
    file: RangeFile, moves: list[tuple[int, int, int, bool]], byte: int
) -> None:
    wanted = whole(file).clone()
    for start, end, beginning, even in moves:
        unit = ALIGNMENT if even else 1  # whole blocks at whole addresses go at once
        low, high, address = (
            each // unit * unit for each in (min(start, end), max(start, end), beginning)
        )
        memory = block(SIZE + 3 * ALIGNMENT).tensor(SIZE + 3 * ALIGNMENT, torch.uint8)
        part = memory[address : address + high - low]
        part.copy_(torch.arange(high - low).add_(byte).to(torch.uint8))
        file.write(low, part)
        wanted[low:high] = part
        memory.zero_()
        file.read(low, part)
        assert torch.equal(part, wanted[low:high])
        assert not memory[:address].any()
        assert not memory[address + high - low :].any()
    assert torch.equal(whole(file), wanted)


def test_room_behind_a_buffer_saves_the_way_through_another(tmp_path: Path) -> None:
    file = RangeFile(tmp_path, SIZE)
    here = block(100)
    here.tensor(100, torch.uint8).fill_(7)
    file.write(ALIGNMENT, here.tensor(100, torch.uint8), room=ALIGNMENT - 100)
    there = block(100)
    file.read(ALIGNMENT, there.tensor(100, torch.uint8), room=there.room)
    assert there.tensor(100, torch.uint8).eq(7).all()
    assert (file.read_bytes, file.written_bytes) == (100, 100)


def test_ranges_of_many_chunks_come_back(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + ALIGNMENT
    file = RangeFile(tmp_path, size)
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    here = block(size).tensor(size, torch.uint8)
    here.copy_(values)
    file.write(0, here)
    here.zero_()
    file.read(0, here)
    assert torch.equal(here, values)


def test_in_poison_mode_what_was_never_written_is_no_number(tmp_path: Path) -> None:
    found = block(SIZE).tensor(SIZE // 4, torch.float32)
    RangeFile(tmp_path, SIZE, poison=True).read(0, found)
    assert found.isnan().all()


def test_too_little_space_is_said_with_what_is_needed(tmp_path: Path) -> None:
    assert space_refusal(tmp_path, ALIGNMENT) is None
    why = space_refusal(tmp_path, 1 << 55)
    assert why is not None
    assert why.startswith(f"offload_path: {tmp_path} has ")
    assert why.endswith(" free, the files of the ranks need 36 PB")


def test_a_folder_that_is_not_there_or_is_none_is_refused(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert space_refusal(nowhere, 1) == f"offload_path: {nowhere}: No such file or directory"
    plain = tmp_path / "plain"
    plain.touch()
    assert space_refusal(plain, 1) == f"offload_path: {plain}: Not a directory"


def test_space_that_is_gone_by_then_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileRangeError, match=r"has no 20\.\d kB for a file: No space left"):
        RangeFile(tmp_path, SIZE)


def test_a_read_past_the_end_is_said(tmp_path: Path) -> None:
    file = RangeFile(tmp_path, ALIGNMENT)
    target = block(2 * ALIGNMENT).tensor(2 * ALIGNMENT, torch.uint8)
    with pytest.raises(FileRangeError, match="read 4096 of 8192 bytes at 0"):
        file.read(0, target)


LIVES = """
import sys, time
from pathlib import Path
from zsim_torch.execute.range_file import RangeFile
file = RangeFile(Path(sys.argv[1]), 1 << 20)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.one_commit_in(12)
def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIVES, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_unnamed_files_has_one_that_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = os.open

    def refused(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return right(path, flags, mode)

    monkeypatch.setattr(os, "open", refused)
    made = RangeFile(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []
    assert not whole(made).any()
