"""Output files in addition to an answer; paths are checked before anything runs."""

from collections.abc import Callable, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path

from zsim.api.figure_file import need_figure
from zsim.files.html_page import need_html
from zsim.files.output_file import need_folder
from zsim.files.picture import need_format
from zsim.files.trace_file import need_chakra, need_trace
from zsim.mistake import MistakeError


class FileKind(Enum):
    """Kind of output file."""

    ANY = "a file"
    PAGE = "a page"
    PICTURE = "a picture"
    TRACE = "a trace, or a folder of them"
    CHAKRA = "a folder of Chakra traces"


def need_output(option: str, path: str | PathLike[str] | None, kind: FileKind) -> None:
    """Raise MistakeError unless `path`, the value of `option`, is None or can be written as `kind`.

    Raises:
        MistakeError: the folder does not exist, the suffix is wrong, or an extra is missing.
    """
    if path is None:
        return
    if kind in (FileKind.TRACE, FileKind.CHAKRA):
        (need_trace if kind is FileKind.TRACE else need_chakra)(option, str(path))
        return
    needs: dict[FileKind, Callable[[str, Path], None]] = {
        FileKind.ANY: need_folder,
        FileKind.PAGE: need_html,
        FileKind.PICTURE: need_format,
    }
    needs[kind](option, Path(path))


def need_picture(
    path: str | PathLike[str] | None, figure: str | None, known: Sequence[str]
) -> None:
    """Raise MistakeError unless `--picture` can be written and `--figure` is in `known`.

    Raises:
        MistakeError: `path` cannot be written, `figure` is unknown, or it has no `path`.
    """
    need_output("--picture", path, FileKind.PICTURE)
    if figure is None:
        return
    need_figure("--figure", figure, known)
    if path is None:
        raise MistakeError("--figure: needs --picture, the file to draw it in")
