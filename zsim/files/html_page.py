"""Pages as HTML: one self-contained file that needs no network."""

import gzip
import json
from base64 import b64encode
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.files.output_file import need_folder
from zsim.mistake import MistakeError
from zsim.report.drawing import NARROW, WIDE, drawn
from zsim.report.page import Page
from zsim.report.svg.figure import Figure, LaneBars

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = "page.html.jinja"


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """A drawing of a figure: the kind of page it is for, and SVG or compressed SVG.

    Browsers from 2023 on decompress gzip in a script: a timeline has thousands of bars, and is ten
    times smaller compressed.
    """

    kind: str
    svg: str = ""
    packed: str = ""


def need_html(option: str, path: Path) -> None:
    """Raise MistakeError unless a page can be written to `path`, given with `option`.

    Raises:
        MistakeError: its suffix is wrong, its folder is missing, or jinja2 is not installed.
    """
    if path.suffix not in {".html", ".htm"}:
        raise MistakeError(f"{option}: {path}: must end in .html")
    need_folder(option, path)
    try:
        html_template(TEMPLATE)
    except ImportError as error:
        raise MistakeError(f"{option}: needs {error.name} (pip install 'zsim[report]')") from None


def render(page: Page, *, made: date | None = None) -> str:
    """Return `page`, `made` on a day, as HTML; call `need_html` before."""
    pairs = {
        at: {"figures": each.pairs.figures, "runs": each.pairs.runs, "errors": each.pairs.errors}
        for at, each in enumerate(page.sections)
        if each.pairs is not None
    }
    return html_template(TEMPLATE).render(
        page=page,
        drawings=[_drawings(each.figure) for each in page.sections],
        pairs=_in_script(pairs),
        footer=f"Made by zsim {version('zsim')}{f' on {made}' if made else ''}.",
    )


def _drawings(figure: Figure | None) -> list[PageDrawing]:
    """Return the drawings of a figure: wide and narrow, or one that a script lays out."""
    if figure is None:
        return []
    if isinstance(figure, LaneBars):
        data = gzip.compress(drawn(figure, WIDE).encode(), compresslevel=6, mtime=0)
        return [PageDrawing("zoom", packed=b64encode(data).decode())]
    return [
        PageDrawing("wide", drawn(figure, WIDE)),
        PageDrawing("narrow", drawn(figure, NARROW)),
    ]


def _in_script(value: object) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def html_template(name: str, package: str = "zsim.files") -> "Template":
    """Return the Jinja template `name` of `package`; it may include templates of `zsim.files`.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def text_of(name: str) -> str:
        own, shared = files(package) / name, files("zsim.files") / name
        return (own if own.is_file() else shared).read_text("utf-8")

    loader = FunctionLoader(text_of)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)
