"""Notes on settings of a scenario: those without effect, and assumptions about the cluster."""

from collections.abc import Iterator
from dataclasses import replace

from zsim.cluster.cluster import Cluster
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Recomputed


def setting_notes(resolved: ResolvedScenario) -> Iterator[str]:
    """Yield a line for each setting that has no effect, and for each shared NIC."""
    yield from checkpointing_notes(resolved)
    yield from nic_notes(resolved.cluster)


def checkpointing_notes(resolved: ResolvedScenario) -> Iterator[str]:
    """Yield a line if selective checkpointing keeps the same activations as none."""
    strategy = resolved.strategy
    if strategy.activations.checkpointing is not Checkpointing.SELECTIVE:
        return
    activations = strategy.activations.model_copy(update={"checkpointing": Checkpointing.NONE})
    kept = strategy.model_copy(update={"activations": activations})
    without = replace(resolved, strategy=kept)
    if without.make_model().units == resolved.make_model().units:
        why = "flash attention always recomputes its scores"
        if strategy.recomputes != (Recomputed.ATTENTION,):
            why = f"no block has what {', '.join(strategy.recomputes)} would recompute"
        yield (
            f"activations.checkpointing: selective changes nothing: {why}; operations or full keep "
            "fewer activations"
        )


def nic_notes(cluster: Cluster) -> Iterator[str]:
    """Yield a line if GPUs cannot have equal parts of the NICs of their node."""
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    if cluster.nodes > 1 and gpus % nics and nics % gpus:
        yield (
            f"cluster.nics_per_node: {nics} NICs for {gpus} GPUs: collectives over nodes are "
            f"assumed to use all {nics} evenly, but no GPU has a NIC of its own; check that NCCL "
            "does"
        )
