"""Canvas for boxes, lines and text, written as SVG."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
INK, FAINT, ALARM = "#1f2933", "#7b8794", "#c81e1e"
GRID = "#dde2e7"
"""A dark page replaces the colours ink, faint, grid and the white background."""
LETTER = 0.62
"""Average width of a DejaVu Sans letter as a share of the font size, estimated by eye."""


def data(name: str, value: str) -> str:
    """Return a `data-` attribute for a script, with its value quoted."""
    return f"data-{name}={quoteattr(value)}"


def _end(name: str, title: str) -> str:
    """Return the end of an element that contains a title or is empty."""
    return f"><title>{escape(title)}</title></{name}>" if title else "/>"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its left and upper edge, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The horizontal centre."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height


@dataclass(slots=True)
class Canvas:
    """SVG drawing; later elements cover earlier ones.

    Attributes:
        width: in pixels.
        height: in pixels.
        attributes: extra attributes of the `svg` element, as text.
        on_page: True if a page shows the drawing. The page may be dark, so text on a coloured
            background gets a class that keeps its colour.
    """

    width: float
    height: float
    attributes: str = ""
    on_page: bool = False
    _drawn: list[str] = field(default_factory=list[str])

    def box(
        self, box: Box, label: str, fill: str, *, small: str = "", stacked: bool = False
    ) -> None:
        """Draw a box with its name and a smaller line below; `stacked` draws it as a pile."""
        for offset in (6, 3) if stacked else ():
            self._rectangle(Box(box.x + offset, box.y - offset, box.width, box.height), fill)
        self._rectangle(box, fill)
        middle = box.y + box.height / 2
        size = min(13.0, 1.55 * box.width / max(len(label), 1))
        if small:
            fits = min(10.5, 1.7 * box.width / len(small))
            self.inside(box.middle, middle - 2, label, size=size)
            self.inside(box.middle, middle + 12, small, size=fits, colour="#3e4c59")
        elif label:
            self.inside(box.middle, middle + size / 3, label, size=size)

    def _rectangle(self, box: Box, fill: str) -> None:
        self._drawn.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="4" fill="{fill}" stroke="{INK}" stroke-width="0.8"/>'
        )

    def bar(self, box: Box, fill: str, *, title: str = "", opacity: float = 1) -> None:
        """Draw a rectangle without a border; a wide one leaves a gap to the next.

        `title` is its tooltip.
        """
        edge = min(0.4, box.width / 4)
        look = f' fill-opacity="{opacity}"' if opacity < 1 else ""
        self._drawn.append(
            f'<rect x="{box.x + edge / 2:.2f}" y="{box.y:.1f}" width="{box.width - edge:.2f}" '
            f'height="{box.height:.1f}" fill="{fill}"{look}{_end("rect", title)}'
        )

    def span(self, y: float, height: float, attributes: str) -> None:
        """Draw a bar whose position and width a script computes from its `attributes`."""
        self._drawn.append(f'<rect y="{y:.0f}" height="{height:.0f}" {attributes}/>')

    @contextmanager
    def group(self, attributes: str) -> Generator[None]:
        """Put the elements drawn inside the `with` block into a group with `attributes`."""
        self._drawn.append(f"<g {attributes}>")
        yield
        self._drawn.append("</g>")

    def path(
        self, points: str, *, fill: str = "none", stroke: str = "none", dashed: bool = False
    ) -> None:
        """Draw a path through `points`, given in SVG path syntax."""
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        look = "" if stroke == "none" else f' stroke="{stroke}" stroke-width="2"{dash}'
        self._drawn.append(f'<path d="{points}" fill="{fill}"{look}/>')

    def place(self, box: Box, title: str) -> None:
        """Add an invisible `box` with the tooltip `title`."""
        self._drawn.append(
            f'<rect class="place" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" fill="#000" fill-opacity="0"{_end("rect", title)}'
        )

    def line(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        colour: str = FAINT,
        width: float = 1.2,
        dashed: bool = False,
    ) -> None:
        """Draw a straight line."""
        dash = ' stroke-dasharray="9 5"' if dashed else ""
        self._drawn.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
            f'stroke="{colour}" stroke-width="{width}"{dash}/>'
        )

    def arc(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        rise: float,
        *,
        colour: str = FAINT,
        width: float = 1.2,
        title: str = "",
    ) -> None:
        """Draw an arc that rises `rise` pixels over its ends; 0 draws a straight line.

        `title` is the tooltip. A quadratic curve rises half as high as its control point.
        """
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 2 * rise
        self._drawn.append(
            f'<path d="M {start[0]:.1f} {start[1]:.1f} Q {middle[0]:.1f} {middle[1]:.1f} '
            f'{end[0]:.1f} {end[1]:.1f}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:.1f}"><title>{escape(title)}</title></path>'
        )

    def dot(
        self, x: float, y: float, *, colour: str, hollow: bool = False, title: str = ""
    ) -> None:
        """Draw a small circle at x, y; `hollow` leaves it unfilled. `title` is its tooltip."""
        fill = "none" if hollow else colour
        self._drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{fill}" fill-opacity="0.75" '
            f'stroke="{colour}" stroke-width="1"{_end("circle", title)}'
        )

    def inside(self, x: float, y: float, text: str, *, size: float, colour: str = INK) -> None:
        """Write a line of text centred at x, y, on a colour that a dark page keeps."""
        mark = ' class="on"' if self.on_page else ""
        self._drawn.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" text-anchor="middle" '
            f'fill="{colour}"{mark}>{escape(text)}</text>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        """Write a line of text at x, y; `anchor` puts its start, middle or end there."""
        weight = ' font-weight="bold"' if bold else ""
        self._drawn.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" text-anchor="{anchor}" '
            f'fill="{colour}"{weight}>{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the drawing as an SVG document."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        view = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="{FONT}"'
        opening += f"{self.attributes}>"
        background = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join([opening, background, *self._drawn, "</svg>", ""])
