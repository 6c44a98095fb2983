"""Expressions in files of published tables: arithmetic and comparisons on named values.

Only packaged files have expressions. They have no attributes, no loops, and no functions except
those that the reader provides.
"""

import ast
from collections.abc import Mapping
from functools import cache
from types import CodeType

ALLOWED = (
    ast.BinOp,
    ast.BoolOp,
    ast.Call,
    ast.Compare,
    ast.Constant,
    ast.Expression,
    ast.IfExp,
    ast.Name,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
)
"""Parts of Python's grammar that are allowed in an expression."""


class ExpressionError(ValueError):
    """Invalid expression; the message has its text."""


def evaluated(text: str, names: Mapping[str, object]) -> object:
    """Return the value of the expression `text`, whose names are looked up in `names`.

    Raises:
        ExpressionError: it has parts that are not allowed, or an unknown name.
    """
    try:
        found: object = eval(_compiled(text), {"__builtins__": {}}, names)
    except NameError as error:
        raise ExpressionError(f"{text}: {error}") from None
    return found


@cache
def _compiled(text: str) -> CodeType:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ExpressionError(f"{text}: {error.msg}") from None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ExpressionError(f"{text}: {type(node).__name__} is not allowed")
    return compile(tree, "<expression>", "eval")
