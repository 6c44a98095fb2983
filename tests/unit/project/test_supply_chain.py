"""What is installed: pinned with hashes, under licences that are allowed, not older than works."""

import re
import subprocess
import tomllib
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from oldest import oldest

from lock import EXTRAS, FOLDER, ON_TOP_OF, locked

ROOT = Path(__file__).parents[3]
HASH = re.compile(r"sha256:[0-9a-f]{64}")

PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib",
}  # fmt: skip
"""Licences of SPDX under which a dependency may be used by anybody who takes zsim under MIT."""

SAID_OTHERWISE = {
    "MIT License": "MIT",
    "MIT license": "MIT",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "ISC license": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "DFSG approved": "MIT",  # as its file says
}
EXCEPTIONS = {
    "CairoSVG": "LGPL-3.0-or-later",  # the extra `draw` alone; imported, neither copied nor changed
    "hypothesis": "MPL-2.0",  # tests alone
    "tqdm": "MPL-2.0 AND MIT",  # transformers takes it: tests alone
    "pathspec": "MPL-2.0",  # builds zsim, and mypy
    "certifi": "MPL-2.0",  # a list of certificates: docs and studies alone
    "fqdn": "MPL-2.0",  # Jupyter, which HolisticTraceAnalysis takes: studies alone
}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def plain(name: str) -> str:
    """A name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extras: tuple[str, ...]) -> set[str]:
    tables = project()
    wanted = chain(tables["dependencies"], *(tables["optional-dependencies"][e] for e in extras))
    return {plain(re.split(r"[<>=\[]", each)[0]) for each in wanted}


def test_every_lock_pins_what_the_constraints_pin_with_hashes() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:]
    pinned = {plain(name): version for name, version in (line.split("==") for line in lines)}
    for path in FOLDER.glob("*.txt"):
        if path.stem == "torch_cuda":  # its libraries are not installed by anything else
            continue
        for name, entry in locked(path.stem).items():
            pin, *hashes = entry.split(" \\\n    --hash=")
            assert pin == f"{name}=={pinned[plain(name)]}"
            assert hashes
            assert all(HASH.fullmatch(each) for each in hashes)


def test_no_lock_says_where_files_come_from() -> None:
    for path in FOLDER.glob("*.txt"):
        text = path.read_text("utf-8")
        assert "/" not in text.replace("lock`, from", "").split("\n", 1)[1]
        assert not re.search(r"^\s*-(?!-hash)", text, re.MULTILINE)


def test_the_locks_of_an_environment_hold_all_that_it_requires() -> None:
    for name, extras in EXTRAS.items():
        layers = [*ON_TOP_OF[name], name, *(["torch_cpu"] if "torch" in extras else [])]
        have = {plain(each) for layer in layers for each in locked(layer)}
        wanted = {"cyclonedx-bom"} if name == "sbom" else requirements(extras)
        assert wanted <= have, name


def test_make_installs_nothing_without_a_hash_but_zsim_and_the_tool_that_locks() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    assert "LOCKED := $(PIP) --require-hashes" in text
    assert "--no-deps" in text.partition("LOCKED")[0]
    lines = text.splitlines()
    installs = [each for each in lines if "bin/python $(" in each or "pip install" in each]
    assert len(installs) > 8
    odd = [each for each in installs if "$(LOCKED) -r lock/" not in each]
    assert all(
        "$(ZSIM)" in each or each.startswith("PIP :=") or "pip-tools" in each for each in odd
    )


def licence(distribution: Distribution) -> str:
    """The licence as a package says it: as an expression, by its classifiers, or in words."""
    told = distribution.metadata
    if "License-Expression" in told:
        return told["License-Expression"]
    classifiers = [each for each in told.get_all("Classifier", []) if each.startswith("License")]
    words = told.get_all("License", [""])
    names = [each.split(" :: ")[-1] for each in classifiers] or words
    known = [SAID_OTHERWISE.get(each.strip(), each.strip()) for each in names]
    return " OR ".join(known)


def is_allowed(name: str, said: str) -> bool:
    """Whether all parts of an expression are allowed, or one of those that may be chosen."""
    if EXCEPTIONS.get(name) == said:
        return True
    choices = said.strip("()").split(" OR ")
    return any(
        all(part.strip(" ()") in PERMISSIVE for part in choice.split(" AND ")) for choice in choices
    )


def test_everything_that_is_installed_has_a_licence_that_is_allowed() -> None:
    names = {plain(name) for path in FOLDER.glob("*.txt") for name in locked(path.stem)}
    found = {each.name: licence(each) for each in distributions() if plain(each.name) in names}
    assert len(found) > 50
    assert {name: said for name, said in found.items() if not is_allowed(name, said)} == {}


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0-or-later", False),
        ("LGPL-3.0-or-later", False),
        ("", False),
    ],
)
def test_a_licence_that_is_not_allowed_is_seen(said: str, *, allowed: bool) -> None:
    assert is_allowed("package", said) == allowed


def test_every_dependency_has_a_lower_bound() -> None:
    declared = {plain(name) for name in oldest()}
    extras = ("report", "calibrate", "draw", "serve", "yaml", "chakra")
    assert requirements(extras) == declared


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_scenarios_print_the_same_with_the_oldest_and_the_newest_dependencies() -> None:
    done = subprocess.run([ROOT / ".ci" / "versions"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "oldest-3.11: Python 3.11" in done.stdout
