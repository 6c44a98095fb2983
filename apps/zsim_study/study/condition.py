"""Conditions of a study, such as `zero.stage < 3 and cluster.nodes >= 8`.

The language has comparisons, arithmetic, `and`, `or`, `not` and `in`. Names refer to axes and to
fields of the scenario.
"""

import ast
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from zsim.scenario.tables import ScenarioError, need_field
from zsim_study.study.file import StudyError

Find = Callable[[str], Any]
"""Return the value of a field or axis by its name."""


def _of_numbers(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Restrict `operation` to numbers: with text, `*` and `%` could exceed the memory."""

    def applied(one: Any, other: Any) -> Any:  # noqa: ANN401  (numbers of any kind)
        if not isinstance(one, int | float) or not isinstance(other, int | float):
            raise TypeError
        return operation(one, other)

    return applied


ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _of_numbers(operator.add),
    ast.Sub: _of_numbers(operator.sub),
    ast.Mult: _of_numbers(operator.mul),
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
}

COMPARISON: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: its text and its syntax tree."""

    text: str
    tree: ast.expr

    def holds(self, find: Find) -> bool:
        """Return True if the condition holds for the values that `find` returns.

        Raises:
            StudyError: the values cannot be compared, or a division by 0 occurs.
        """
        try:
            return bool(_value(self.tree, find))
        except ArithmeticError as error:
            raise StudyError(f"{self.text!r}: {error}") from None
        except TypeError:
            nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]
            names = [_name(node) for node in nodes if not isinstance(node.value, ast.Constant)]
            absent = [name for name in names if find(name) is None]
            why = f"{absent[0]} is not given" if absent else "compares what cannot be compared"
            raise StudyError(f"{self.text!r}: {why}") from None


def condition(text: str, axes: Collection[str]) -> Condition:
    """Return the condition in `text`, for a study with these axes.

    Raises:
        StudyError: the text is not a condition, or a name is neither a field nor an axis.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise StudyError(
            f"{text!r} must be a condition such as 'zero.stage < 3 and cluster.nodes >= 8'"
        ) from None
    found = Condition(text, tree)
    _value(tree, lambda name: _known(name, axes, text), dry=True)
    return found


def _known(name: str, axes: Collection[str], text: str) -> None:
    if name in axes:
        return
    try:
        need_field(name)
    except ScenarioError as error:
        raise StudyError(f"{text!r}: {error}; axes: {', '.join(axes)}") from None


def _value(tree: ast.expr, find: Find, *, dry: bool = False) -> Any:  # noqa: ANN401  (any value)
    """Return the value of `tree`; with `dry`, only look up every name."""
    inner = _parts(tree)
    if inner is None:
        return find(_name(tree)) if not isinstance(tree, ast.Constant) else tree.value
    if dry:
        for each in inner:
            _value(each, find, dry=True)
        return None
    if isinstance(tree, ast.BoolOp):
        all_of = isinstance(tree.op, ast.And)
        found = (bool(_value(each, find)) for each in inner)
        return all(found) if all_of else any(found)
    values = [_value(each, find) for each in inner]
    match tree:
        case ast.UnaryOp(op=ast.Not()):
            return not values[0]
        case ast.UnaryOp():
            return -values[0]
        case ast.BinOp(op=how):
            return ARITHMETIC[type(how)](*values)
        case ast.Compare(ops=hows):
            pairs = zip(hows, values, values[1:], strict=False)
            return all(COMPARISON[type(how)](left, right) for how, left, right in pairs)
        case _:
            return values


def _parts(tree: ast.expr) -> list[ast.expr] | None:
    """Return the operands of an expression; None for a name or a constant.

    Raises:
        StudyError: the language does not support the expression.
    """
    match tree:
        case ast.BoolOp(values=values):
            return values
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return [operand]
        case ast.BinOp(left=left, op=how, right=right) if type(how) in ARITHMETIC:
            return [left, right]
        case ast.Compare(left=left, ops=hows, comparators=others) if all(
            type(how) in COMPARISON for how in hows
        ):
            return [left, *others]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return elements
        case ast.Constant(value=bool() | int() | float() | str()) | ast.Name() | ast.Attribute():
            return None
        case _:
            raise StudyError(f"{ast.unparse(tree)!r} is not for a condition")


def _name(tree: ast.expr) -> str:
    """Return the dotted name in `tree`.

    Raises:
        StudyError: the expression is not a name.
    """
    match tree:
        case ast.Name(id="true" | "false"):
            raise StudyError(f"{ast.unparse(tree)!r}: write True or False")
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=last):
            return f"{_name(value)}.{last}"
        case _:
            raise StudyError(f"{ast.unparse(tree)!r} is not the name of a field")
