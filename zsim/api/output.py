"""Files beside an answer: what is asked for is looked at before anything runs."""

from collections.abc import Callable, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path

from zsim.api.figure_file import need_figure
from zsim.files.html_page import need_html
from zsim.files.picture import need_format
from zsim.files.trace_file import need_chakra, need_trace
from zsim.files.written import need_folder
from zsim.mistake import MistakeError


class FileKind(Enum):
    """Kind of file that a result is written as."""

    ANY = "a file"
    PAGE = "a page"
    PICTURE = "a picture"
    TRACE = "a trace, or a folder of them"
    CHAKRA = "a folder of Chakra traces"


def need_output(option: str, path: str | PathLike[str] | None, kind: FileKind) -> None:
    """Check that `path`, given with `option`, can be written as `kind`, if it is given.

    Raises:
        MistakeError: it has no folder or another ending, or what makes it is not installed.
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
    """Check that `--picture` can be written to `path`, and `--figure` is one that is `known`.

    Raises:
        MistakeError: it cannot, it is not, or there is a figure and no `path` for it.
    """
    need_output("--picture", path, FileKind.PICTURE)
    if figure is None:
        return
    need_figure("--figure", figure, known)
    if path is None:
        raise MistakeError("--figure: needs --picture, the file to draw it in")
