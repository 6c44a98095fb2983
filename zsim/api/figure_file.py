"""Figures of a result as files: check the name of a figure, draw it and write it."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from zsim.api.notebook import Picture
from zsim.files.output_file import unwritten
from zsim.files.picture import need_format, write_picture
from zsim.mistake import MistakeError
from zsim.report.svg.figure import NoFigureError


def need_figure(option: str, figure: str, known: Sequence[str]) -> None:
    """Raise MistakeError unless `figure`, the value of `option`, is in `known`.

    Raises:
        MistakeError: `figure` is not in `known`.
    """
    if figure not in known:
        raise MistakeError(f"{option}: {figure!r} must be one of {', '.join(known)}")


def drawn_figure(option: str, path: str | PathLike[str] | None, draw: Callable[[], str]) -> Picture:
    """Return the picture that `draw` makes; write it to `path`, the value of `option`, if given.

    Raises:
        MistakeError: PNG or PDF cannot be made here, or there is neither figure nor `path`.
        UnwrittenError: the file cannot be written, or there is no figure.
    """
    where = None if path is None else Path(path)
    if where is not None:
        need_format(option, where)
    try:
        drawn = draw()
    except NoFigureError as error:
        if where is None:
            raise MistakeError(f"{option}: {error}") from None
        raise unwritten(where, str(error)) from None
    if where is not None:
        write_picture(option, where, drawn)
    return Picture(drawn)
