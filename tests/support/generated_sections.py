"""Sections of a page between marks, which a function writes; the rest is written by hand."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

MARK = re.compile(r"^<!-- made: ([\w ]+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; columns whose name ends with a colon are right-aligned."""
    names = list(columns)
    rules = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.removesuffix(":") for name in names], rules, *rows]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each section of a page that is made."""
    for name, text in MARK.findall(page):
        yield name, text.strip("\n") + "\n"


def made(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return `page` with new sections."""

    def again(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- made: {name} -->\n\n{makers[name]()}\n<!-- end -->"

    return MARK.sub(again, page)
