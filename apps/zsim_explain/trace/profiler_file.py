"""Files of PyTorch's profiler (Kineto), as JSON or compressed with gzip."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from zsim.files.input_file import read_bytes
from zsim.limits import limits
from zsim.mistake import MistakeError, file_fault

GZIP: Final = b"\x1f\x8b"
RECORD: Final = "record one with torch.profiler and export_chrome_trace"


def read_profile(path: Path) -> Mapping[str, Any]:
    """Return the object in the trace at `path`, with a list of events in `traceEvents`.

    Kineto writes control characters, NaN and wrong UTF-8 into names; they are accepted.

    Raises:
        MistakeError: the file is missing, too large, or no such trace; one line.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise file_fault(str(path), error) from None
    except ValueError:  # a null character in the name
        raise MistakeError(f"{str(path)!r} must be the name of a file") from None
    text = _unpacked(path, content).decode("utf-8", "replace")
    try:
        found = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise MistakeError(
            f"{path}: {where}: {error.msg}; the file may be cut, or a name in it may have an "
            "unescaped quote or backslash: Kineto escapes them since 2026"
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or too deep
        raise MistakeError(f"{path}: not a trace: {RECORD}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        why = "a Chakra trace has no times" if _is_chakra(found) else "no traceEvents"
        raise MistakeError(f"{path}: {why}; {RECORD}")
    rest = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return {**rest, "traceEvents": cast("list[object]", events)}


def _unpacked(path: Path, content: bytes) -> bytes:
    """Return the content of the file, decompressed if it is compressed.

    Raises:
        MistakeError: it is damaged, or larger than a file may be.
    """
    if not content.startswith(GZIP):
        return content
    most = limits().file_bytes
    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(content, most)
    except zlib.error:
        raise MistakeError(f"{path}: damaged: gzip cannot decompress it") from None
    if unpacker.unconsumed_tail:
        raise MistakeError(
            f"{path}: more than {most:,} bytes after decompression; raise --limit file_bytes, or "
            "record fewer steps, without stacks"
        )
    if not unpacker.eof:
        raise MistakeError(f"{path}: cut: the end of the gzip file is missing")
    return found


def _is_chakra(found: object) -> bool:
    """Return True for an execution trace, which lists nodes."""
    return isinstance(found, dict) and "nodes" in found
