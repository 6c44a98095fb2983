"""Notebooks in tests: the form in which one shows a result, and its code cells run in order."""

import json
from pathlib import Path
from typing import Any


def shown_as(result: object, form: str) -> str:
    """What a notebook shows of `result`: `form` is html or svg."""
    method: Any = getattr(result, f"_repr_{form}_")
    found = method()
    assert isinstance(found, str)
    return found


def code_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
