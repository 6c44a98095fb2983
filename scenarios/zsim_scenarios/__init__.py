"""Scenarios and studies that ship with zsim: the paper's experiments, and small examples.

For each scenario NAME.toml, NAME.out holds the output of `zsim run NAME`. The folders `studies`,
`published` and `models` hold studies, published figures of papers, and shapes of models.
"""

from importlib.resources import files

SUFFIX = ".toml"
STUDIES = "studies"
PUBLISHED = "published"
MODELS = "models"


def names() -> tuple[str, ...]:
    """Return the names of the scenarios, sorted."""
    return _names("")


def text(name: str) -> str:
    """Return the TOML of scenario `name`.

    Raises:
        LookupError: no scenario has that name.
    """
    return _text("", name)


def study_names() -> tuple[str, ...]:
    """Return the names of the studies, sorted."""
    return _names(STUDIES)


def study_text(name: str) -> str:
    """Return the TOML of study `name`.

    Raises:
        LookupError: no study has that name.
    """
    return _text(STUDIES, name)


def published_names() -> tuple[str, ...]:
    """Return the names of the papers whose published figures ship, sorted."""
    return _names(PUBLISHED)


def published_text(name: str) -> str:
    """Return the TOML of the published figures of paper `name`.

    Raises:
        LookupError: no paper has that name.
    """
    return _text(PUBLISHED, name)


def model_family_names() -> tuple[str, ...]:
    """Return the names of the families of models whose shapes ship, sorted."""
    return _names(MODELS)


def model_family_text(name: str) -> str:
    """Return the TOML of the family of models `name`.

    Raises:
        LookupError: no family has that name.
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
