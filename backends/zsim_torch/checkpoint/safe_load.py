"""Unpickle values and metadata of a checkpoint without running code that a file refers to.

Torch reads `.metadata` and every non-tensor value as plain pickles, which can run arbitrary code.
Here, metadata may refer to classes of `torch.distributed.checkpoint` only. Values may refer to
types that `torch.load(weights_only=True)` allows, and to NumPy's numbers and arrays, such as states
of its generators. `torch.serialization.add_safe_globals` allows more.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.serialization import (
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

METADATA: Final = ".metadata"

_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    # Torch 2.2 and earlier.
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"MEM_FORMAT_ENCODING", "TensorProperties"}
    ),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
}
"""Allowed names in metadata, by module; data types and paths are allowed, too."""

_PATHS: Final = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})
_PATH_MODULES: Final = frozenset({"pathlib", "pathlib._local"})


_NUMBERS: Final = "?bBhHiIlLqQefdFD"
"""Type codes of NumPy's numbers."""


class UnsafeError(ValueError):
    """A pickle refers to code."""

    def __init__(self, where: str, name: str) -> None:
        super().__init__(
            f"{where} has a {name}, which may run code; if you trust the file, allow it with "
            "torch.serialization.add_safe_globals"
        )


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows only the classes of metadata."""

    def find_class(self, module: str, name: str, /) -> Any:  # noqa: ANN401  (as the base has it)
        """Return the class or function of that name.

        Raises:
            UnsafeError: metadata does not need it.
        """
        if name in _NAMES.get(module, ()):
            return getattr(import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in _PATH_MODULES and name in _PATHS:
            return PurePosixPath
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        allowed = _allowed()
        if f"{module}.{name}" in allowed:
            return allowed[f"{module}.{name}"]
        raise UnsafeError(METADATA, f"{module}.{name}")


def _allowed() -> dict[str, Any]:
    """Return everything that the user has allowed torch to unpickle, by its full name."""
    return {
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}": (
            each[0] if isinstance(each, tuple) else each
        )
        for each in get_safe_globals()
    }


def load_metadata(file: IO[bytes]) -> Metadata:
    """Return the metadata in a file.

    Raises:
        UnsafeError: it refers to code.
        ValueError: it is not metadata of files in one folder.
    """
    found: object = _Unpickler(file).load()
    if not isinstance(found, Metadata) or not _is_valid(found):
        raise ValueError(f"{METADATA} is no metadata of torch.distributed.checkpoint")
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


def _is_valid(metadata: Metadata) -> bool:
    """Return True if each value has a valid type, and each file is in the metadata's folder."""
    kinds = vars(metadata).get("state_dict_metadata")
    files = vars(metadata).get("storage_data")
    if not isinstance(kinds, dict) or not isinstance(files, dict):
        return False
    known = TensorStorageMetadata | BytesStorageMetadata
    return all(isinstance(each, known) for each in kinds.values()) and all(
        _is_inside(getattr(each, "relative_path", None)) for each in files.values()
    )


def _is_inside(path: object) -> bool:
    return isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts


def load_value(packed: IO[bytes], where: str) -> Any:  # noqa: ANN401  (anything)
    """Return a value that torch has saved; `where` names it in errors.

    Raises:
        UnsafeError: it refers to code.
    """
    data = packed.read()
    # `safe_globals` removes its classes at exit, so those that the user allowed are not passed.
    more = [each for each in _of_numpy() if each not in get_safe_globals()]
    try:
        with safe_globals(more):
            return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        names = [each for each in _unsafe(data) if not each.startswith("numpy.")] or _unsafe(data)
        if not names:
            raise
        raise UnsafeError(where, names[0]) from error


def _of_numpy() -> list[Any]:
    """Return the classes and functions in pickles of NumPy's numbers and arrays."""
    functions: list[Any] = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [
        np.ndarray,
        np.dtype,
        *{type(np.dtype(each)) for each in _NUMBERS},
        *(
            (function, f"{module}.{function.__name__}")
            for function in functions
            for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        ),
    ]


def _unsafe(data: bytes) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError):  # not such a file
        return []
