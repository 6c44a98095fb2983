"""Files that a command writes."""

from pathlib import Path

from zsim.shell.mistake import MistakeError, file_fault


def need_folder(option: str, path: Path) -> None:
    """Return if there is a folder for the file at `path`, given with `option`.

    Raises:
        MistakeError: there is none: told before anything runs.
    """
    if not path.parent.is_dir():
        raise MistakeError(f"{option}: {path}: {path.parent} is no folder")


def write(path: Path, text: str) -> None:
    """Put `text` in the file at `path`.

    Raises:
        MistakeError: it cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise file_fault(str(path), error) from None
