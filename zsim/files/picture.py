"""Pictures that a command writes: SVG, or PNG where cairosvg is installed."""

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


def need_format(option: str, path: Path) -> None:
    """Return if a picture can be made at `path`, given with `option`.

    Raises:
        MistakeError: it does not end as one, has no folder, or PNG cannot be made here.
    """
    if path.suffix not in {".svg", ".png"}:
        raise MistakeError(f"{option}: {path}: must end in .svg or .png")
    need_folder(option, path)
    if path.suffix == ".png":
        _cairo(option, path)


def write_picture(option: str, path: Path, svg: str) -> None:
    """Put the picture in the file at `path`, given with `option`, in the format it ends with.

    Raises:
        UnwrittenError: it cannot be written.
        MistakeError: PNG cannot be made here.
    """
    if path.suffix == ".svg":
        write(path, svg)
    else:
        write(path, _cairo(option, path).svg2png(bytestring=svg.encode(), scale=2.0))


def _cairo(option: str, path: Path) -> _Cairo:
    try:
        return cast("_Cairo", import_module("cairosvg"))
    except (ImportError, OSError) as error:  # the library, or cairo itself below it
        raise MistakeError(
            f"{option}: {path}: PNG needs cairosvg (pip install 'zsim[draw]') and the cairo "
            f"library, SVG needs nothing: {error}"
        ) from None
