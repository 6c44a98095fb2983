"""The oldest versions that pyproject.toml declares, as constraints for pip: `python oldest.py`."""

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("report", "calibrate", "draw", "serve", "yaml", "chakra")
"""Extras of the core; torch, and what tests take, are pinned by constraints.txt alone."""

REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def oldest() -> dict[str, str]:
    """Return the lower bound of each requirement of the core, by name.

    Raises:
        ValueError: one has none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    found: dict[str, str] = {}
    for requirement in chain(project["dependencies"], *extras):
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement}: must be NAME>=VERSION")
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in oldest().items())
