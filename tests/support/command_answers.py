"""What a command line that was asked in a test says, and a small scenario to ask about."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCENARIO = """
title = "two layers"
[model]
layers = 2
hidden_size = 8
attention_heads = 4
sequence_length = 4
vocab_size = 256
[cluster]
topology = "dgx2_infiniband"
nodes = 1
[parallel]
tensor = 2
[zero]
stage = 3
[activations]
checkpointing = "full"
partition = true
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "fp16"
clip_norm = 1.0
"""

Json = Any
"""A JSON value: its shape is what the tests look at."""

Ask = Callable[..., tuple[int, str, str]]


def refused(asked: tuple[int, str, str]) -> str:
    """The one line that a wrong call gets."""
    code, out, error = asked
    assert (code, out) == (2, "")
    assert error.startswith("zsim: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error.removeprefix("zsim: ").strip()


def without_notice(error: str) -> str:
    """Standard error of a process without the line that a long command prints while it works."""
    lines = error.splitlines(keepends=True)
    return "".join(line for line in lines if "still working; Ctrl-C" not in line)


def answered(asked: tuple[int, str, str]) -> dict[str, Json]:
    """The one object that `--json` prints."""
    code, out, error = asked
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def planted(path: Path, change: Callable[[Json], None]) -> None:
    """Change the JSON in the file at `path`."""
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")
