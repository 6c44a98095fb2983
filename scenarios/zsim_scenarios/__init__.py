"""Scenarios and studies that ship with zsim: the paper's experiments, and small ones to try.

Beside each NAME.toml stands NAME.out, what `zsim run NAME` prints. Studies are in a folder, and so
are figures of papers, whose runs are compared with what was published, and shapes of models.
"""

from importlib.resources import files

SUFFIX = ".toml"
STUDIES = "studies"
PUBLISHED = "published"
MODELS = "models"


def names() -> tuple[str, ...]:
    """Names of the scenarios, sorted."""
    return _names("")


def text(name: str) -> str:
    """Return the TOML of scenario `name`.

    Raises:
        LookupError: there is none.
    """
    return _text("", name)


def study_names() -> tuple[str, ...]:
    """Names of the studies, sorted."""
    return _names(STUDIES)


def study_text(name: str) -> str:
    """Return the TOML of study `name`.

    Raises:
        LookupError: there is none.
    """
    return _text(STUDIES, name)


def published_names() -> tuple[str, ...]:
    """Names of the papers whose figures ship with what was published, sorted."""
    return _names(PUBLISHED)


def published_text(name: str) -> str:
    """Return the TOML of the figures of paper `name`.

    Raises:
        LookupError: there is none.
    """
    return _text(PUBLISHED, name)


def model_family_names() -> tuple[str, ...]:
    """Names of the families of models whose shapes ship, sorted."""
    return _names(MODELS)


def model_family_text(name: str) -> str:
    """Return the TOML of the family of models `name`.

    Raises:
        LookupError: there is none.
    """
    return _text(MODELS, name)


def _names(folder: str) -> tuple[str, ...]:
    inside = files(__name__) / folder
    found = [file.name for file in inside.iterdir() if file.name.endswith(SUFFIX)]
    return tuple(sorted(name.removesuffix(SUFFIX) for name in found))


def _text(folder: str, name: str) -> str:
    if name not in _names(folder):
        raise LookupError(f"{name!r} must be one of {', '.join(_names(folder))}")
    return (files(__name__) / folder / f"{name}{SUFFIX}").read_text("utf-8")
