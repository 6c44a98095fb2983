"""The public names: those of `zsim.__all__`, and the types of their options and results."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import zsim
from zsim.api.answer import Answer
from zsim.api.plan_result import PlanResult

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def path_of(named: Any) -> str:  # noqa: ANN401  (a function or a class)
    return f"{named.__module__}.{named.__qualname__}"


def rendered(page: str) -> list[str]:
    return DIRECTIVE.findall((REFERENCE / page).read_text("utf-8"))


def public() -> dict[str, object]:
    return {name: getattr(zsim, name) for name in zsim.__all__ if name != "__version__"}


def types_of(function: object) -> Iterator[type]:
    """Yield the types of the options and of the result of a function."""
    hints = get_type_hints(function)
    for name, hint in hints.items():
        if get_origin(hint) is Unpack:
            yield get_args(hint)[0]
        elif name == "return":
            yield from (each for each in (hint, *get_args(hint)) if isinstance(each, type))


def answers() -> dict[str, type[Answer]]:
    """Return the classes of answers by name."""
    found: dict[str, type[Answer]] = {}
    left: list[type[Answer]] = [*Answer.__subclasses__()]
    while left:
        each = left.pop()
        found[each.__name__] = each
        left += each.__subclasses__()
    return found


def results(found: type, known: set[type]) -> None:
    """Add `found` and the answers that its methods return to `known`."""
    if found in known:
        return
    known.add(found)
    for name, method in inspect.getmembers(found, inspect.isfunction):
        returned = method.__annotations__.get("return")
        kind = (
            answers().get(returned if isinstance(returned, str) else returned.__name__)
            if (isinstance(returned, str | type) and not name.startswith("_"))
            else None
        )
        if kind is not None:
            results(kind, known)


def test_the_reference_of_functions_has_the_public_names_and_their_types_and_no_others() -> None:
    nouns = {path_of(each) for each in public().values() if inspect.isclass(each)}
    functions = [each for each in public().values() if inspect.isfunction(each)]
    types: set[type] = {Answer, PlanResult}
    for each in functions:
        for kind in types_of(each):
            if kind.__module__.startswith("zsim") and path_of(kind) not in nouns:
                results(kind, types)
    wanted = {path_of(each) for each in (zsim.MistakeError, *functions, *types)}
    found = rendered("python.md")
    assert sorted(found) == sorted(set(found))
    assert set(found) == wanted


def test_every_public_class_is_in_the_reference() -> None:
    modules = [each for page in REFERENCE.glob("*.md") for each in rendered(page.name)]
    for name, each in public().items():
        if inspect.isclass(each):
            assert {path_of(each), each.__module__} & set(modules), name


def test_contributing_says_what_is_public_and_how_long_a_deprecation_takes() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (section,) = re.findall(r"^## Public names\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert "zsim.__all__" in section
    assert "one release" in section
