"""The version of the code that simulates: a hash of the installed sources."""

from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("zsim", "zsim_des", "zsim_study")
"""Packages on which every simulated run depends."""


@cache
def code_version() -> str:
    """Return a hash of the Python sources of `PACKAGES`, by their paths inside."""
    found = sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise AssertionError(f"{package} is not installed")
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
