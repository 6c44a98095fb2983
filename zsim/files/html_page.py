"""Pages as HTML: one file that holds all it needs and asks for nothing from a network."""

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import date
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from zsim.files.written import need_folder
from zsim.mistake import MistakeError
from zsim.report.page import Page, PageFigure
from zsim.report.setting_page import FormAnswer, SettingPage

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = "page.html.jinja"
FORM, ANSWER = "form_page.html.jinja", "form_answer.html.jinja"

LAYOUT: Mapping[str, object] = {
    "margin": {"l": 64, "r": 16, "t": 10, "b": 56},
    "showlegend": False,  # names of traces stand above the figure, where a page can break lines
    "font": {"family": 'system-ui, "DejaVu Sans", sans-serif', "size": 13, "color": "#1f2933"},
    "paper_bgcolor": "#ffffff",
    "plot_bgcolor": "#ffffff",
    "hoverlabel": {"align": "left"},
}
"""What all figures share; a figure's own layout is put on top."""


class _Offline(Protocol):
    """plotly.offline, as far as it is used."""

    def get_plotlyjs(self) -> str:
        """Return Plotly's own script, which comes with its package."""
        ...


def need_html(option: str, path: Path) -> None:
    """Return if a page can be made at `path`, given with `option`.

    Raises:
        MistakeError: it does not end as one, has no folder, or what makes pages is not installed.
    """
    if path.suffix not in {".html", ".htm"}:
        raise MistakeError(f"{option}: {path}: must end in .html")
    need_folder(option, path)
    try:
        _template(TEMPLATE)
        import_module("plotly.offline")
    except ImportError as error:
        raise MistakeError(f"{option}: needs {error.name} (pip install 'zsim[report]')") from None


def render(page: Page, *, made: date | None = None) -> str:
    """Return `page`, `made` on a day, as HTML; `need_html` said that it can be made."""
    figures = {
        f"figure{at}": {"traces": each.figure.traces, "layout": _layout(each.figure)}
        for at, each in enumerate(page.sections)
        if each.figure is not None
    }
    pairs = {
        at: {"figures": each.pairs.figures, "runs": each.pairs.runs}
        for at, each in enumerate(page.sections)
        if each.pairs is not None
    }
    return _template(TEMPLATE).render(
        page=page,
        figures=_packed(gzip.compress(json.dumps(figures, allow_nan=False).encode(), mtime=0)),
        pairs=_in_script(pairs),
        plotly=_packed(_script()) if figures else "",
        footer=f"Made by zsim {version('zsim')}{f' on {made}' if made else ''}.",
    )


def render_form(page: SettingPage) -> str:
    """Return the page on which a setting is chosen, with the answer to the first one."""
    answer = render_answer(page.answer)
    return _template(FORM).render(page=page, answer=answer, version=version("zsim"))


def render_answer(found: FormAnswer) -> str:
    """Return the part of that page that is replaced when another setting is chosen."""
    return _template(ANSWER).render(answer=found).strip()


def _layout(figure: PageFigure) -> dict[str, object]:
    return {**LAYOUT, "height": figure.height, **figure.layout}


def _in_script(value: object) -> str:
    """Return JSON that cannot end the script it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _template(name: str) -> "Template":
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def text_of(name: str) -> str:
        return files("zsim.files").joinpath(name).read_text("utf-8")

    loader = FunctionLoader(text_of)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)


def _packed(data: bytes) -> str:
    """Return what gzip made as text: browsers of 2023 and later unpack it by themselves."""
    return b64encode(data).decode()


def _script() -> bytes:
    """Return Plotly's own script, packed: 4.8 MB are 1.4 MB so.

    Its basic bundle, a third of that, does not come with its package.
    """
    offline = cast("_Offline", import_module("plotly.offline"))
    return gzip.compress(offline.get_plotlyjs().encode(), compresslevel=9, mtime=0)
