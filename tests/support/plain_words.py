"""Phrases that this project overuses, against their usual rates in well-known libraries.

    python tests/support/plain_words.py                  # rates above the usual ones, worst first
    python tests/support/plain_words.py FILE...          # each hit in these files
    python tests/support/plain_words.py --since COMMIT   # each hit in lines added since COMMIT
    python tests/support/plain_words.py --usual          # measure the usual rates again

Read are docstrings, comments and messages of our packages, and pages without their code. A phrase
counts where it is more than `TIMES` as frequent as usual: a few hits are no fault. A low count
does not make a text plain; only a reader can judge that.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".toml")
OURS = ("zsim", "runtimes", "apps", "backends", "docs", "README.md", "CONTRIBUTING.md")
NOT_OURS_TO_CHANGE = ("docs/adr/",)
"""Decisions are never amended, so their words are what they were."""

LIBRARIES = ("torch", "numpy", "networkx", "pydantic", "pandas", "rich", "werkzeug", "simpy")
TIMES = 3
RARE = 5
"""Usual rate per 100,000 words below which a single hit is listed."""
PER = 100_000
COMMENT = re.compile(r"(?:^|\s)#\s(.*)")
WORD = re.compile(r"[A-Za-z']+")
MESSAGES = {"echo", "print", "secho", "Option", "Argument"}
"""Functions whose text users read, beside `raise`."""


def usual_rates() -> dict[str, float]:
    """Return the pattern of each phrase with its usual rate per 100,000 words."""
    listed = tomllib.loads(LIST.read_text("utf-8"))["phrase"]
    return {str(each["phrase"]): float(each["usual"]) for each in listed}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a Python or Markdown file with their numbers."""
    source = path.read_text("utf-8", errors="replace")
    yield from _of_python(source) if path.suffix == ".py" else _of_markdown(source)


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", ())  # of a lambda or a conditional expression: no list
        for item in body if isinstance(body, list) else ():
            match item:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield from enumerate(text.splitlines(), item.lineno)
                case _:
                    pass
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_message(node.func)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
    for number, line in enumerate(source.splitlines(), 1):
        if at := COMMENT.search(line):
            yield number, at[1]


def _is_message(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in MESSAGES
        case _:
            return False


def _of_markdown(source: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", " ", line)


def is_decision(path: Path) -> bool:
    """Return True for a page of `docs/adr`."""
    return str(path.relative_to(ROOT)).startswith(NOT_OURS_TO_CHANGE)


def our_files() -> list[Path]:
    """Return the files of ours whose words are counted."""
    found = [
        path
        for place in map(ROOT.joinpath, OURS)
        for path in ([place] if place.is_file() else sorted(place.rglob("*")))
        if path.suffix in {".py", ".md"}
    ]
    return [path for path in found if not is_decision(path)]


def counted(lines: Iterable[str], phrases: Iterable[str]) -> tuple[int, Counter[str]]:
    """Return the number of words in `lines`, and how often each phrase occurs."""
    patterns = {phrase: re.compile(phrase, re.IGNORECASE) for phrase in phrases}
    has_any = re.compile("|".join(patterns), re.IGNORECASE)
    words, hits = 0, Counter[str]()
    for line in lines:
        words += len(WORD.findall(line))
        if has_any.search(line) is None:
            continue
        for phrase, pattern in patterns.items():
            hits[phrase] += len(pattern.findall(line))
    return words, hits


def excess(lines: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the phrases above `TIMES` their usual rate: the rate, and what is above that."""
    usual = usual_rates()
    words, hits = counted(lines, usual)
    rates = {phrase: PER * hits[phrase] / max(words, 1) for phrase in usual}
    return {
        phrase: (rate, rate - TIMES * usual[phrase])
        for phrase, rate in sorted(rates.items(), key=lambda each: -each[1])
        if rate > TIMES * usual[phrase]
    }


def hits_in(path: Path, numbers: Iterable[int] | None = None) -> Iterator[str]:
    """Yield a line for each hit of a rare phrase in `path`, or only in the lines `numbers`."""
    rare = {each: re.compile(each, re.I) for each, usual in usual_rates().items() if usual < RARE}
    asked = None if numbers is None else set(numbers)
    for number, text in sorted(texts(path)):
        found = [phrase for phrase, pattern in rare.items() if pattern.search(text)]
        if found and (asked is None or number in asked):
            yield f"{path}:{number}: {text.strip()[:100]}  [{', '.join(found)}]"


def added_since(commit: str) -> dict[Path, list[int]]:
    """Return the numbers of the lines that were added since `commit`, by file of ours."""
    words = ["git", "diff", "--unified=0", "--no-color", commit, "--", *OURS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[Path, list[int]] = {}
    path = Path()
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            path = ROOT / line[6:]
        elif at := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(at[1]), int(at[2] or 1)
            found.setdefault(path, []).extend(range(first, first + count))
    known = set(our_files())
    return {path: lines for path, lines in found.items() if path in known}


def library_lines() -> Iterator[str]:
    """Yield the prose of the libraries that give the usual rates, those that are installed."""
    for name in LIBRARIES:
        spec = find_spec(name)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            for path in sorted(Path(folder).rglob("*.py")):
                try:
                    yield from (text for _, text in texts(path))
                except SyntaxError:
                    continue


def main(arguments: list[str]) -> int:
    """Print the answer to `arguments`; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--since")
    parser.add_argument("--usual", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.usual:
        words, hits = counted(library_lines(), usual_rates())
        print(f"# per 100,000 of {words:,} words")
        for phrase, count in hits.items():
            print(f"{PER * count / words:8.1f}  {phrase}")
        return 0
    if asked.files or asked.since:
        added = added_since(asked.since) if asked.since else dict.fromkeys(asked.files)
        found = [line for path, numbers in added.items() for line in hits_in(path, numbers)]
        print("\n".join(found), end="\n" * bool(found))
        return 0
    over = excess(text for path in our_files() for _, text in texts(path))
    for phrase, (rate, above) in over.items():
        print(f"{rate:8.1f} {above:8.1f}  {phrase}")
    total = sum(above for _, above in over.values())
    print(f"{total:.0f} per 100,000 words above {TIMES} times the usual rates")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
