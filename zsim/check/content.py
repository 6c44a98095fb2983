"""What a value is of: which tensor, of which step, from which micro-batches, multiplied by what.

A content is known by a negative number, so that it can stand in a placement behind the axes.

What has been summed to make it stands in it as `zsim.check.contribution` says.
"""

from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from zsim.check.contribution import Part, Parts, alone, batches_of, repeated, summed
from zsim.check.placed import ANY, MIXED, ZERO
from zsim.check.where import Where

DIVISOR_MAX = 10**6
"""Up to so many micro-batches a constant of 1 / n is known for what it is."""

NOW, NEXT, STALE = 0, 1, -1
"""Ages: of this step, updated in it, of a step before."""

Factor = tuple[int, int]
"""A fraction in lowest terms: what is hashed often is cheaper as two numbers."""


class What(StrEnum):
    """What a value is of. The sum of what ranks and micro-batches make is one gradient."""

    CONSTANT = "a constant"
    GRADIENT = "a gradient"
    PARAMETER = "a parameter"
    MOMENT = "a moment"
    NORM = "the norm of a gradient"
    VERDICT = "a finite test"
    TENSOR = "an activation"
    SLOPE = "the gradient of an activation"
    SAVED = "what a forward saved"
    WORKSPACE = "what a kernel left behind"


class Content(NamedTuple):
    """What a value is of; `factor` and host scalars, with exponents, are what it was multiplied by.

    `name` is that of an activation or of the segment that saved it; of a norm and a verdict it is
    the names of what they cover, joined by "+". `where` says which elements they are, where no
    layout does.
    """

    what: What
    factor: Factor = (1, 1)
    scalars: tuple[tuple[str, int], ...] = ()
    name: str = ""
    parts: Parts = ()
    age: int = NOW
    clipped: int = 0
    where: Where | None = None

    def __str__(self) -> str:
        above, below = self.factor
        if not above:
            return "zeros"
        word = str(self.what)
        if self.what in (What.TENSOR, What.SLOPE, What.SAVED) and self.name:
            word = f"{word}, {self.name}" if self.what is What.SAVED else f"{word} {self.name}"
        if above == 1 != below:
            word += f" divided by {below}"
        elif self.factor != (1, 1):
            word += f" multiplied by {Fraction(above, below)}"
        for scalar, exponent in self.scalars:
            word += f" {'multiplied' if exponent > 0 else 'divided'} by {scalar}"
        return word

    @property
    def detail(self) -> str:
        """What tells it from others that are called the same."""
        if self.age == STALE:
            return "of a step before"
        words: list[str] = []
        if self.age == NEXT:
            words.append("updated already")
        batches = batches_of(self.parts)
        if batches and self.what is not What.NORM:
            many = "micro-batches" if len(batches) > 1 else "micro-batch"
            words.append(f"of {many} {', '.join(map(str, batches))}")
            words += [f"of use {use + 1} of {uses}" for (use, uses), _ in self.parts if uses > 1]
        if self.what is What.GRADIENT:
            words.append(("not clipped", "clipped", "clipped more than once")[min(2, self.clipped)])
        if self.where is not None:
            words.append(f"in place of {self.where}")
        return ", ".join(words)


NOTHING_KNOWN = Content(What.CONSTANT)
"""What is multiplied by nothing."""


def _alike(one: Content, other: Content) -> bool:
    """Whether two norms were multiplied by the same; that of no elements was by anything."""
    return one[1:3] == other[1:3] or not one.factor[0] or not other.factor[0]


class Contents:
    """The contents that values have, numbered; what was made of one once is remembered.

    A content is numbered as one of no elements in particular, and the elements by themselves, since
    those of one layer differ from those of the next in nothing else. `place` is such a number: of
    elements where the content says which, else 0.
    """

    def __init__(self) -> None:
        self._known: list[Content | None] = []
        self._whats: list[What] = []
        self._bare: list[int] = []
        self._place: list[int] = []
        self._bares: dict[Content, int] = {}
        self._placed: dict[tuple[int, int], int] = {}
        self._wheres: list[Where | None] = [None]
        self._places: dict[Where | None, int] = {None: 0}
        self._made: dict[tuple[object, ...], int] = {}
        zero = self.code(Content(What.CONSTANT, (0, 1)))
        assert zero == ZERO

    def __getitem__(self, code: int) -> Content:
        content = self._known[-1 - code]
        if content is None:
            where = self._wheres[self._place[-1 - code]]
            content = self._known[-1 - code] = self[self._bare[-1 - code]]._replace(where=where)
        return content

    def code(self, content: Content) -> int:
        """The number of a content."""
        where = content.where
        bare = content if where is None else content._replace(where=None)
        code = self._bares.get(bare)
        if code is None:
            code = self._bares[bare] = -1 - len(self._known)
            self._add(bare, bare.what, code, 0)
        return code if where is None else self._at(code, self.numbered(where))

    def _add(self, content: Content | None, what: What, bare: int, place: int) -> None:
        self._known.append(content)
        self._whats.append(what)
        self._bare.append(bare)
        self._place.append(place)

    def numbered(self, where: Where | None) -> int:
        """The number of elements of a tensor."""
        place = self._places.get(where)
        if place is None:
            place = self._places[where] = len(self._wheres)
            self._wheres.append(where)
        return place

    def _at(self, bare: int, place: int) -> int:
        """The number of a content of no elements in particular, of some."""
        if not place:
            return bare
        code = self._placed.get((bare, place))
        if code is None:
            code = self._placed[bare, place] = -1 - len(self._known)
            self._add(None, self._whats[-1 - bare], bare, place)
        return code

    def at(self, code: int, place: int) -> int:
        """The number of the same content, of other elements: those of a constant are all alike."""
        if code >= ZERO or self._place[-1 - code] == place:
            return code
        if self._whats[-1 - code] is What.CONSTANT:
            return code
        return self._at(self._bare[-1 - code], place)

    def put(self, code: int, where: Where | None) -> int:
        """The number of the same content, of elements that stand elsewhere."""
        return self.at(code, 0 if where is None else self.numbered(where))

    def what(self, code: int) -> What | None:
        """What a value is of, if that is known."""
        return self._whats[-1 - code] if code < 0 else None

    def where(self, code: int) -> Where | None:
        """Which elements a value has, where the content says so."""
        return self._wheres[self._place[-1 - code]] if code < 0 else None

    def place(self, code: int) -> int:
        """The number of the elements that a value has, where the content says so; else 0."""
        return self._place[-1 - code] if code < 0 else 0

    def bare(self, code: int) -> int:
        """The number of the same content, of no elements in particular."""
        return self._bare[-1 - code] if code < 0 else code

    def named(self, what: What, name: str, part: Part, place: int) -> int:
        """The number of an activation, of its gradient, or of what a forward saved."""
        key = (what, name, part)
        bare = self._made.get(key)
        if bare is None:
            bare = self._made[key] = self.code(Content(what, name=name, parts=alone(part)))
        return self._at(bare, place)

    def constant(self, value: float, scalar: str | None) -> int:
        """The number of a constant, times a host scalar."""
        key = (What.CONSTANT, value, scalar)
        if key not in self._made:
            factor = Fraction(value).limit_denominator(DIVISOR_MAX)
            scalars = () if scalar is None else ((scalar, 1),)
            ratio = (factor.numerator, factor.denominator)
            content = Content(What.CONSTANT, ratio, scalars if value else ())
            self._made[key] = self.code(content)
        return self._made[key]

    def divided(self, code: int, divisor: int) -> int:
        """The number of the same content, divided."""
        if divisor == 1 or code >= ZERO:
            return code
        bare = self._bare[-1 - code]
        key = ("divided", bare, divisor)
        found = self._made.get(key)
        if found is None:
            content = self[bare]
            factor = Fraction(*content.factor) / divisor
            ratio = (factor.numerator, factor.denominator)
            found = self._made[key] = self.code(content._replace(factor=ratio))
        return self._at(found, self._place[-1 - code])

    def unscaled(self, code: int, scalars: tuple[str, ...]) -> int:
        """The number of the same content, divided by host scalars."""
        if not scalars or code >= ZERO:
            return code
        bare = self._bare[-1 - code]
        key = ("unscaled", bare, scalars)
        found = self._made.get(key)
        if found is None:
            content = self[bare]
            exponents = dict(content.scalars)
            for name in scalars:
                exponents[name] = exponents.get(name, 0) - 1
            left = tuple((name, count) for name, count in sorted(exponents.items()) if count)
            found = self._made[key] = self.code(content._replace(scalars=left))
        return self._at(found, self._place[-1 - code])

    def gradient(self, slope: int, part: Part, place: int) -> int:
        """The number of a gradient that backward makes of an output's gradient.

        It is multiplied by what that is multiplied by: of one that nothing is known of, by 1.
        """
        return self._of_slope((What.GRADIENT, ""), slope, part, place)

    def slope(self, name: str, slope: int, part: Part, place: int) -> int:
        """The number of an activation's gradient that backward makes of an output's gradient."""
        return self._of_slope((What.SLOPE, name), slope, part, place)

    def _of_slope(self, named: tuple[What, str], slope: int, part: Part, place: int) -> int:
        if slope == MIXED:
            return MIXED
        key = (named, self._bare[-1 - slope] if slope < 0 else ANY, part)
        bare = self._made.get(key)
        if bare is None:
            of = self[slope] if slope < 0 else NOTHING_KNOWN
            content = Content(named[0], of.factor, of.scalars, named[1], alone(part))
            bare = self._made[key] = self.code(content)
        return self._at(bare, place)

    def aged(self, code: int, *, updated: bool) -> int:
        """The number of what a value is in the next step."""
        if code >= 0:
            return code
        key = ("aged", code, updated)
        if key not in self._made:
            content = self[code]
            if content.what in (What.PARAMETER, What.MOMENT):
                age = max(STALE, content.age - updated)
                self._made[key] = self.code(content._replace(age=age))
            elif content.what is What.CONSTANT:
                self._made[key] = code
            else:
                left = Content(content.what, name=content.name, age=STALE)
                self._made[key] = self.code(left)
        return self._made[key]

    def sum(self, one: int, other: int) -> int | None:
        """The number of a sum; nothing where the summands do not belong together."""
        if one == ANY or other == ZERO:
            return one if other == ZERO else other
        if other == ANY or one == ZERO:
            return one if other == ANY else other
        if one >= 0 or other >= 0:
            return None
        place = self._place[-1 - one]
        if place and place == self._place[-1 - other]:  # as of no elements in particular
            bare = self.sum(self._bare[-1 - one], self._bare[-1 - other])
            return None if bare is None else self._at(bare, place)
        key = ("sum", one, other)
        if key not in self._made:
            first, second = self[one], self[other]
            if first.what is What.CONSTANT and one == other:
                return one
            if first.what is second.what is What.NORM and _alike(first, second):
                name = f"{first.name}+{second.name}"
                whole = second if not first.factor[0] else first  # of no elements: nothing is added
                return self._made.setdefault(key, self.code(whole._replace(name=name)))
            alike = first._replace(parts=()) == second._replace(parts=())
            if first.what not in (What.GRADIENT, What.SLOPE) or not alike or first.age != NOW:
                return None
            if self.repeated(one, other) is not None:
                return None
            whole = first._replace(parts=summed(first.parts, second.parts))
            self._made[key] = self.code(whole)
        return self._made[key]

    def repeated(self, one: int, other: int) -> int | None:
        """The first micro-batch of which something is in both."""
        if one >= 0 or other >= 0:
            return None
        return repeated(self[one].parts, self[other].parts)

    def clipped(self, code: int) -> int:
        """The number of a gradient that is clipped once more."""
        if code >= ZERO:
            return code
        content = self[code]
        return self.code(content._replace(clipped=min(2, content.clipped + 1)))

    def pads(self, code: int) -> bool:
        """Whether a content may stand in padding: zeros, or what is zero there."""
        return code == ZERO or self.what(code) in (What.GRADIENT, What.PARAMETER, What.MOMENT)

    def is_constant(self, code: int) -> bool:
        """Whether a content is that of a constant."""
        return self.what(code) is What.CONSTANT

    def is_parameter(self, code: int) -> bool:
        """Whether a content is that of a parameter."""
        return self.what(code) is What.PARAMETER

    def word(self, code: int, due: int = ANY) -> str:
        """A content in words; as much of it as tells it from the one that is due."""
        if code >= 0:
            return "a constant" if code == ANY else "a mixture"
        content = self[code]
        if due < 0 and str(content) == str(self[due]):
            return f"{content} {content.detail}".strip()
        return f"{content} of a step before" if content.age == STALE else str(content)

    def against(self, code: int, due: int) -> tuple[str, str]:
        """A content and the one that is due, in words that tell them apart."""
        return self.word(code, due), self.word(due, code)
