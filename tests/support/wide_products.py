"""A model of wide products, GPUs that run them, and traces of both."""

from dataclasses import replace
from fractions import Fraction

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.compute.roofline import kernel_ps
from zsim.files.installed import topology
from zsim.model.architecture import Llama
from zsim.model.kernel import FusedPart, Kernel
from zsim.schedule.operation import Compute
from zsim.trace.trace import Event, Trace
from zsim_des.simulation import SimBackend

WIDE = Llama(layers=2, hidden_size=1024, attention_heads=8, sequence_length=2048, vocab_size=512)


def cluster(*, links: float = 1.0, share: float = 0.0) -> Cluster:
    """One node whose GPUs have links so many times as fast, kernels that give way so much."""
    found = topology("dgx_a100_infiniband", None, 1)
    link = found.switch_link
    faster = replace(link, bytes_per_s=int(link.bytes_per_s * links))
    return replace(
        found, switch_link=faster, gpu=replace(found.gpu, collective_share=Fraction(share))
    )


def run(of: Job) -> Trace:
    return SimBackend().run(of, seed=0)


def events(trace: Trace) -> dict[str, Event]:
    return {each.operation: each for each in trace.ranks[0].events}


def kernels_of(of: Job, product: str) -> tuple[Kernel, ...]:
    """Return the kernels of the `Compute` with this id."""
    step = of.schedule.programs[0].step
    return next(each for each in step if isinstance(each, Compute) and each.id == product).kernels


def before_ps(of: Job, product: str, part: FusedPart, *, after: bool = False) -> int:
    """Return the time of the kernels before those of a part, or up to their end."""
    found = kernels_of(of, product)
    places = [place for place, each in enumerate(found) if each.part is part]
    end = places[-1] + 1 if after else places[0]
    return sum(kernel_ps(each, of.cluster.gpu) for each in found[:end])
