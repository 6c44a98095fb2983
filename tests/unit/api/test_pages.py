"""What a newcomer sees first works: the lines of the README, and the notebook that ships."""

import ast
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from notebook import code_cells

import zsim
from zsim.api.notebook import Picture
from zsim.api.run_result import RunResult

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "README.md").read_text("utf-8").split("## From Python\n")[1].split("\n## ")[0]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.mark.one_commit_in(6)
def test_the_lines_of_the_readme_print_and_write_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", SECTION, re.M | re.S)
    assert len(shown) == 2
    assert len([line for line in shown[0][0].splitlines() if line]) == 5
    names: dict[str, object] = {}
    for lines, prints in shown:
        out = StringIO()
        with redirect_stdout(out):
            exec(lines, names)
        assert out.getvalue() == prints
    assert (tmp_path / "run.html").read_text("utf-8").endswith("</html>")
    assert (tmp_path / "step.svg").read_text("utf-8").startswith("<svg")


def shown_by(cell: str, names: dict[str, Any]) -> object:
    """Run a cell of a notebook; what its last line is worth, if that is an expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.one_commit_in(9)
def test_the_notebook_runs_from_top_to_bottom_and_every_cell_shows_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells run in one namespace, as a kernel runs them; nbclient would take a kernel."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [shown_by(cell, names) for cell in code_cells(NOTEBOOK)]
    assert not any(each is None for each in shown)
    assert any(isinstance(each, Picture) for each in shown)
    assert any(isinstance(each, RunResult) for each in shown)
    assert not list(tmp_path.iterdir())


def test_the_notebook_has_the_form_of_one_and_keeps_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.one_commit_in(24)
def test_a_run_on_real_ranks_is_one_argument_away(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 200, "utf-8")
    changes = {"train.steps": 2, "parallel.data": 2}
    result = zsim.run("tiny", changes, backend="torch", data=str(text))
    assert result.backend == "torch"
    assert len(result.losses) == 2
    assert result.fits
