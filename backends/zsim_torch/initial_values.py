"""Initial values of a training: the module's own, given by name, initialized, or stored."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zsim.backend.backend import RefusedError
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.module.initializer import Initializer, MadeValues, fill_buffers, put_buffer
from zsim_torch.module.unit import TorchUnit

if TYPE_CHECKING:
    from zsim_torch.checkpoint.stored_values import StoredValues

InitialValues = Initial | Initializer | str | PathLike[str]
"""A function from a parameter's name to its value, an `Initializer`, or the path of a folder."""

STORED = "zsim_torch.checkpoint.stored_values"
"""Imported only for stored values: torch's checkpoint modules take a second to import."""


def need_buffers(module: nn.Module, initial: InitialValues | None) -> None:
    """Load or initialize the buffers of `module` that are on "meta".

    Raises:
        RefusedError: a buffer has no value; the message names it.
        CheckpointError: the folder cannot be read, or is of another model.
    """
    if not any(each.is_meta for each in module.buffers()):
        return
    stored = _stored(module, initial)
    if stored is not None:
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


@contextmanager
def initial_values(
    module: nn.Module, units: Sequence[TorchUnit], initial: InitialValues | None
) -> Generator[Initial | None]:
    """Return a context that yields parameters by name, or None for the module's own values.

    Stored buffers are copied to the module; if the block raises, they are restored.

    Raises:
        RefusedError: a value cannot be computed; the message names it.
        CheckpointError: the folder cannot be read, or is of another model.
    """
    stored = _stored(module, initial)
    made: MadeValues | StoredValues
    if stored is not None:
        made = stored
    elif isinstance(initial, Initializer):
        made = MadeValues(module, [unit.module for unit in units], initial)
    else:
        assert not isinstance(initial, str | PathLike)
        yield initial
        return
    try:
        with _stored_buffers(module, stored):
            yield made
    finally:
        made.forget()


@contextmanager
def _stored_buffers(module: nn.Module, stored: "StoredValues | None") -> Generator[None]:
    """Copy stored values to the persistent buffers of `module`; restore them after an error."""
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = [
        (buffer, value)
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if stored is not None and name in persistent
        if (value := stored.buffer(name, buffer)) is not None
    ]
    before = [(buffer, buffer.clone()) for buffer, _ in buffers]
    try:
        _put(buffers)
        yield
    except BaseException:
        _put(before)
        raise


@torch.no_grad()
def _put(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in values:
        buffer.copy_(value)


def _stored(module: nn.Module, initial: InitialValues | None) -> "StoredValues | None":
    """Return the stored values that `initial` refers to, or None if it names no folder.

    Raises:
        CheckpointError: the folder cannot be read, or is of another model.
    """
    how = initial if isinstance(initial, Initializer) else Initializer()
    folder = how.stored if how is initial else initial
    if not isinstance(folder, str | PathLike):
        return None
    made: StoredValues = import_module(STORED).StoredValues(Path(folder), module, how.ignore)
    return made
