"""Parameters and buffers of a module in a folder: a torch checkpoint, or safetensors files.

Tensors are read one at a time, on demand. Names are those of the module's `state_dict`; a tied
parameter may have any of its names.
"""

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.rank_state import PREFIXES, extents

SUFFIX: Final = ".safetensors"

_FORMATS: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Data types by their names in safetensors (its README, "Format")."""

_HEADER: Final = 8
"""Number of bytes that hold the header's length."""


class StoredTensor(NamedTuple):
    """The shape of a stored tensor, and a function that reads it."""

    shape: torch.Size
    read: Callable[[], Tensor]


class StoredValues:
    """Values of `module` in a folder or a safetensors file, by the names of its parameters.

    Tensors are read on demand.
    """

    def __init__(self, folder: Path, module: nn.Module, ignore: Sequence[str] = ()) -> None:
        """Check that all parameters have the right shapes, and that no tensor is of another model.

        `ignore` has patterns of names that the module need not have.

        Raises:
            CheckpointError: the folder has no values, a parameter is missing or has another shape,
                or a tensor belongs to no parameter or buffer.
        """
        self._folder = folder
        names: dict[int, list[str]] = {}
        for name, each in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(each), []).append(name)
        self._stored = _stored_in(folder, next(iter(names.values()), []))
        self._keys: dict[str, str] = {}
        for name, each in module.named_parameters():
            keys = [key for key in names[id(each)] if key in self._stored]
            if not keys:
                raise CheckpointError(f"checkpoint {folder}: it has no parameter {name}")
            self._keys[name] = self._need_shape(keys[0], each)
        known = {key for keys in names.values() for key in keys}
        known |= {key for key, _ in module.named_buffers(remove_duplicate=False)}
        others = sorted(self._stored.keys() - known)
        for key in others:
            if not any(fnmatchcase(key, pattern) for pattern in ignore):
                raise CheckpointError(
                    f"checkpoint {folder}: it is of another model: it has {key}, the module has "
                    f"not; leave it out with initial=Initializer(stored=..., ignore=({key!r},))"
                )

    def __call__(self, name: str) -> Tensor:
        """Return the value of a parameter.

        Raises:
            CheckpointError: the value cannot be read.
        """
        return self._stored[self._keys[name]].read()

    def buffer(self, name: str, buffer: Tensor) -> Tensor | None:
        """Return the value of a buffer; None if the folder does not have it.

        Raises:
            CheckpointError: it cannot be read, or has another shape.
        """
        if name not in self._stored:
            return None
        return self._stored[self._need_shape(name, buffer)].read().to(buffer.dtype, copy=True)

    def forget(self) -> None:
        """Close the files."""
        self._stored.clear()

    def _need_shape(self, key: str, tensor: Tensor) -> str:
        found = self._stored[key].shape
        if found != tensor.shape:
            raise CheckpointError(
                f"checkpoint {self._folder}: it is of another model: {key} is "
                f"{extents(found)} there, {extents(tensor.shape)} here"
            )
        return key


def _stored_in(folder: Path, first: Sequence[str]) -> dict[str, StoredTensor]:
    """Return the tensors in a folder or file; the names `first` determine the prefix of its keys.

    Raises:
        CheckpointError: its format is unknown, or it is broken.
    """
    files = [folder] if folder.suffix == SUFFIX else sorted(folder.glob(f"*{SUFFIX}"))
    if files:
        return {key: each for path in files for key, each in _in_file(path).items()}
    if folder.is_file():
        raise CheckpointError(
            f"checkpoint {folder}: no file of safetensors; give one, a folder of them, or a folder "
            "of torch.distributed.checkpoint"
        )
    metadata = checkpoint_folder.metadata_of(folder)
    there = metadata.state_dict_metadata
    starts = [f"{prefix}model." for prefix in PREFIXES]
    start = next((each for each in starts if any(each + name in there for name in first)), "")
    return {
        key.removeprefix(start): StoredTensor(
            each.size, partial(_from_checkpoint, folder, metadata, key)
        )
        for key, each in there.items()
        if isinstance(each, TensorStorageMetadata) and key.startswith(start)
    }


def _from_checkpoint(folder: Path, metadata: Metadata, key: str) -> Tensor:
    """Return a tensor of a torch checkpoint, read by this rank alone."""
    stored = metadata.state_dict_metadata[key]
    assert isinstance(stored, TensorStorageMetadata)
    found = torch.empty(stored.size, dtype=stored.properties.dtype)
    checkpoint_folder.read_alone(folder, metadata, {key: found})
    return found


def _in_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, as views of its memory map.

    Raises:
        CheckpointError: it is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            # Copy-on-write, because torch requires writable memory.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = _HEADER + int.from_bytes(mapped[:_HEADER], "little")
        header: dict[str, dict[str, Any]] = json.loads(mapped[_HEADER:start])
        header.pop("__metadata__", None)
        return {key: _in_bytes(mapped, start, each) for key, each in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{error}"
        raise CheckpointError(f"checkpoint {path}: cannot be read: {what}") from error


def _in_bytes(mapped: mmap.mmap, start: int, entry: Mapping[str, Any]) -> StoredTensor:
    """Return the tensor that an entry in the header of a mapped file describes.

    Raises:
        ValueError: the file does not have these bytes.
    """
    dtype, shape = _FORMATS[entry["dtype"]], torch.Size(entry["shape"])
    low, high = entry["data_offsets"]
    count = shape.numel()
    if high - low != count * dtype.itemsize or not 0 <= low <= high <= len(mapped) - start:
        raise ValueError(f"bytes {low} to {high} do not hold {extents(shape)} of {entry['dtype']}")
    if not count:
        return StoredTensor(shape, lambda: torch.empty(shape, dtype=dtype))
    return StoredTensor(
        shape,
        lambda: torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + low).view(shape),
    )
