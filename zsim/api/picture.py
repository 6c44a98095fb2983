"""Pictures as values: SVG text that a notebook shows."""


class Picture(str):
    """The SVG of a picture; in a notebook it shows itself."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)
