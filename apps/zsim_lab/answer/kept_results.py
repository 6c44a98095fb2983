"""Results that a file keeps as JSON lines, so that a long command can be run again."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from zsim.files.input_file import read_file
from zsim.files.output_file import unwritten
from zsim.mistake import reason_of


def key_of(*parts: object) -> str:
    """Return the key of a result: a digest of the values that it depends on."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kept_results(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the key and the result of each complete line of a file, if there is one.

    Raises:
        MistakeError: the file cannot be read.
    """
    for line in read_file(path).splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            yield entry["key"], entry["made"]
        except (KeyError, TypeError, ValueError):  # a process ended here, or other code wrote it
            continue


def keep(path: Path, key: str, made: object) -> None:
    """Add a result to the end of a file, on a new line if the last one has no end.

    Raises:
        UnwrittenError: it cannot be written.
    """
    content = json.dumps({"key": key, "made": made}) + "\n"
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                content = content if file.read(1) == b"\n" else f"\n{content}"
            file.write(content.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise unwritten(path, reason_of(error)) from None
