"""Pictures that a command writes: SVG, or PNG and PDF where cairosvg is installed."""

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from zsim.files.written import need_folder, write
from zsim.mistake import MistakeError


class _Cairo(Protocol):
    """cairosvg, as far as it is used."""

    def svg2png(self, *, bytestring: bytes, scale: float) -> bytes:
        """Return the picture as PNG."""
        ...

    def svg2pdf(self, *, bytestring: bytes) -> bytes:
        """Return the picture as PDF."""
        ...


FORMATS = (".svg", ".png", ".pdf")
PIXELS = 2.0
"""Of PNG, for each unit of SVG: sharp where a page is zoomed, or printed."""


def need_format(option: str, path: Path) -> None:
    """Return if a picture can be made at `path`, given with `option`.

    Raises:
        MistakeError: it does not end as one, has no folder, or PNG and PDF cannot be made here.
    """
    if path.suffix not in FORMATS:
        raise MistakeError(f"{option}: {path}: must end in .svg, .png or .pdf")
    need_folder(option, path)
    if path.suffix != ".svg":
        _cairo(option, path)


def write_picture(option: str, path: Path, svg: str) -> None:
    """Put the picture in the file at `path`, given with `option`, in the format it ends with.

    Raises:
        UnwrittenError: it cannot be written.
        MistakeError: PNG and PDF cannot be made here.
    """
    match path.suffix:
        case ".png":
            write(path, _cairo(option, path).svg2png(bytestring=svg.encode(), scale=PIXELS))
        case ".pdf":
            write(path, _cairo(option, path).svg2pdf(bytestring=svg.encode()))
        case _:
            write(path, svg)


def _cairo(option: str, path: Path) -> _Cairo:
    try:
        return cast("_Cairo", import_module("cairosvg"))
    except (ImportError, OSError) as error:  # the library, or cairo itself below it
        name = path.suffix[1:].upper()
        raise MistakeError(
            f"{option}: {path}: {name} needs cairosvg (pip install 'zsim[draw]') and the cairo "
            f"library, SVG needs nothing: {error}"
        ) from None
