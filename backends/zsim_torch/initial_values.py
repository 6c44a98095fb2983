"""Values that a training begins with: the module's own, given by name, made, or stored."""

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
    """Give parameters by name inside, None where they are the module's own.

    Stored buffers are put into the module; after an error inside they are as they were.

    Raises:
        RefusedError: one cannot be made; the line names it.
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
    """Put stored values into the buffers that a state of `module` has; back after an error."""
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
    """Return the stored values that `initial` names, None if it names no folder.

    Raises:
        CheckpointError: the folder cannot be read, or is of another model.
    """
    how = initial if isinstance(initial, Initializer) else Initializer()
    folder = how.stored if how is initial else initial
    if not isinstance(folder, str | PathLike):
        return None
    made: StoredValues = import_module(STORED).StoredValues(Path(folder), module, how.ignore)
    return made
