"""Statements of a file, without their expressions: a tenth of the nodes of its tree."""

import ast
from collections.abc import Iterator


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements directly inside a node: of its body, its branches and its handlers."""
    for field in ("body", "orelse", "finalbody"):
        yield from getattr(node, field, ())
    for field in ("handlers", "cases"):  # of try and match
        for part in getattr(node, field, ()):
            yield from part.body


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement of a tree, those of functions and classes too."""
    waiting = list(statements_in(node))
    while waiting:
        statement = waiting.pop()
        yield statement
        waiting += statements_in(statement)
