"""Whether two views that an operation brings together are of one tensor, in the order it makes.

What no layout says is not judged.
"""

from zsim.check.form import Forms
from zsim.check.ledger import Ledger
from zsim.operation import View
from zsim.schedule import Buffer


class Tensors:
    """Compares views of one program, and notes what is wrong in its ledger."""

    def __init__(self, forms: Forms, ledger: Ledger) -> None:
        self.forms = forms
        self.ledger = ledger

    def alike(self, operation: str, view: View, axes: tuple[str, ...]) -> None:
        """A finding if ranks along `axes` have different parts of a tensor in `view`."""
        form = self.forms.of(view)
        if form and set(form.axes) & set(axes):
            why = f"ranks bring different parts of the tensor in {view.buffer}"
            self.ledger.note(operation, why, (f"{view.buffer}: {form}",))

    def same(
        self, operation: str, one: View, other: View, *, gathers: tuple[str, ...] = ()
    ) -> None:
        """A finding if `other` is not what `one` is, gathered over those axes if there are some."""
        if not one.size and not other.size:
            return  # nothing is nothing, of whatever tensor
        if one.origin is not None or other.origin is not None:
            self._windows(operation, one, other)
        forms, by_name = self.forms, self.forms.program.by_name
        buffer, into = by_name[one.buffer], by_name[other.buffer]
        first, second = one.layout or buffer.layout, other.layout or into.layout
        if first is None or second is None:
            return
        if first == second and _all(one, buffer) and _all(other, into):
            cut = () if buffer.shard is None else forms.parts(buffer.shard)
            if cut == (gathers or cut) and into.shard == (None if gathers else buffer.shard):
                return  # all of it, or the segments of all ranks, as the layout says
        mine, yours = forms.of(one), forms.of(other)
        if mine is not None and gathers:
            mine = forms.gathered(mine, gathers)
        if mine is None or yours is None:
            same = first == second or forms.layouts[first].pieces == forms.layouts[second].pieces
        else:
            same = forms.same((first, mine), (second, yours))
        if not same:
            self.ledger.note(
                operation,
                f"{one.buffer} and {other.buffer} hold different tensors",
                (
                    f"{one.buffer} has layout {first}: {mine or 'a part'}",
                    f"{other.buffer} has layout {second}: {yours or 'a part'}",
                ),
            )

    def _windows(self, operation: str, *views: View) -> None:
        for view in views:
            if not self.forms.window_fits(view):
                why = f"{view.buffer} has something else where the window on {view.layout} is"
                where = f"{view.layout}: elements {view.start} to {view.start + view.size}"
                self.ledger.note(operation, why, (where,))


def _all(view: View, buffer: Buffer) -> bool:
    return view.size == buffer.elements and view.layout is None
