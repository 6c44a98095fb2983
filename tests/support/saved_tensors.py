"""Tensors of a checkpoint, as torch reads it on its own."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(each.size, dtype=each.properties.dtype)
        for name, each in there.items()
        if name.startswith(("model.", "optim.")) and isinstance(each, TensorStorageMetadata)
    }
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        load(found, checkpoint_id=folder, no_dist=True)
    return found


def assert_same_checkpoint(one: Path, other: Path, *, parameters: int) -> None:
    """Check that both have equal parameters, two moments and a step of each."""
    first, second = tensors_in(one), tensors_in(other)
    assert first.keys() == second.keys()
    assert len(first) == parameters * 4
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def damage(folder: Path, key: str) -> None:
    """Overwrite the values that a checkpoint in one file has of `key`."""
    places = FileSystemReader(folder).read_metadata().storage_data
    (place,) = [each for index, each in places.items() if index.fqn == key]
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset : place.offset + place.length] = bytes(place.length)
    path.write_bytes(data)
