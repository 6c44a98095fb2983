"""Scenarios that ship with zsim: the paper's experiments, and small ones to try.

Beside each NAME.toml stands NAME.out, what `zsim run NAME` prints.
"""

from importlib.resources import files

SUFFIX = ".toml"


def names() -> tuple[str, ...]:
    """Names of the scenarios, sorted."""
    found = [file.name for file in files(__name__).iterdir() if file.name.endswith(SUFFIX)]
    return tuple(sorted(name.removesuffix(SUFFIX) for name in found))


def text(name: str) -> str:
    """The TOML of scenario `name`.

    Raises:
        LookupError: there is none.
    """
    if name not in names():
        raise LookupError(f"{name!r} must be one of {', '.join(names())}")
    return (files(__name__) / f"{name}{SUFFIX}").read_text("utf-8")
