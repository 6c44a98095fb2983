"""Files that a command writes."""

from pathlib import Path

from zsim.shell.mistake import file_fault


def write(path: Path, text: str) -> None:
    """Put `text` in the file at `path`.

    Raises:
        MistakeError: it cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise file_fault(str(path), error) from None
