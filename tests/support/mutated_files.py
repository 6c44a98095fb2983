"""Files as users write them, broken at random.

Every case is a function of its number: files in a folder, and the words of a command that reads
them. A text is broken as text (bytes flipped, parts cut out or repeated), or as the tree that it
stands for (keys dropped or renamed, values replaced, deep nesting, huge numbers).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from valid_files import Tree, bases, document


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files to write, and the words of a command that reads them."""

    number: int
    files: tuple[tuple[str, bytes], ...]
    words: tuple[str, ...]

    def write(self, folder: Path) -> list[str]:
        """The files are in `folder`; the words of the command, for this folder."""
        for name, content in self.files:
            (folder / name).write_bytes(content)
        names = {name for name, _ in self.files}
        return [str(folder / word) if word in names else word for word in self.words]


WORDS = ("", "x", "\x00", "\u202e", "\ud800", "x" * 100_000, "nan", "../..", "/dev/full")
QUANTITIES = ("1 GB", "1e99999999 GB", "1e99999999", "1/3")
LETTERS = WORDS + QUANTITIES
NUMBERS = (0, -1, 100, 10**5, 2**31, 2**53 + 1, 2**60, 2**63, 10**30, -(10**30), 0.5, 1e18, 1e60)
UNDEFINED = (-0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))


def _nested(depth: int, *, lists: bool) -> Tree:
    found: Tree = 1
    for _ in range(depth):
        found = [found] if lists else {"a": found}
    return found


def _one_of(random: np.random.Generator, choices: Sequence[Tree]) -> Tree:
    return choices[int(random.integers(len(choices)))]


def _anything(random: np.random.Generator) -> Tree:
    """What may stand where a value stands, of any kind."""
    nested = _nested(int(random.choice([3, 50])), lists=bool(random.integers(2)))
    kinds = (_one_of(random, NUMBERS), _one_of(random, UNDEFINED), _one_of(random, LETTERS))
    return _one_of(random, (*kinds, True, None, {}, [], [1] * 1000, nested))


def _alike(random: np.random.Generator, value: Tree, others: Sequence[Tree]) -> Tree:
    """Another value of the kind of `value`; `others` stand elsewhere under the same name."""
    others = [each for each in others if type(each) is type(value)]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = [value + 1, value - 1, value * 2, value * 1000, value // 2, value * 10**9, -value]
        others = (*near, *range(1, 9), 64, 4096, *NUMBERS, *others[:20])
    return json.loads(json.dumps(_one_of(random, others)))


def _places(tree: Tree) -> list[tuple[Tree, Any]]:
    """Every container in `tree` with every key in it."""
    found: list[tuple[Tree, Any]] = []
    stack = [tree]
    while stack:
        each = stack.pop()
        keys = list(each) if isinstance(each, dict) else list(range(len(each)))
        for key in keys:
            found.append((each, key))
            if isinstance(each[key], dict | list):
                stack.append(each[key])
    return found


def broken_tree(tree: Tree, random: np.random.Generator) -> Tree:
    """A copy of `tree` with one to three changes, rather few."""
    tree = json.loads(json.dumps(tree))
    for _ in range(1 + int(random.geometric(0.7) > 1) + int(random.random() < 0.1)):
        places = _places(tree)
        if not places:
            break
        holder, key = places[random.integers(len(places))]
        what = random.integers(10)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[f"{key}s"] = holder.pop(key)
        elif what == 1:
            holder.insert(key, holder[key])
        elif what <= 3:
            holder[key] = _anything(random)
        else:
            others = [each[name] for each, name in places if name == key]
            holder[key] = _alike(random, holder[key], others)
    return tree


def broken_text(text: bytes, random: np.random.Generator) -> bytes:
    """`text` with bytes flipped, cut out, repeated, put in, or with brackets without end."""
    for _ in range(random.integers(1, 4)):
        start = int(random.integers(len(text) + 1))
        end = min(len(text), start + int(random.integers(1, 200)))
        match int(random.integers(7)):
            case 0 | 1 if start < len(text):
                flipped = bytes([text[start] ^ (1 << int(random.integers(8)))])
                text = text[:start] + flipped + text[start + 1 :]
            case 2:
                text = text[:start] + text[end:]
            case 3:
                text = text[:end] + text[start:]
            case 4:
                text = text[:start] + random.bytes(int(random.integers(1, 9))) + text[start:]
            case 5:
                many = random.choice([b"[", b'{"a":', b"9", b"<a>", b"[[a.", b'"'])
                text = text[:start] + bytes(many) * int(random.choice([5, 5000])) + text[start:]
            case _:
                digits = random.choice([b"9" * 30, b"-1", b"1e400", b"0", b"1_0", b"null", b"0x1F"])
                text = text[:start] + bytes(digits) + text[end:]
    return text


def case(number: int) -> Case:
    """The case of this number."""
    random = np.random.default_rng((20, number))
    kinds = bases()
    kind = kinds[number % len(kinds)]
    base = kind[random.integers(len(kind))]
    command = base.commands[random.integers(len(base.commands))]
    if base.tree is not None and random.random() < 0.75:
        tree = broken_tree(base.tree, random)
        text = json.dumps(tree) if base.name.endswith((".json", ".yaml")) else document(tree)
        content = text.encode("utf-8", "surrogatepass")
    else:
        content = broken_text(base.text.encode(), random)
    files = [(base.name, content), *((name, text.encode()) for name, text in base.others)]
    words = [command[0], base.read, *command[1:]]
    if random.random() < 0.3 and command[0] != "topology":
        words.append("--json")
    return Case(number=number, files=tuple(files), words=tuple(words))
