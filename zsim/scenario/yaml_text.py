"""YAML files of trainers, by PyYAML: safe types alone, each key once, of a bounded size.

PyYAML's parser in C ends the process where lists nest deeply; this is the one in Python, and files
of trainers are small.
"""

from collections.abc import Hashable
from typing import cast

import yaml

from zsim.scenario.tables import ScenarioError
from zsim.schedule.json import shown

MOST_BYTES = 256 * 1024
"""Size of a file; the parser takes some seconds for so much."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that refuses a key that stands twice."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 (as PyYAML's)
    ) -> dict[Hashable, object]:
        """Return the mapping of a node."""
        found: set[object] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in found:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown(str(key.value))} stands twice", key.start_mark
                )
            found.add(key.value)
        return cast("dict[Hashable, object]", super().construct_mapping(node, deep))


def yaml_sections(field: str, text: str) -> dict[str, object]:
    """Return the sections of a YAML file, which the key `field` of a scenario names.

    Raises:
        ScenarioError: it is no YAML, is too large, or has no sections.
    """
    if len(text) > MOST_BYTES:
        raise ScenarioError(f"{field}: must have at most {MOST_BYTES} characters, has {len(text)}")
    try:
        found: object = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{field}: not YAML: {_why(error)}") from None
    except RecursionError:
        raise ScenarioError(f"{field}: not YAML: nested too deeply") from None
    except ValueError as error:  # a date that is none, a number of too many digits
        raise ScenarioError(f"{field}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ScenarioError(f"{field}: must have keys with values, as `key: value`")
    return {str(key): value for key, value in cast("dict[object, object]", found).items()}


def _why(error: yaml.YAMLError) -> str:
    """Return what is wrong, and where, on one line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{problem}{where}"
