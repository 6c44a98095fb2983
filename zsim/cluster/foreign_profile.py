"""Detect constants fitted to one kind of GPU on a cluster with another GPU, by their names.

Fractions of a peak or bandwidth on one GPU do not transfer well to another. zsim allows them, since
users name their GPUs freely; code that reports the error of a prediction checks for them here.
"""

import re

from zsim.cluster.cluster import Cluster

SOFTWARE_WORDS = ("timed", "nemo")
"""Parts of profile names that refer to software or a measurement; years count, too."""


CARD_WORDS = frozenset(("pcie", "nvl"))
"""Parts of GPU names of PCIe cards, whose clocks, memory and links differ from the module's."""


def is_for(profile: str, gpu: str) -> bool:
    """Return True if the constants called `profile` are for the GPU called `gpu`.

    The name of the GPU must contain all parts of the profile's: h100_hbm2e is for
    H100-SXM5-96GB-HBM2e. A system after a slash is ignored, as in h100/aws_p5. Constants of a
    module are not for a card: h100 is not for H100-PCIe-80GB.
    """
    there = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    kind, _, _ = profile.lower().partition("/")
    parts = kind.split("_")
    if not CARD_WORDS & there <= set(parts):
        return False
    return all(part in there or part.isdigit() or part in SOFTWARE_WORDS for part in parts)


def foreign_profiles(cluster: Cluster) -> dict[str, str]:
    """Return the constants of `cluster` that were fitted to other GPUs: names by scenario key.

    A measured GPU has none, since measured times replace constants. Constants without a name are
    not reported.
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


def efficiency_words(kernels: str, gpu: str) -> str:
    """Return a sentence on the constants called `kernels` if the GPU `gpu` is another; else ""."""
    if not kernels or is_for(kernels, gpu):
        return ""
    kind = re.split("[_/]", kernels)[0].upper()
    return (
        f"data sheet only: kernels as efficient as on {kind}, scaled to the data sheet; "
        f"not measured on {gpu}"
    )
