"""The band of a step time: the same run where its fabric is as fast, and as slow, as was measured.

A fabric with a name has its own band. Of another nobody knows how congested it is, so its band
reaches from the least to the most congested fabric that has a name (`zsim.network.band`).
"""

from dataclasses import replace

from zsim.backend.backend import Backend, Job
from zsim.files.installed import network_band

WIDE = 1.05
"""Slowest over fastest step from which the answer in words has the band."""


def step_time_band_s(job: Job, simulation: Backend) -> tuple[float, float] | None:
    """Return the seconds of the fastest and of the slowest step, as simulated.

    None if the run is on one node, or if its collectives take no fitted constants.
    """
    node = job.cluster.gpus_per_node * job.cluster.nodes_per_domain
    found = network_band(job.cluster.network) if job.schedule.mesh.size > node else None
    if found is None:
        return None
    from zsim.api.forecast import last_step_s

    ends = (replace(job, cluster=replace(job.cluster, network=each)) for each in found)
    fast_s, slow_s = sorted(last_step_s(each, simulation) for each in ends)
    return fast_s, slow_s
