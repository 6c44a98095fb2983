"""Values that a training begins with: the module's own, given by name, made, or stored."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from zsim.backend.backend import RefusedError
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.module.initializer import Initializer, MadeValues, fill_buffers, put_buffer
from zsim_torch.module.unit import TorchUnit

if TYPE_CHECKING:
    from zsim_torch.checkpoint.stored_values import StoredValues

InitialValues = Initial | Initializer | str | PathLike[str]
"""A function of a parameter's name, a way to make values, or a folder that has them."""

STORED = "zsim_torch.checkpoint.stored_values"
"""Imported when a folder is given: torch needs a second for what reads checkpoints."""


def need_buffers(module: nn.Module, initial: InitialValues | None) -> None:
    """Give buffers of `module` that are on "meta" their values.

    Raises:
        RefusedError: one has none; the line names it.
        CheckpointError: the folder cannot be read, or is of another model.
    """
    if not any(each.is_meta for each in module.buffers()):
        return
    folder = _folder_of(initial)
    if folder is not None:
        stored = _stored(module, folder)
        for name, each in list(module.named_buffers()):
            value = stored.buffer(name, each) if each.is_meta else None
            if value is not None:
                put_buffer(module, each, value)
    if isinstance(initial, Initializer):
        fill_buffers(module, initial)
    for name, each in module.named_buffers():
        if each.is_meta:
            raise RefusedError(
                f'buffer {name}: it has no values (device "meta"); build the module with its '
                "buffers in memory, or say Option(initial=Initializer(...))"
            )


def _folder_of(initial: InitialValues | None) -> str | PathLike[str] | None:
    if isinstance(initial, Initializer):
        return initial.stored
    return initial if isinstance(initial, str | PathLike) else None


@contextmanager
def initial_values(
    module: nn.Module, units: Sequence[TorchUnit], initial: InitialValues | None
) -> Generator[Initial | None]:
    """Give parameters by name inside, None where they are the module's own.

    Raises:
        RefusedError: one cannot be made; the line names it.
        CheckpointError: the folder cannot be read, or is of another model.
    """
    folder = _folder_of(initial)
    made: MadeValues | StoredValues
    if folder is not None:
        made = _stored(module, folder)
    elif isinstance(initial, Initializer):
        made = MadeValues(module, [unit.module for unit in units], initial)
    else:
        assert not isinstance(initial, str | PathLike)
        yield initial
        return
    try:
        yield made
    finally:
        made.forget()


def _stored(module: nn.Module, folder: str | PathLike[str]) -> "StoredValues":
    made: StoredValues = import_module(STORED).StoredValues(Path(folder), module)
    return made
