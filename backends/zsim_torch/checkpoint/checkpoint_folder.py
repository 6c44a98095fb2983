"""A folder with one checkpoint, which is replaced as a whole.

`.metadata` names the files of a checkpoint. Each save writes new files, then atomically replaces
the metadata. However a save ends, the folder therefore holds one complete checkpoint, or none if it
had none. The next save removes files that the metadata does not name.
"""

import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from zsim.backend.backend import RunFailedError
from zsim_torch.checkpoint.safe_load import METADATA, load_metadata, load_value

SUFFIX: Final = ".distcp"


class CheckpointError(RunFailedError):
    """A checkpoint that cannot be written, or not loaded into this training; one line."""


class _Replacing(FileSystem):
    """File system that keeps files until a rename replaces them."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the last checkpoint's metadata stays until a rename replaces it."""


class _Writer(FileSystemWriter):
    """Writes a checkpoint next to an existing one in the same folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # one tensor at a time
        self.fs = _Replacing()
        self.prefix = f"__{uuid4().hex[:12]}"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, without a warning if it already holds a checkpoint."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of this save unique names."""
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"{self.prefix}_{rank}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` as the checkpoint in `folder`; every rank calls it.

    Raises:
        CheckpointError: it cannot be written; the folder is unchanged.
    """
    writer = _Writer(folder)
    alone = not distributed.is_initialized()
    first = alone or distributed.get_rank() == 0
    try:
        with _without_alone_warning():
            save_state(dict(state), storage_writer=writer, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError) as error:
        if first:
            _remove(folder, lambda name: name.startswith(writer.prefix))
        raise CheckpointError(
            f"checkpoint {folder}: not written: {_reason(error)}; the one before is as it was"
        ) from error
    if first:
        _settle(folder)


def _settle(folder: Path) -> None:
    """Flush the new entry of the folder to disk, then remove files of other saves."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    kept = {each.relative_path for each in metadata_of(folder).storage_data.values()}
    _remove(folder, lambda name: name not in kept)


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    with suppress(OSError):
        for path in folder.glob(f"__*{SUFFIX}"):
            if unwanted(path.name):
                path.unlink(missing_ok=True)


def metadata_of(folder: Path) -> Metadata:
    """Return the metadata of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is no complete checkpoint, or it refers to code.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            return load_metadata(file)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"checkpoint {folder}: no complete checkpoint is there") from None
    except Exception as error:  # unpickling a broken file may raise anything
        raise CheckpointError(f"checkpoint {folder}: cannot be read: {_reason(error)}") from error


def read(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Read the values of `state` from `folder`, in place if they are tensors.

    Every rank calls it, with the metadata of the folder.

    Raises:
        CheckpointError: they cannot be read; some tensors may have changed.
    """
    _read(folder, metadata, state, alone=not distributed.is_initialized())


def read_alone(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Read the values of `state` from `folder` on this rank alone; see `read`.

    Raises:
        CheckpointError: they cannot be read.
    """
    _read(folder, metadata, state, alone=True)


class _KnownReader(FileSystemReader):
    """Reads a folder with metadata that was read before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401  (torch's own)
        """Return the known metadata."""
        return self._known


class _CodelessPlanner(DefaultLoadPlanner):
    """Unpickles non-tensor values without running code; keys of a state must be in the folder."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store a value in the state.

        Raises:
            UnsafeError: it refers to code.
        """
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = load_value(value, key)


def _read(folder: Path, metadata: Metadata, state: dict[str, Any], *, alone: bool) -> None:
    try:
        with _without_alone_warning():
            load_state(
                state,
                storage_reader=_KnownReader(folder, metadata),
                planner=_CodelessPlanner(flatten_sharded_tensors=False),
                no_dist=alone,
            )
    except (Exception, CheckpointException) as error:  # a broken file may raise anything
        raise CheckpointError(f"checkpoint {folder}: cannot be read: {_reason(error)}") from error


@contextmanager
def _without_alone_warning() -> Generator[None]:
    """Suppress the warning that a single process saves or loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    """Return the cause in one line; of several failed ranks, that of the lowest."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda each: each[0])
        return f"rank {rank}: {_reason(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
