"""Match optimizer groups in a checkpoint to those of the training that loads it.

A schedule contains the constants of its updates, so a training keeps its own. A checkpoint with
different constants is refused, since its learning rates would be combined with another weight
decay.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.execute.optimizer_groups import CONSTANTS, OFF, RATE

SavedGroup = Mapping[str, Any]

_REMEDY: Final = (
    "give the optimizer its constants, or say keep_groups = True to go on with your own rates and "
    "constants"
)


def saved_groups(found: Mapping[str, Any], start: str) -> dict[str, dict[str, Any]]:
    """Return groups by number, from the values of a checkpoint whose keys start with `start`."""
    groups: dict[str, dict[str, Any]] = {}
    for key, each in found.items():
        if key.startswith(start):
            number, _, name = key.removeprefix(start).partition(".")
            groups.setdefault(number, {})[name] = each
    return groups


def matched(
    folder: Path,
    saved: Mapping[str, SavedGroup],
    own: Sequence[SavedGroup],
    fixed: Sequence[SavedGroup],
) -> list[SavedGroup]:
    """Return for each group in `own` the saved group with the same parameters.

    `fixed` has the constants of each group that later steps use.

    Raises:
        CheckpointError: the parameters of a group are in several saved groups, or constants differ.
    """
    places = {name: key for key, group in saved.items() for name in group.get("params") or ()}
    found: list[SavedGroup] = []
    for number, (group, kept) in enumerate(zip(own, fixed, strict=True)):
        keys = {places.get(name) for name in group["params"]}
        if len(keys) != 1 or None in keys:
            raise CheckpointError(
                f"checkpoint {folder}: optimizer: parameters of group {number} are in "
                f"{_groups_text(keys)} there; make the same groups, or say keep_groups = True"
            )
        other = saved[str(keys.pop())]
        _need_equal(folder, number, kept, other)
        found.append(other)
    return found


def _groups_text(keys: set[str | None]) -> str:
    known = sorted(key for key in keys if key is not None)
    return f"groups {' and '.join(known)}" if len(known) > 1 else "no one group"


def _need_equal(folder: Path, number: int, own: SavedGroup, saved: SavedGroup) -> None:
    """Raise CheckpointError unless the constants of a group equal the saved ones."""
    names = [*CONSTANTS, *OFF, *([RATE] if RATE in own else [])]
    if own.get("weight_decay") and not saved.get(DECOUPLED, True):
        names.append(DECOUPLED)
    for name in names:
        here, there = own.get(name), saved.get(name)
        if name in OFF:
            here, there = here or False, there or False
        if _plain(here) != _plain(there):
            raise CheckpointError(
                f"checkpoint {folder}: optimizer: {name} of group {number} is {_plain(there)} "
                f"there, {_plain(here)} here; {_REMEDY}"
            )


DECOUPLED: Final = "decoupled_weight_decay"


def _plain(value: object) -> object:
    """Return a constant as plain numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
