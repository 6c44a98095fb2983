"""YAML files of trainers, read by PyYAML: only plain types, unique keys, within size limits.

References and merged keys are counted expanded, before objects are built. PyYAML's parser in C
crashes on deeply nested lists; this module uses the one in Python, since these files are small.
"""

from typing import cast

import yaml

from zsim.bounded_text import DEPTH, need_small
from zsim.limits import limits
from zsim.runtimes.trainer_files.tables import TrainerFileError
from zsim.schedule.json import shown

MOST_BYTES = 256 * 1024
"""Maximum size of a file in bytes; the parser takes some seconds for it."""

MOST_VALUES = 20_000
"""Maximum number of values, with references expanded: PyYAML takes 0.1 ms for each."""

LONGEST_NUMBER = 100
"""Maximum length of a value that is not a string: a base-60 number takes quadratic time."""

TAG = "tag:yaml.org,2002:"
STRING, INTEGER, FLOAT, MERGE = (f"{TAG}{name}" for name in ("str", "int", "float", "merge"))
SECTIONS = frozenset({f"{TAG}map", f"{TAG}seq"})
"""Types of containers; sets, ordered maps and Python types are refused."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that refuses repeated keys and bounds expanded references.

    Attributes:
        values: number of values read so far, with references expanded.
        depth: number of open lists and mappings.
        measures: number of values and levels of each complete node, by its identity.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values, self.depth = 0, 0
        self.measures: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        """Return the next node; raise if it exceeds the limits."""
        mark = self.peek_event().start_mark
        self.depth += 1
        self._need(self.depth <= limits().config_depth, DEPTH, mark)
        is_reference = self.check_event(yaml.AliasEvent)
        node = cast("yaml.Node", super().compose_node(parent, index))
        self.depth -= 1
        if not is_reference:
            self._need_plain(node, mark)
            self.measures[id(node)] = self._measured(node)
        self._need(id(node) in self.measures, "a value must not hold itself", mark)
        values, levels = self.measures[id(node)]
        self.values += values if is_reference else 1
        most = min(MOST_VALUES, limits().config_values)
        self._need(max(values, self.values) <= most, f"must have at most {most:,} values", mark)
        self._need(self.depth + levels <= limits().config_depth, DEPTH, mark)
        return node

    def _measured(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of values and levels of a node whose parts are complete."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        parts = [each for pair in node.value for each in pair] if _is_map(node) else node.value
        inner = [self.measures[id(each)] for each in parts]
        return 1 + sum(each for each, _ in inner), 1 + max((each for _, each in inner), default=0)

    def _need_plain(self, node: yaml.Node, mark: yaml.Mark) -> None:
        """Raise ConstructorError unless a node has a plain type and unique keys."""
        if isinstance(node, yaml.ScalarNode):
            plain = self.resolve(yaml.ScalarNode, node.value, (True, False))
            known = frozenset({STRING, plain, FLOAT if plain == INTEGER else plain})
            is_short = node.tag == STRING or len(node.value) <= LONGEST_NUMBER
            self._need(is_short, f"must have at most {LONGEST_NUMBER} letters, or be quoted", mark)
        else:
            known = SECTIONS
        self._need(node.tag in known, f"could not determine a constructor for {node.tag!r}", mark)
        if _is_map(node):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            seen: set[str] = set()
            for key in keys:
                is_new = key.tag == MERGE or key.value not in seen
                self._need(is_new, f"{shown(key.value)} is repeated", key.start_mark)
                seen.add(key.value)

    @staticmethod
    def _need(is_right: bool, why: str, mark: yaml.Mark) -> None:  # noqa: FBT001  (a condition)
        if not is_right:
            raise yaml.constructor.ConstructorError(None, None, why, mark)


def _is_map(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def yaml_sections(field: str, text: str) -> dict[str, object]:
    """Return the sections of a YAML file, which the key `field` of a scenario names.

    Raises:
        TrainerFileError: it is not YAML, is too large, or has no sections.
    """
    if len(text) > MOST_BYTES:
        raise TrainerFileError(
            f"{field}: must have at most {MOST_BYTES} characters, has {len(text)}"
        )
    try:
        found: object = yaml.load(text, _Loader)
        need_small(found)
    except yaml.YAMLError as error:
        raise TrainerFileError(f"{field}: not YAML: {_why(error)}") from None
    except RecursionError:
        raise TrainerFileError(f"{field}: not YAML: {DEPTH}") from None
    except ValueError as error:  # an invalid date, a number of too many digits
        raise TrainerFileError(f"{field}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise TrainerFileError(f"{field}: must have keys with values, as `key: value`")
    return {str(key): value for key, value in cast("dict[object, object]", found).items()}


def _why(error: yaml.YAMLError) -> str:
    """Return the problem and its position, on one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{problem}{where}"
