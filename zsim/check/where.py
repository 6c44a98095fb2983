"""Which elements of a tensor a buffer has that no layout describes.

Element i of the buffer on rank r along the axes is element i + shift + r x stride of the tensor.
Where that cannot say it, the elements from `start` on have one form that is more than that.
"""

from typing import NamedTuple

from zsim.check.form import Form, Run, Shape, plain
from zsim.operation import View


class Where(NamedTuple):
    """The tensor, a layout's or an activation's, and the place in it."""

    tensor: str
    shift: int = 0
    axes: tuple[str, ...] = ()
    stride: int = 0
    form: Form | None = None
    start: int = 0

    def __str__(self) -> str:
        if self.form is not None:
            return f"{self.form} of {self.tensor}"
        along = f", the own part over {' x '.join(self.axes)}" if self.axes else ""
        return f"{self.tensor}, moved by {self.shift}{along}"

    def of(self, view: View, axes: tuple[str, ...]) -> Form | None:
        """The form of `view`, which depends on the rank along `axes`; nothing if it cannot be said.

        A view of a layout's window is for the layout to say.
        """
        if self.form is not None:
            return self.form if self.start == view.start and not axes else None
        if axes and self.axes and axes != self.axes:
            return None
        stride = self.stride + (view.size if axes else 0)
        if not stride:
            return plain(view.start + self.shift, view.size)
        run = Run(view.start + self.shift, stride, view.size)
        return Form(Shape.CUT, axes or self.axes, (run,))


def put(tensor: str, form: Form | None, view: View, axes: tuple[str, ...]) -> Where | None:
    """What a buffer has once `form` of a tensor is written through `view`, its own along `axes`."""
    if form is None or view.layout is not None:
        return None
    if form.shape not in (Shape.PLAIN, Shape.CUT) or len(form.runs) != 1:
        return None if axes else Where(tensor, form=form, start=view.start)
    if axes and form.axes and axes != form.axes:
        return None
    run = form.runs[0]
    stride = run.stride - (view.size if axes else 0)
    return Where(tensor, run.start - view.start, (axes or form.axes) if stride else (), stride)
