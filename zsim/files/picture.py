"""Pictures that a command writes: SVG, or PNG and PDF if cairosvg is installed."""

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from zsim.files.output_file import need_folder, write
from zsim.mistake import MistakeError


class _Cairo(Protocol):
    """The part of cairosvg that is used."""

    def svg2png(self, *, bytestring: bytes, scale: float) -> bytes:
        """Return the picture as PNG."""
        ...

    def svg2pdf(self, *, bytestring: bytes) -> bytes:
        """Return the picture as PDF."""
        ...


FORMATS = (".svg", ".png", ".pdf")
PIXELS = 2.0
"""Pixels of PNG per unit of SVG: sharp when zoomed or printed."""


def need_format(option: str, path: Path) -> None:
    """Raise MistakeError unless a picture can be written to `path`, given with `option`.

    Raises:
        MistakeError: its suffix is wrong, its folder is missing, or cairosvg is not installed.
    """
    if path.suffix not in FORMATS:
        raise MistakeError(f"{option}: {path}: must end in .svg, .png or .pdf")
    need_folder(option, path)
    if path.suffix != ".svg":
        _cairo(option, path)


def write_picture(option: str, path: Path, svg: str) -> None:
    """Write the picture to the file at `path`, given with `option`, in the format of its suffix.

    Raises:
        UnwrittenError: it cannot be written.
        MistakeError: PNG and PDF cannot be made, since cairosvg is not installed.
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
    except (ImportError, OSError) as error:  # the package, or the cairo library it uses
        name = path.suffix[1:].upper()
        raise MistakeError(
            f"{option}: {path}: {name} needs cairosvg (pip install 'zsim[draw]') and the cairo "
            f"library, SVG needs nothing: {error}"
        ) from None
