"""`import zsim` is an index: it costs nothing, and a name stays what it is."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import zsim

HEAVY = ("torch", "pydantic", "numpy", "networkx", "rich", "typer", "pandas")


def modules_after(program: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after `program`."""
    said = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    return {name.partition(".")[0] for name in said.split()}


@pytest.mark.parametrize("program", ["import zsim", "import zsim; zsim.__version__; dir(zsim)"])
def test_an_import_of_zsim_loads_nothing_else(program: str) -> None:
    assert modules_after(program).isdisjoint(HEAVY)


@pytest.mark.one_commit_in(6)
def test_a_simulation_from_python_loads_neither_torch_nor_the_command_line_nor_graphs() -> None:
    loaded = modules_after("import zsim; zsim.run('tiny').to_dict()")
    assert loaded.isdisjoint({"torch", "typer", "rich", "pandas", "networkx"})
    assert "pydantic" in loaded


@pytest.mark.parametrize("name", zsim.__all__)
def test_every_name_of_the_index_can_be_imported(name: str) -> None:
    found = getattr(zsim, name)
    assert found is getattr(zsim, name)
    assert name == "__version__" or found.__doc__


def test_no_name_of_the_index_is_that_of_a_module() -> None:
    """An import of `zsim.proof`, say, would put the module in place of a function `check`."""
    modules = {module.name for module in pkgutil.iter_modules(zsim.__path__)}
    assert modules
    assert modules.isdisjoint(zsim.__all__)


def test_a_name_stays_what_it_is_when_every_room_was_imported() -> None:
    before = {name: getattr(zsim, name) for name in zsim.__all__}
    for module in pkgutil.iter_modules(zsim.__path__):
        importlib.import_module(f"zsim.{module.name}")
    assert {name: getattr(zsim, name) for name in zsim.__all__} == before


def test_a_name_that_is_not_in_the_index_is_an_attribute_error() -> None:
    name = "fly"
    with pytest.raises(AttributeError, match="module 'zsim' has no attribute 'fly'"):
        getattr(zsim, name)
