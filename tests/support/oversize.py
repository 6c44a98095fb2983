"""Inputs that are too large for any machine, or no files at all, for each command."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

MEMORY_BYTES: Final = 2**30
LARGE: Final = 5 * 10**9

STUDY = """
question = "Which?"
[base]
scenario = "tiny"
{axes}
[goal]
minimize = "step_time"
"""


def fifo(path: Path) -> None:
    """A pipe that nobody writes into."""
    os.mkfifo(path)


def zeros(path: Path) -> None:
    """A device without an end."""
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    """A file of 5 GB that takes no space."""
    with path.open("wb") as file:
        file.truncate(LARGE)


def long_text(path: Path) -> None:
    """Sixty million letters, without an end of line."""
    path.write_text("x" * 60_000_000, "utf-8")


def many_tables(path: Path) -> None:
    """TOML of a million keys."""
    path.write_text("\n".join(f"k{number} = 1" for number in range(1_000_000)), "utf-8")


def nested(path: Path) -> None:
    """Lists in lists, a million deep."""
    path.write_text("x = " + "[" * 1_000_000, "utf-8")


def digits(path: Path) -> None:
    """A number of three million digits."""
    path.write_text("x = " + "1" * 3_000_000, "utf-8")


def large_json(path: Path) -> None:
    """Two hundred million bytes of JSON: a list of lists, each of which takes 56 bytes and more."""
    path.write_text(json.dumps({"zsim": "job", "version": 1})[:-1] + ', "x": [', "utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write("[]," * 66_000_000 + "[]]}")


FILES: Final[Mapping[str, Callable[[Path], None]]] = {
    "fifo": fifo,
    "zeros": zeros,
    "sparse": sparse,
    "long_text": long_text,
    "many_tables": many_tables,
    "nested": nested,
    "digits": digits,
    "large_json": large_json,
}
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "steps": ("train.steps=1000000000",),
    "layers": ("model.layers=9999", "train.gradient_accumulation_steps=10"),
    "nodes": ("cluster.nodes=1000000000",),
    "micro_batches": ("train.gradient_accumulation_steps=1000000000",),
}
INPUTS: Final = (*FILES, *SETTINGS)
COMMANDS: Final = (
    "run",
    "check",
    "check --against",
    "plan",
    "compare",
    "largest",
    "sweep",
    "topology",
    "topology --fabric",
    "calibrate",
    "validate network",
    "validate training",
)
LAYERED = "llama2_7b"
"""A scenario that has layers, on a node that has a name."""


def oversize(kind: str, command: str, folder: Path) -> list[str | Path]:
    """Words that give `command` the input `kind`; files are made in `folder`."""
    return (
        _with_file(kind, command, folder)
        if kind in FILES
        else _with_settings(kind, command, folder)
    )


def _with_file(kind: str, command: str, folder: Path) -> list[str | Path]:
    suffix = ".json" if kind == "large_json" else ".toml"
    if command in {"calibrate", "validate network", "validate training"}:
        name = "fsdp2_llama_training_runs" if "training" in command else "nccl_tests_sweeps"
        path = folder / f"{name}.csv"
        FILES[kind](path)
        option = "--from" if command == "calibrate" else "--data"
        return [*command.split(), option, folder]
    path = folder / f"input{'.csv' if 'fabric' in command else suffix}"
    FILES[kind](path)
    match command:
        case "check --against":
            return ["check", "tiny", "--against", path]
        case "topology --fabric":
            return ["topology", "dgx_a100", "--nodes", "2", "--fabric", path]
        case "compare":
            return ["compare", path, "tiny"]
        case "sweep":
            return ["sweep", path, "--store", folder / "runs.sqlite"]
        case _:
            return [command, path]


def _with_settings(kind: str, command: str, folder: Path) -> list[str | Path]:
    settings = [word for setting in SETTINGS[kind] for word in ("--set", setting)]
    match command:
        case "run" | "check" | "plan" | "largest":
            return [command, LAYERED, *settings]
        case "check --against":
            return ["check", LAYERED, *settings, "--against", folder / "none.json"]
        case "compare":
            return ["compare", LAYERED, "--but", "zero.stage=1", *settings]
        case "sweep":
            path = folder / "study.toml"
            axes = "\n".join(
                f'[[axis]]\nname = "a{number}"\nfield = "{field}"\nvalues = {[*range(1, 1200)]}'
                for number, field in enumerate(("train.steps", "model.layers"))
            )
            path.write_text(STUDY.format(axes=axes), "utf-8")
            return ["sweep", path, "--store", folder / "runs.sqlite"]
        case "topology" | "topology --fabric":
            return ["topology", "dgx_a100", "--nodes", str(10**9)]
        case _:
            option = "--from" if command == "calibrate" else "--data"
            return [*command.split(), option, folder / "none"]
