"""What a value is of: a constant, a gradient or a parameter, and what it was multiplied by.

A content is known by a negative number, so that it can stand in a placement behind the axes.
"""

from collections import Counter
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from zsim.check.value import ANY, MIXED, Only

DIVISOR_MAX = 10**6
"""Up to so many micro-batches a constant of 1 / n is known for what it is."""


class What(StrEnum):
    """What a value is of. The sum of what ranks and micro-batches make is one gradient."""

    CONSTANT = "a constant"
    GRADIENT = "a gradient"
    PARAMETER = "a parameter"
    NORM = "the norm of a gradient"


class Content(NamedTuple):
    """What a value is of, a number that it was multiplied by, and host scalars, with exponents."""

    what: What
    factor: Fraction = Fraction(1)
    scalars: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        word = str(self.what)
        if self.factor != 1:
            inverse = 1 / self.factor
            divided = inverse.denominator == 1
            word += f" divided by {inverse}" if divided else f" multiplied by {self.factor}"
        for scalar, exponent in self.scalars:
            word += f" {'multiplied' if exponent > 0 else 'divided'} by {scalar}"
        return word


class Contents:
    """The contents that values have, numbered."""

    def __init__(self) -> None:
        self._known: list[Content] = []
        self._codes: dict[Content, int] = {}
        self._made: dict[tuple[object, ...], int] = {}

    def code(self, content: Content) -> int:
        """The number of a content."""
        if content not in self._codes:
            self._known.append(content)
            self._codes[content] = -len(self._known)
        return self._codes[content]

    def constant(self, value: float, scalar: str | None) -> int:
        """The number of a constant, times a host scalar; zero is anything."""
        key = (What.CONSTANT, value, scalar)
        if key not in self._made:
            factor = Fraction(value).limit_denominator(DIVISOR_MAX)
            scalars = () if scalar is None else ((scalar, 1),)
            code = self.code(Content(What.CONSTANT, factor, scalars)) if value else ANY
            self._made[key] = code
        return self._made[key]

    def divided(self, code: int, divisor: int) -> int:
        """The number of the same content, divided."""
        if divisor == 1 or code >= 0:
            return code
        key = ("divided", code, divisor)
        if key not in self._made:
            content = self._known[-1 - code]
            self._made[key] = self.code(content._replace(factor=content.factor / divisor))
        return self._made[key]

    def unscaled(self, code: int, scalars: tuple[str, ...]) -> int:
        """The number of the same content, divided by host scalars."""
        if not scalars or code >= 0:
            return code
        content = self._known[-1 - code]
        exponents = Counter(dict(content.scalars))
        exponents.subtract(scalars)
        left = tuple((name, count) for name, count in sorted(exponents.items()) if count)
        return self.code(content._replace(scalars=left))

    def gradient(self, code: int) -> int:
        """The number of gradients that backward makes of an output's gradient.

        They are multiplied by what it is multiplied by: of one that nothing is known of, by 1.
        """
        return code if code == MIXED else self.of(What.GRADIENT, code)

    def of(self, what: What, code: int) -> int:
        """The number of something that is multiplied as `code` is."""
        key = (what, code)
        if key not in self._made:
            content = Content(what) if code >= 0 else self._known[-1 - code]._replace(what=what)
            self._made[key] = self.code(content)
        return self._made[key]

    def is_parameter(self, code: int) -> bool:
        """Whether a content is that of a parameter."""
        return code < 0 and self._known[-1 - code].what is What.PARAMETER

    def only(self, what: What, factor: Fraction) -> Only:
        """Whether a content is that, or anything; parameters may be constants too."""
        due = self.code(Content(what, factor))

        def allowed(code: int) -> bool:
            constant = code < 0 and self._known[-1 - code].what is What.CONSTANT
            return code in (ANY, due) or (constant and what is What.PARAMETER)

        return Only(allowed, self.word(due))

    def word(self, code: int) -> str:
        """A content in words."""
        if code >= 0:
            return "a constant" if code == ANY else "a mixture"
        return str(self._known[-1 - code])
