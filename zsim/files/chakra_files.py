"""Files of Chakra execution traces: `PREFIX.RANK.et` for each rank, and `comm_groups.json`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from zsim.backend.backend import Job
from zsim.backend.chakra_document import document_of
from zsim.backend.document import Document, DocumentError
from zsim.files.input_file import read_bytes, read_file
from zsim.files.output_file import write
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim.trace.chakra import ChakraTrace, TooManyNodesError
from zsim.trace.chakra_schema import ChakraError, ChakraNode, read_nodes
from zsim.trace.trace import Trace

GROUPS = "comm_groups.json"
"""Ranks of each group: the file for ASTRA-sim's `--comm-group-configuration`."""

PREFIX = "zsim"
"""Prefix of the names of written files."""

MOST_NODES = 2_000_000
"""Maximum number of nodes to read, over files with different content."""


def write_chakra(folder: Path, job: Job, trace: Trace) -> None:
    """Write the last step of every rank into `folder`, and the communication groups.

    Raises:
        MistakeError: there are too many nodes.
        UnwrittenError: it cannot be written.
    """
    with mistakes(TooManyNodesError, prefix="--chakra: "):
        found = ChakraTrace(job.schedule, trace)
    for rank in found.ranks:
        write(folder / f"{PREFIX}.{rank}.et", found.rank_bytes(rank))
    write(folder / GROUPS, found.groups_json())


def read_chakra(name: str) -> Document:
    """Return the schedule of the traces in the folder `name`, or with the path prefix `name`.

    Raises:
        MistakeError: there are none, or they cannot be read.
    """
    folder, files = _files(Path(name))
    groups = _groups(folder / GROUPS)
    nodes = list(_nodes(files))
    with mistakes(DocumentError, prefix=f"{name}: "):
        return document_of(files[0].name.rsplit(".", 2)[0], nodes, groups)


def _files(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder, and the file of each rank in it.

    Raises:
        MistakeError: files of some ranks are missing, or belong to several runs.
    """
    folder, prefix = (path, None) if path.is_dir() else (path.parent, path.name)
    found: dict[str, dict[int, Path]] = {}
    for each in folder.glob("*.et"):
        begin, _, rank = each.name.removesuffix(".et").rpartition(".")
        if rank.isdecimal() and len(rank) < 8 and prefix in (None, begin):
            found.setdefault(begin, {})[int(rank)] = each
    if len(found) != 1:
        several = " and ".join(sorted(found)[:3])
        why = f"has several runs: {several}; name one, as {folder / min(found)}" if found else ""
        why = why or "has no Chakra traces: files PREFIX.RANK.et, from PREFIX.0.et on"
        raise MistakeError(f"{path}: {why}")
    ranks = next(iter(found.values()))
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise MistakeError(f"{path}: has no file of rank {missing}, but one of {max(ranks)}")
    return folder, [ranks[rank] for rank in range(len(ranks))]


def _nodes(files: Sequence[Path]) -> Iterator[list[ChakraNode]]:
    """Yield the nodes of each file; files with equal content share one list."""
    known: dict[bytes, list[ChakraNode]] = {}
    total = 0
    for file in files:
        try:
            content = read_bytes(file)
            if content in known:
                yield known[content]
                continue
            nodes = known[content] = list(read_nodes(content))
        except ChakraError as error:
            raise MistakeError(f"{file}: {error}") from None
        except OSError as error:
            raise file_fault(str(file), error) from None
        total += len(nodes)
        if total > MOST_NODES:
            raise MistakeError(
                f"{file}: more than {MOST_NODES:,} nodes of files that differ are not read"
            )
        yield nodes


def _groups(path: Path) -> dict[str, list[int]]:
    """Return the ranks of groups by their name; empty if there is no file."""
    try:
        found: object = json.loads(read_file(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise file_fault(str(path), error) from None
    except (ValueError, RecursionError):
        raise MistakeError(f"{path}: is no JSON") from None
    groups = cast("dict[str, object]", found) if isinstance(found, dict) else {"": None}
    for name, ranks in groups.items():
        whole = isinstance(ranks, list) and all(
            type(each) is int for each in cast("list[object]", ranks)
        )
        if not whole:
            raise MistakeError(f"{path}: group {name!r}: must be a list of ranks")
    return cast("dict[str, list[int]]", groups)
