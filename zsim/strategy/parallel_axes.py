"""Mesh axes over which a model is parallelized."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic_core import InitErrorDetails

from zsim.config_error import refusal
from zsim.strategy.config_table import Count, Table
from zsim.strategy.execution import ContextExchange
from zsim.strategy.runtime_options import RuntimeOptions


class ParallelAxes(Table):
    """Keys of `[parallel]` that files and `Strategy` have in common.

    Attributes:
        tensor: ranks of the tensor axis, inside units (Shoeybi et al. 2019, section 3).
        context: ranks of the data axis that share each sequence (Liu et al. 2023).
        context_exchange: how they exchange keys and values; None for the runtime's default.
        pipeline: stages that the units are split over, each on separate ranks (Narayanan et al.
            2021, section 2.2).
        expert: ranks that different experts are distributed over (Lepikhin et al. 2020), taken from
            the data, context and tensor ranks of a replica.
        expert_tensor: ranks that hold parts of the same experts; None for the value of `tensor`,
            the default of Megatron-LM, or for 1 if the runtime does not shard experts.
        replicate: replicas of the sharded model states, each with different data: gradients are
            reduced over the data axis, then over the replicas (hybrid sharding, Zhao et al. 2023,
            section 3.2.2; MiCS, Zhang et al. 2022).
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"expert"})
    """Fields that schedule files leave out at their default, as they did before these existed."""

    tensor: Count = 1
    context: Count = 1
    context_exchange: ContextExchange | None = None
    pipeline: Count = 1
    expert: Count = 1
    expert_tensor: Count | None = None
    replicate: Count = 1

    def exchange(self, runtime: RuntimeOptions | None) -> ContextExchange:
        """Return the exchange of keys and values; `runtime` sets the default."""
        default = ContextExchange.ALL_GATHER if runtime is None else runtime.context_exchange
        return self.context_exchange or default

    def expert_shards(self, runtime: RuntimeOptions | None) -> int:
        """Return the ranks that hold parts of the same experts; `runtime` sets the default."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        whole = runtime is not None and not runtime.shards_experts and self.expert > 1
        return 1 if whole else self.tensor

    def against_context(
        self, data: int, inner: tuple[str, int | None]
    ) -> Iterator[InitErrorDetails]:
        """Yield errors of the context degree for `data` ranks.

        `inner` is the option that splits the data axis otherwise, and its inner ranks or None.
        """
        name, ranks = inner
        if data % self.context:
            yield refusal("parallel.context", self.context, f"must divide data = {data}")
        if ranks is not None and self.context > 1:
            why = f"is not modelled with zero.{name} = {ranks}"
            yield refusal("parallel.context", self.context, why)

    def against_tiles(self, tiles: int) -> Iterator[InitErrorDetails]:
        """Yield errors of axes that are not modeled for linear layers in tiles."""
        if self.context > 1:
            yield refusal("zero.tiles", tiles, f"is not modelled for context = {self.context}")
