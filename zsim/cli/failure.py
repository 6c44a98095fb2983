"""Report failures of a run: one line, and a file with the details."""

import tempfile
import traceback

from zsim.api.launch import RunFailedError
from zsim.api.limited import TimeLimitError
from zsim.mistake import reason_of


def report(error: Exception) -> str:
    """Return one line about `error` that names a file with the details."""
    if isinstance(error, TimeLimitError):  # its traceback does not help
        return str(error)
    failed = isinstance(error, RunFailedError)
    line = str(error) if failed else f"internal error: {type(error).__name__}: {error}"
    if failed and "details: " in line:
        return line
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="zsim-", suffix=".log", delete=False
        ) as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as why:  # the run may have failed on a full disk
        return f"{line} (details could not be written: {reason_of(why)})"
    return f"{line} (details: {file.name})"
