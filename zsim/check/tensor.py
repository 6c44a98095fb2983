"""Whether two views that an operation brings together are of one tensor, in the order it makes.

A layout says of which, or what was written there before (`zsim.check.where`); what neither says is
not judged.
"""

from typing import NamedTuple

from zsim.check.content import What
from zsim.check.form import Form, Forms, Shape, plain
from zsim.check.ledger import Ledger
from zsim.check.where import Where, put
from zsim.operation import View
from zsim.schedule import Buffer


class How(NamedTuple):
    """What becomes of a view: the same, gathered over axes, or scattered over them."""

    gathers: tuple[str, ...] = ()
    scatters: tuple[str, ...] = ()


SAME = How()

Carried = tuple[Where | None, str]
"""Where elements are once they have come to a view, and what is wrong with that."""

Key = tuple[str, int, int, str | None, str | None, int | None]


def _key(view: View) -> Key:
    """What tells views apart: tuples are compared faster."""
    return (view.buffer, view.start, view.size, view.axis, view.layout, view.origin)


class Tensors:
    """Compares views of one program, and notes what is wrong in its ledger."""

    def __init__(self, forms: Forms, ledger: Ledger) -> None:
        self.forms = forms
        self.ledger = ledger
        self._agree: set[tuple[object, ...]] = set()
        self._seen: dict[tuple[int, int, tuple[str, ...]], tuple[View, View]] = {}
        self._together: set[tuple[object, ...]] = set()
        self._windowed: set[tuple[Key, int]] = set()
        self._carried: dict[tuple[Key, Key, Where | None, How], Carried] = {}
        self._known: dict[tuple[int, int, Where | None, How], tuple[View, View, Carried]] = {}

    def carried(self, operation: str, ways: tuple[View, View], code: int, how: How = SAME) -> int:
        """What the second of two views is of once the first, of content `code`, has come there."""
        source, target = ways
        if code >= 0 or not target.size:
            return code
        contents, by_name = self.ledger.contents, self.forms.program.by_name
        where = contents.where(code)
        out_of = source.layout or by_name[source.buffer].layout
        into = target.layout or by_name[target.buffer].layout
        if where is not None and source.layout is not None and source.origin is not None:
            fits = (_key(source), contents.place(code))
            if fits not in self._windowed:
                self._is_window(operation, source, where, fits)
        if out_of is not None and into is not None:
            return contents.put(code, None)
        if where is None and out_of is None:
            return code
        if contents.what(code) is What.CONSTANT:
            return code
        by_identity = (id(source), id(target), where, how)
        known = self._known.get(by_identity)
        if known is None:
            key = (_key(source), _key(target), where, how)
            if key not in self._carried:
                self._carried[key] = self._carry(source, target, where, how)
            # This keeps the views, and so their identity.
            known = self._known[by_identity] = (source, target, self._carried[key])
        after, other = known[2]
        if other:
            why = f"{source.buffer} and {target.buffer} hold different tensors"
            self.ledger.note(operation, why, (other, *self.ledger.history(source)))
        return contents.put(code, after)

    def _is_window(self, operation: str, view: View, where: Where, fits: tuple[Key, int]) -> None:
        """A finding if a buffer without a layout has something else where a window is."""
        assert view.layout is not None
        assert view.origin is not None
        held = where.of(self.ledger.view(view.buffer, view.origin, view.size), ())
        window = plain(view.start, view.size)
        if held and not self.forms.same((where.tensor, held), (view.layout, window)):
            why = f"{view.buffer} has something else where the window on {view.layout} is"
            lines = (f"{view.layout}: {window}", f"{view.buffer} has {held} of {where.tensor}")
            self.ledger.note(operation, why, (*lines, *self.ledger.history(view)))
        else:
            self._windowed.add(fits)

    def standing(self, view: View, code: int, other: int) -> int:
        """`code`, which is in `view`, as of the tensor of `other`, if it is the same elements."""
        contents = self.ledger.contents
        mine, its = contents.where(code), contents.where(other)
        if mine is None or its is None or mine == its:
            return code
        one, two = self.form_of(view, mine), self.form_of(view, its)
        return contents.put(code, its) if one and two and self.forms.same(one, two) else code

    def form_of(self, view: View, where: Where | None) -> tuple[str, Form] | None:
        """The tensor of which `view` holds a part, and the part."""
        name = view.layout or self.forms.program.by_name[view.buffer].layout
        if name is not None:
            form = self.forms.of(view)
            return None if form is None else (name, form)
        if where is None:
            return None
        form = where.of(view, self._axes(view))
        return None if form is None else (where.tensor, form)

    def _axes(self, view: View) -> tuple[str, ...]:
        return () if view.axis is None else self.forms.parts(view.axis)

    def _carry(self, source: View, target: View, where: Where | None, how: How) -> Carried:
        """Where the elements are in the target, and what is wrong with that."""
        found = self.form_of(source, where)
        if found is None:
            return None, ""
        tensor, form = found
        after: Form | None = form
        if how.gathers:
            after = self.forms.gathered(form, how.gathers)
        elif how.scatters:
            after = self.forms.scattered(form, how.scatters, target.size)
        into = target.layout or self.forms.program.by_name[target.buffer].layout
        if into is None:
            if after is None and how.gathers and _is_alike(form, how.gathers):
                tensor, after = f"copies of {tensor}", plain(0, target.size)
            return put(tensor, after, target, self._axes(target)), ""
        due = self.forms.of(target)
        if after is None or due is None or self.forms.same((tensor, after), (into, due)):
            return None, ""
        return None, f"{source.buffer} has {after} of {tensor}, {target.buffer} {due} of {into}"

    def together(self, operation: str, one: View, code: int, other: View) -> None:
        """A finding if `one`, of content `code`, is not the part of a tensor that `other` is."""
        self.same(operation, one, other)
        where = self.ledger.contents.where(code)
        if where is None or not one.size:
            return
        into = self.forms.program.by_name[other.buffer]
        held = (_key(one), where, into.layout, into.shard, _key(other)[1:])
        if held in self._together:
            return
        mine, yours = self.form_of(one, where), self.form_of(other, None)
        if mine and yours and not self.forms.same(mine, yours):
            why = f"{one.buffer} and {other.buffer} hold different tensors"
            lines = (
                f"{one.buffer} has {mine[1]} of {mine[0]}",
                f"{other.buffer} has {yours[1]} of {yours[0]}",
            )
            self.ledger.note(operation, why, (*lines, *self.ledger.history(one)))
        else:
            self._together.add(held)  # both moments and the master of a parameter are alike

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
        if self._need_no_look(one, other, gathers):
            return
        seen = (id(one), id(other), gathers)
        if seen in self._seen:
            return
        if not one.size and not other.size:
            return  # nothing is nothing, of whatever tensor
        key = (*_key(one), *_key(other), gathers)
        if key not in self._agree:
            self._agree.add(key)
            self._compare(operation, one, other, gathers=gathers, key=key)
        if key in self._agree:
            self._seen[seen] = (one, other)  # which keeps them, and so their identity

    def _need_no_look(self, one: View, other: View, gathers: tuple[str, ...]) -> bool:
        """Whether no layout says of what a view is, or both have all of what one layout says."""
        if one.origin is not None or other.origin is not None:
            return False
        by_name = self.forms.program.by_name
        buffer, into = by_name[one.buffer], by_name[other.buffer]
        layout = one.layout or buffer.layout
        if layout is None or (other.layout or into.layout) is None:
            return True
        if layout != into.layout or not (_all(one, buffer) and _all(other, into)):
            return False
        cut = () if buffer.shard is None else self.forms.parts(buffer.shard)
        return cut == (gathers or cut) and into.shard == (None if gathers else buffer.shard)

    def _compare(
        self,
        operation: str,
        one: View,
        other: View,
        *,
        gathers: tuple[str, ...],
        key: tuple[object, ...],
    ) -> None:
        """Note what is wrong; what is wrong once is wrong again."""
        if one.origin is not None or other.origin is not None:
            self._windows(operation, one, other)
        forms, by_name = self.forms, self.forms.program.by_name
        buffer, into = by_name[one.buffer], by_name[other.buffer]
        first, second = one.layout or buffer.layout, other.layout or into.layout
        if first is None or second is None:
            return
        mine, yours = forms.of(one), forms.of(other)
        if mine is not None and gathers:
            mine = forms.gathered(mine, gathers)
        if mine is None or yours is None:
            same = first == second or forms.layouts[first].pieces == forms.layouts[second].pieces
        else:
            same = forms.same((first, mine), (second, yours))
        if not same:
            self._agree.discard(key)
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


def _is_alike(form: Form, axes: tuple[str, ...]) -> bool:
    """Whether ranks along `axes` have the same elements, of which a gather makes no tensor."""
    return form.shape in (Shape.PLAIN, Shape.CUT) and not set(form.axes) & set(axes)


def _all(view: View, buffer: Buffer) -> bool:
    return view.size == buffer.elements and view.layout is None
