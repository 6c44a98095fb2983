"""A training in a checkpoint: written and read as a whole, on any number of ranks."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.parameter_part import need_parts
from zsim_torch.checkpoint.rank_state import RankState, derivations, need_savable
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.generator_state import RandomState
from zsim_torch.optimizer_groups import RateGroups

STEP: Final = "step"
"""The host scalar with the number of updates."""


class Stateful(Protocol):
    """An object that a checkpoint holds beside the training: a scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take the state."""
        ...


class ReadPlan(NamedTuple):
    """Values to read of a checkpoint, by key; those that are no tensors are replaced."""

    folder: Path
    prefix: str
    values: dict[str, Any]
    beside: Mapping[str, Stateful]
    parameters_only: bool


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """Saves and loads what `state` has, and the numbers of the host, on this rank."""

    state: RankState
    groups: RateGroups
    executor: Executor

    @classmethod
    def of(
        cls,
        executor: Executor,
        module: nn.Module,
        groups: RateGroups,
        *,
        owners: Mapping[str, int],
    ) -> Self:
        """Return what saves and loads a training, which `executor` runs.

        `owners` has the rank that is believed in a buffer by its name, else that is 0.

        Raises:
            RefusedError: a step leaves something else to the next, or nothing says which parts of
                matrices a rank of the tensor axis has.
        """
        need_savable(executor.machine.program)
        need_parts(executor.machine.schedule, module)
        return cls(RankState(executor.machine, module, groups, owners), groups, executor)

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers of the host."""
        return self.executor.scalars

    def state_dict(self, steps_done: int, beside: Mapping[str, Stateful]) -> dict[str, Any]:
        """Return what a checkpoint has; tensors of which ranks hold parts have no memory here."""
        rank, ranks = _rank_of_ranks()
        random = RandomState.now()
        own = (
            {"cpu": random.cpu} if random.cuda is None else {"cpu": random.cpu, "cuda": random.cuda}
        )
        return {
            "model": self.state.model(rank),
            "optim": self.state.optimizer(self.scalars.get(STEP, steps_done)),
            "trainer": {"steps_done": steps_done, "ranks": ranks, "scalars": dict(self.scalars)},
            "generator": {str(rank): own},
            "beside": {name: _packed(each.state_dict()) for name, each in beside.items()},
        }

    def save(self, folder: Path, steps_done: int, beside: Mapping[str, Stateful]) -> None:
        """Write all of it as the checkpoint in `folder`; every rank calls it.

        Raises:
            CheckpointError: it cannot be written; what was in the folder is as it was.
        """
        checkpoint_folder.write(folder, self.state_dict(steps_done, beside))

    def plan(
        self, folder: Path, beside: Mapping[str, Stateful], *, parameters_only: bool
    ) -> ReadPlan:
        """Return what to read of a checkpoint; nothing is changed.

        Raises:
            CheckpointError: it is of another model, or has not all that is wanted.
        """
        metadata = checkpoint_folder.metadata_of(folder)
        wanted = self.state.wanted(metadata, folder, parameters_only=parameters_only)
        values: dict[str, Any] = {**wanted.tensors}
        if not parameters_only:
            values |= self._numbers(metadata, wanted.prefix)
        for name in beside:
            if f"beside.{name}" not in metadata.state_dict_metadata:
                raise CheckpointError(f"checkpoint {folder}: it has no {name}")
            values[f"beside.{name}"] = None
        return ReadPlan(folder, wanted.prefix, values, beside, parameters_only)

    def read(self, plan: ReadPlan) -> int:
        """Go on from a checkpoint, and return how many steps it has done; every rank calls it.

        Raises:
            CheckpointError: it cannot be read; what is trained may be of both.
        """
        found = plan.values
        checkpoint_folder.read(plan.folder, found)
        self.state.spread()
        self.executor.run_again(derivations(self.executor.machine.program))
        for name, each in plan.beside.items():
            # As pickle alone holds it: a scheduler's state may be of any type.
            packed = io.BytesIO(found[f"beside.{name}"])
            each.load_state_dict(torch.load(packed, weights_only=False))
        return 0 if plan.parameters_only else self._take(found, plan.prefix)

    def _numbers(self, metadata: Metadata, prefix: str) -> dict[str, Any]:
        """Return what else to read, by key; each is replaced by what is read."""
        rank, _ = _rank_of_ranks()
        there = metadata.state_dict_metadata
        kept = ("trainer.", f"generator.{rank}.", f"{prefix}optim.param_groups.")
        found: dict[str, Any] = {key: None for key in there if key.startswith(kept)}
        for key, each in there.items():
            if key in found and isinstance(each, TensorStorageMetadata):
                found[key] = torch.empty(each.size, dtype=each.properties.dtype)
        name = next(iter(self.state.parameters()))
        if f"{prefix}optim.state.{name}.step" in there:
            found[f"{prefix}optim.state.{name}.step"] = torch.zeros(())
        return found

    def _take(self, found: Mapping[str, Any], prefix: str) -> int:
        """Set numbers of the host, constants of the optimizer and generators as they were read."""
        rank, ranks = _rank_of_ranks()
        updates = next((each for key, each in found.items() if key.endswith(".step")), 0)
        if STEP in self.scalars:
            self.scalars[STEP] = float(updates)
        for name in self.scalars:
            self.scalars[name] = found.get(f"trainer.scalars.{name}", self.scalars[name])
        start = f"{prefix}optim.param_groups."
        for key, each in found.items():
            if key.startswith(start):
                number, _, name = key.removeprefix(start).partition(".")
                self.groups.restore(int(number), name, each)
        if found.get("trainer.ranks") == ranks and f"generator.{rank}.cpu" in found:
            RandomState(found[f"generator.{rank}.cpu"], found.get(f"generator.{rank}.cuda")).set()
        return int(found.get("trainer.steps_done", updates))


def _packed(state: dict[str, Any]) -> bytes:
    """Return a state as one value of a checkpoint, whatever it consists of."""
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _rank_of_ranks() -> tuple[int, int]:
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
