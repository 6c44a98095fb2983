"""Memory tiers of model states: the device, its host, or drives of its node.

ZeRO-Offload (Ren et al. 2021) keeps the optimizer states on the host and updates them there.
ZeRO-Infinity (Rajbhandari et al. 2021) keeps parameters there as well, and either on NVMe.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic_core import InitErrorDetails

from zsim.config_error import refusal
from zsim.strategy.config_table import Count, Flag, Fraction, Table, Whole


class MemoryTier(StrEnum):
    """Tiers of memory, from the fastest to the largest."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """How files are read and written; the defaults are those of DeepSpeed's `aio`.

    Attributes:
        block_bytes: bytes of one request to the drives.
        queue_depth: requests that a thread has in flight.
        threads: number of equal parts of a read or write, each on a separate thread.
        waves: a thread waits for all its requests in flight before it issues more.
    """

    block_bytes: int = 2**20
    queue_depth: int = 8
    threads: int = 1
    waves: bool = False


SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of `sub_group_size` (`runtime/zero/config.py`, 0.17)."""


class Offload(Table):
    """`[offload]`: memory tiers of zsim's own stages.

    Attributes:
        optimizer: tier of masters and moments. Beyond the device, gradients are copied to the host
            as they are reduced, and applied there: 2 bytes out and 2 back for each 16-bit parameter
            (Ren et al. 2021, section 3).
        gradients: with `optimizer = nvme`: tier of reduced gradients before the update. On NVMe
            they are written as they arrive, and read with the states of their sub-group.
        parameters: tier of the parameters' shards in stage 3, which are fetched before each gather.
        checkpoints: tier of the inputs of checkpointed units between forward and recompute (ZeRO-R
            Pa+cpu, Rajbhandari et al. 2020, section 6.1; on NVMe ZeRO-Infinity, section 5.1).
        sub_group_elements: with `optimizer = nvme`: elements of a rank that are read, updated and
            written together.
        pipeline_read: read the states of the next sub-group during an update.
        pipeline_write: write the states of the previous sub-group during an update.
        buffers: slots for the states of sub-groups; None for as many as the pipeline needs.
        device_share: with `optimizer = host`: the first buckets, up to this share of all trained
            elements, keep masters and moments on the device and are updated there (Twin-Flow of
            ZeRO-Offload++; DeepSpeed's `ratio` is the rest).
        delayed_update: with `optimizer = host`: apply the gradients of a step during the next one,
            so that every step computes with parameters one update old (ZeRO-Offload's one-step
            delayed parameter update, section 5.2).
        warm_up_steps: with `delayed_update`: number of first steps that update at once (40 in the
            paper).
        fetch_units: with `parameters` beyond the device: number of units by which copies to the
            device are ahead of the gather.
        read_units: with `parameters` or `checkpoints = nvme`: number of units by which reads are
            ahead of these copies.
        block_bytes, queue_depth, io_threads: how files are read and written, as in `FileAccess`.
    """

    optimizer: MemoryTier = MemoryTier.DEVICE
    gradients: MemoryTier = MemoryTier.HOST
    parameters: MemoryTier = MemoryTier.DEVICE
    checkpoints: MemoryTier = MemoryTier.DEVICE
    sub_group_elements: Count = SUB_GROUP_ELEMENTS
    pipeline_read: Flag = True
    pipeline_write: Flag = True
    buffers: Count | None = None
    device_share: Fraction = 0.0
    delayed_update: Flag = False
    warm_up_steps: Whole = 0
    fetch_units: Whole = 1
    read_units: Whole = 1
    block_bytes: Count = 2**20
    queue_depth: Count = 8
    io_threads: Count = 1

    @property
    def moves_states(self) -> bool:
        """True if the optimizer states or parameters leave the device, which needs host threads."""
        return {self.optimizer, self.parameters} != {MemoryTier.DEVICE}

    @property
    def uses_host(self) -> bool:
        """True if model states or checkpoints leave the device."""
        return self.moves_states or self.checkpoints is not MemoryTier.DEVICE

    @property
    def uses_nvme(self) -> bool:
        """True if model states or checkpoints are kept on drives."""
        return MemoryTier.NVME in (self.optimizer, self.parameters, self.checkpoints)

    @property
    def file_access(self) -> FileAccess:
        """How files are read and written."""
        return FileAccess(
            block_bytes=self.block_bytes, queue_depth=self.queue_depth, threads=self.io_threads
        )

    @property
    def files_gradients(self) -> bool:
        """True if gradients are kept on drives until they are applied."""
        return self.gradients is MemoryTier.NVME

    @property
    def sets(self) -> int:
        """Number of sub-groups whose states are in host memory at once."""
        return 1 + self.pipeline_read + self.pipeline_write

    def contradictions(
        self,
        *,
        stage: int,
        emulates: bool,
        pipeline: int,
        moments: int,
        has_groups: bool,
        of_runtime: str = "",
    ) -> Iterator[InitErrorDetails]:
        """Yield conflicts with the rest of a strategy, or between keys of this table.

        `of_runtime` is the key with which the emulated runtime moves checkpoints.
        """
        for name in ("optimizer", "parameters", "checkpoints"):
            tier = getattr(self, name)
            if tier is MemoryTier.DEVICE:
                continue
            if emulates:
                why = "is for zsim's own stages; with emulate it stays at device"
                if name == "checkpoints" and of_runtime:
                    why += f", and {of_runtime} = true moves checkpoints"
                yield refusal(f"offload.{name}", tier, why)
            elif pipeline > 1:
                yield refusal(f"offload.{name}", tier, f"is not modelled for pipeline = {pipeline}")
        yield from self._against_tiers(stage=stage, has_groups=has_groups)
        if self.device_share:
            yield from self._against_share()
        yield from self._against_delay()
        needed = self.sets * (1 + moments + self.files_gradients)
        if self.buffers is not None and self.buffers < needed:
            kept = f"a master and {moments} moments"
            kept = f"a gradient, {kept}" if self.files_gradients else kept
            why = f"must be at least {needed}: {self.sets} sub-groups at once with {kept} each"
            yield refusal("offload.buffers", self.buffers, why)

    def _against_tiers(self, *, stage: int, has_groups: bool) -> Iterator[InitErrorDetails]:
        if self.parameters is not MemoryTier.DEVICE and stage != 3:
            why = f"is for stage 3, in stage {stage} every rank holds all parameters"
            yield refusal("offload.parameters", self.parameters, why)
        if self.parameters is not MemoryTier.DEVICE and self.optimizer is MemoryTier.DEVICE:
            why = "needs an optimizer that is on the host too: optimizer = host or nvme"
            yield refusal("offload.parameters", self.parameters, why)
        if self.optimizer is MemoryTier.NVME and has_groups:
            why = "is not modelled with groups of parameters; optimizer = host is"
            yield refusal("offload.optimizer", self.optimizer, why)
        if self.gradients is MemoryTier.DEVICE:
            why = "must be host or nvme: where the optimizer is on the device, so are gradients"
            yield refusal("offload.gradients", self.gradients, why)
        if self.files_gradients and self.optimizer is not MemoryTier.NVME:
            yield refusal("offload.gradients", self.gradients, "needs optimizer = nvme")

    def _against_share(self) -> Iterator[InitErrorDetails]:
        name, share = "offload.device_share", self.device_share
        if self.optimizer is not MemoryTier.HOST:
            yield refusal(name, share, "needs optimizer = host, where the rest is updated")
        if self.parameters is not MemoryTier.DEVICE:
            why = f"is not modelled for parameters = {self.parameters}"
            yield refusal(name, share, why)
        if self.delayed_update:
            yield refusal(name, share, "is not modelled for delayed_update = true")

    def _against_delay(self) -> Iterator[InitErrorDetails]:
        name = "offload.delayed_update"
        if self.warm_up_steps and not self.delayed_update:
            why = "is for delayed_update = true"
            yield refusal("offload.warm_up_steps", self.warm_up_steps, why)
        if self.delayed_update and self.optimizer is not MemoryTier.HOST:
            why = "true needs optimizer = host: threads of the host update while the device goes on"
            yield refusal(name, None, why)
        if self.delayed_update and self.parameters is not MemoryTier.DEVICE:
            why = "true needs parameters = device: forward would fetch what is being updated"
            yield refusal(name, None, why)
