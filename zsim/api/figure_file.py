"""Figures of a result as files: which there are, and how one is drawn and written."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from zsim.api.notebook import Picture
from zsim.files.picture import need_format, write_picture
from zsim.files.written import unwritten
from zsim.mistake import MistakeError
from zsim.report.svg.figure import NoFigureError


def need_figure(option: str, figure: str, known: Sequence[str]) -> None:
    """Check that `figure`, given with `option`, is one of those that are `known`.

    Raises:
        MistakeError: it is not.
    """
    if figure not in known:
        raise MistakeError(f"{option}: {figure!r} must be one of {', '.join(known)}")


def drawn_figure(option: str, path: str | PathLike[str] | None, draw: Callable[[], str]) -> Picture:
    """Return what `draw` returns, and write it to `path`, given with `option`, if it is given.

    Raises:
        MistakeError: PNG and PDF cannot be made here, or there is no figure and no `path`.
        UnwrittenError: it cannot be written, or there is no figure.
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
