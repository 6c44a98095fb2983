"""The option that names the backends which are tested; without it all that are registered."""

import pytest

from zsim.backend.backend import names


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--backend`."""
    parser.addoption("--backend", action="append", default=[], metavar="NAME")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test for each backend."""
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend", default=[])
        metafunc.parametrize("backend", chosen or names())
