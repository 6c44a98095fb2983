"""Fitted constants of one kind of GPU on a cluster of another, by their names.

Shares of a peak or of a bandwidth that one GPU reaches say little of another. Nothing prevents it,
since people name their GPUs freely: whoever states how far to trust a prediction asks here first.
"""

import re

from zsim.cluster.cluster import Cluster

SOFTWARE_WORDS = ("timed",)
"""Parts of profile names that name software or a measurement; years count too."""


CARD_WORDS = frozenset(("pcie", "nvl"))
"""Parts of GPU names that name a card: its clocks, memory and links are not those of the module."""


def is_for(profile: str, gpu: str) -> bool:
    """Return True if the constants called `profile` are of the GPU called `gpu`.

    Its name has all parts of theirs: h100_hbm2e is for H100-SXM5-96GB-HBM2e; h100/aws_p5 names a
    system after the GPU. Constants of a module are not for a card: h100 is not for H100-PCIe-80GB.
    """
    there = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    kind, _, _ = profile.lower().partition("/")
    parts = kind.split("_")
    if not CARD_WORDS & there <= set(parts):
        return False
    return all(part in there or part.isdigit() or part in SOFTWARE_WORDS for part in parts)


def foreign_profiles(cluster: Cluster) -> dict[str, str]:
    """Return constants of `cluster` that are of other GPUs: their names, by key of a scenario.

    Measured times replace constants, so a measured GPU has none. Constants without a name come from
    nowhere in particular.
    """
    gpu = cluster.gpu
    if gpu.measured is not None:
        return {}
    given = {
        "compute.profile": "" if gpu.kernels is None else gpu.kernels.gpu,
        "network.profile": "" if cluster.network is None else cluster.network.name,
    }
    return {key: name for key, name in given.items() if name and not is_for(name, gpu.name)}


def foreign_words(cluster: Cluster) -> str:
    """Return a sentence that names the constants of other GPUs in `cluster`, or an empty one."""
    found = foreign_profiles(cluster)
    if not found:
        return ""
    which = " and ".join(f"{key} = {name}" for key, name in found.items())
    return f"GPU {cluster.gpu.name} ({which} {'is' if len(found) == 1 else 'are'} of another GPU)"
