"""The band of a step time: the run on the fastest and on the slowest measured state of its fabric.

A named fabric has its own band. The congestion of other fabrics is unknown, so their band
reaches from the least to the most congested named fabric (`zsim.network.band`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from zsim.backend.backend import Backend, Job, UnsteadyError
from zsim.files.installed import network_band

if TYPE_CHECKING:
    from zsim.api.pipeline_fold import MicroBatchFold

WIDE = 1.05
"""Minimum ratio of slowest to fastest step at which the text shows the band."""


def step_time_band_s(
    job: Job, simulation: Backend, fold: "MicroBatchFold | None" = None
) -> tuple[float, float] | None:
    """Return the seconds of the fastest and of the slowest step, as simulated.

    None if the run is on one node, or if its network has no fitted constants. Also None if a step
    with `fold` has no period there.
    """
    node = job.cluster.gpus_per_node * job.cluster.nodes_per_domain
    found = network_band(job.cluster.network) if job.schedule.mesh.size > node else None
    if found is None:
        return None
    from zsim.api.forecast import last_step_s

    ends = (replace(job, cluster=replace(job.cluster, network=each)) for each in found)
    seconds = last_step_s if fold is None else fold.last_step_s
    try:
        fast_s, slow_s = sorted(seconds(each, simulation) for each in ends)
    except UnsteadyError:
        return None
    return fast_s, slow_s
