"""Files that the user pastes into the page: a model's config.json, a GPU, a node.

The page and its address contain their text. They are written to a private folder, since the
readers of `zsim run` and `zsim best` take paths. No pasted text can name another file.
"""

import atexit
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Final

from zsim.bounded_text import bounded_toml
from zsim.cluster.files import Part
from zsim.cluster.files.lone_gpu import is_gpu
from zsim.files.installed import part_names
from zsim.files.output_file import write
from zsim.mistake import MistakeError
from zsim.suggestion import one_of
from zsim.units import format_bytes

CONFIG_BYTES: Final = 12_000
"""Maximum size of a pasted config.json. Encoded in an address, the files must stay below the
65,536 bytes that the server accepts as a request line."""

HARDWARE_BYTES: Final = 4_000
"""Maximum size of a pasted GPU or node."""

FILES_MAX: Final = 1_000
"""Maximum number of files in the folder; the oldest is removed to add another."""

GPU_NUMBERS: Final = {
    "gpu_memory": ("memory", "80 GB"),
    "gpu_bandwidth": ("memory_bandwidth", "3350 GB/s"),
    "gpu_link": ("link", "450 GB/s"),
    "gpu_bf16": ("rates.bf16.peak", "989 TFLOP/s"),
    "gpu_fp8": ("rates.fp8.peak", "1979 TFLOP/s"),
    "gpu_power": ("power", "700 W"),
}
"""The six numbers of a GPU: key in its file by field of the form, and an example."""

OPTIONAL: Final = ("gpu_fp8", "gpu_power")
"""Optional numbers of a GPU."""


@cache
def _folder() -> Path:
    """Return a folder that only this user can read; it is removed when the process ends."""
    folder = Path(mkdtemp(prefix="zsim-serve-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return folder


def own_file(name: str, text: str) -> str:
    """Return the path of a file called `name` with `text`, written now unless it exists."""
    folder = _folder() / hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()[:16]
    path = folder / name
    if not path.is_file():
        kept = sorted(_folder().iterdir(), key=lambda each: each.stat().st_mtime_ns)
        for old in kept[: max(len(kept) - FILES_MAX + 1, 0)]:
            rmtree(old, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        write(path, text)
    return str(path)


def without_folder(text: str) -> str:
    """Return `text` with the paths of such files shortened to their names."""
    return re.sub(rf"{re.escape(str(_folder()))}/[0-9a-f]{{16}}/", "", text)


def need_size(label: str, text: str, most: int) -> None:
    """Raise MistakeError if `text` is larger than `most` bytes.

    Raises:
        MistakeError: it is larger.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise MistakeError(
            f"{label}: has {format_bytes(size)}, must have at most {format_bytes(most)}; remove "
            "keys and comments that zsim does not read"
        )


def gpu_text(numbers: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Return the file of a GPU with `numbers` by field; empty if all are empty.

    Raises:
        MistakeError: a required number of the GPU is missing.
    """
    given = {field: numbers[field] for field in GPU_NUMBERS if numbers[field]}
    if not given:
        return ""
    lines = ['name = "Own"']
    for field, (key, example) in GPU_NUMBERS.items():
        if field in given:
            lines.append(f"{key} = {json.dumps(given[field], ensure_ascii=False)}")
        elif field not in OPTIONAL:
            raise MistakeError(
                f"{labels[field]}: is empty; your own GPU needs it, such as {example}"
            )
    return "\n".join([*lines, ""])


def hardware_of(label: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return "gpu" or "node", and the table that TOML `text` describes.

    Raises:
        MistakeError: it is no TOML, or names a file.
    """
    need_size(label, text, HARDWARE_BYTES)
    try:
        table = bounded_toml(text)
    except ValueError as error:
        raise MistakeError(f"{label}: not TOML: {error}") from None
    if is_gpu(table):
        return "gpu", table
    gpu = table.get("gpu")
    if isinstance(gpu, str) and gpu not in part_names(Part.GPU):
        why = one_of(gpu, part_names(Part.GPU), or_else="a table [gpu], or ")
        raise MistakeError(f"{label}: gpu: {why}")
    return "node", table
