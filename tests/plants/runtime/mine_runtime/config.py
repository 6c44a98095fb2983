"""The file of the runtime: written for a setting, and read by a scenario."""

import json
from typing import Any

from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.trainer_files.tables import (
    FileOption,
    GivenTables,
    ReadTables,
    TrainerFileError,
    put_all,
)

FIELD = "zero.mine_file"


def write(asked: ConfigQuestion) -> str:
    """Return a setting as the file of the runtime."""
    found = {
        "shards": asked.number("parallel.data"),
        "tensor": asked.number("parallel.tensor"),
        "micro_batch": asked.number("train.micro_batch_size"),
        "options": asked.options,
    }
    return json.dumps(found, indent=2) + "\n"


def read(given: GivenTables, text: str) -> ReadTables:
    """Return the tables of `given` completed from the file of the runtime.

    Raises:
        TrainerFileError: it is not such a file, or contradicts the scenario.
    """
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise TrainerFileError(f"{FIELD}: not JSON: {error}") from None
    said = {"zero.emulate": FileOption("the file", "mine"), "zero.stage": FileOption("the file", 3)}
    for key, name in (
        ("parallel.data", "shards"),
        ("parallel.tensor", "tensor"),
        ("train.micro_batch_size", "micro_batch"),
    ):
        if name not in found:
            raise TrainerFileError(f"{FIELD}: {name}: missing")
        said[key] = FileOption(name, found[name])
    said |= {
        f"zero.mine.{name}": FileOption(name, value) for name, value in found["options"].items()
    }
    tables = given.copied("parallel", "zero", "train")
    put_all(tables, said.items(), source=FIELD)
    return ReadTables(tables=tables, origins=said)
