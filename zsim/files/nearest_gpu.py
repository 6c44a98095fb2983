"""Constants of the nearest measured GPU, for a GPU that is known only from its data sheet."""

from collections.abc import Iterable
from functools import cache

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import Part
from zsim.cluster.files.gpu import GpuTable
from zsim.cluster.files.table import read
from zsim.cluster.foreign_profile import is_for
from zsim.cluster.profile.kernels import KernelProfile, KernelProfileError
from zsim.dtype import DType
from zsim.files.installed import (
    find,
    first_gpu,
    fitted_for,
    fitted_kernels,
    is_alike,
    network_profiles,
    part_names,
    profile_age,
    topology,
    usual_nodes,
)
from zsim.suggestion import one_of


def borrowed_for(cluster: Cluster) -> tuple[str, ...]:
    """Return settings that give an unmeasured `cluster` constants of the nearest measured GPU.

    Constants are fractions of peaks and bandwidths, so they scale with the data sheet. The nearest
    GPU is one of the same name without the words of a card, as H100-SXM5 for H100-PCIe; else the
    one that its file names; else the GPU that a form selects at first. Of several profiles the
    latest counts. See `scaled_for` for a GPU with published achieved rates.

    Raises:
        ClusterError: the GPU names an unknown kind as its nearest.
    """
    has_kernels = any(each.startswith("compute.profile=") for each in fitted_for(cluster))
    if has_kernels or cluster.gpu.measured is not None or cluster.gpu.kernels is not None:
        return ()
    own = {each.partition("=")[0] for each in fitted_for(cluster)}
    if cluster.network is not None or cluster.over_pcie:  # constants of links are shares of NVLink
        own.add("network.profile")
    gpus = [gpu for gpu in part_names(Part.GPU) if _named(gpu) == cluster.gpu.name]
    found = dict(_profiles_of(cluster.gpu.nearest))
    parts = set(cluster.gpu.name.lower().split("-"))
    every: dict[str, Iterable[str]] = {
        "compute.profile": fitted_kernels(),
        "network.profile": network_profiles(),
    }
    for key, names in every.items():
        if alike := [name for name in names if is_alike(name, parts)]:
            found[key] = max(alike, key=profile_age)
    if gpus and _achieved_share(gpus[0]) is not None:
        found["compute.profile"] += f"/{gpus[0]}"
    return tuple(f"{key}={name}" for key, name in found.items() if key not in own)


@cache
def _profiles_of(kind: str | None) -> tuple[tuple[str, str], ...]:
    """Return key and name of the fitted constants of a kind of GPU; None is a form's first one.

    Raises:
        ClusterError: the kind is unknown.
    """
    known = usual_nodes()
    if kind is not None and kind not in known:
        raise ClusterError(f"gpu.nearest: {one_of(kind, known)}")
    node = known[kind or first_gpu()][0]
    settings = fitted_for(topology(node, "single_switch", 1))
    return tuple((key, name) for key, _, name in (each.partition("=") for each in settings))


def kernel_profile(name: str) -> KernelProfile:
    """Return the fitted constants of kernels called `name`: of a kind of GPU, or PROFILE/GPU.

    Raises:
        KernelProfileError: there are none; the message lists the installed names.
    """
    known = fitted_kernels()
    profile, _, gpu = name.partition("/")
    if profile not in known:
        raise KernelProfileError(one_of(profile, known))
    if not gpu:
        return known[profile].constants
    return scaled_for(known[profile].constants, profile, gpu)


def scaled_for(constants: KernelProfile, profile: str, gpu: str) -> KernelProfile:
    """Return `constants` of the profile for a GPU whose largest achieved product rate is published.

    Products and attention reach a smaller fraction of its peak if that rate is a smaller fraction
    than on the GPU of the profile.

    Raises:
        KernelProfileError: the GPU is unknown; the message lists the installed names.
    """
    if gpu not in part_names(Part.GPU):
        raise KernelProfileError(one_of(gpu, part_names(Part.GPU)))
    share = _achieved_share(gpu)
    own = (_achieved_share(each) for each in part_names(Part.GPU) if is_for(profile, _named(each)))
    fitted = next((each for each in own if each is not None), None)
    if share is None or fitted is None:
        return constants
    return constants.with_matrix_share(min(1.0, share / fitted))


@cache
def _gpu_table(gpu: str) -> GpuTable:
    return read(GpuTable, gpu, find(Part.GPU, gpu))


def _named(gpu: str) -> str:
    return _gpu_table(gpu).name


def _achieved_share(gpu: str) -> float | None:
    """Return the largest achieved fraction of the 16-bit peak of a GPU that ships, if published."""
    rates = _gpu_table(gpu).rates
    half = rates.get(DType.BF16, rates.get(DType.FP16))
    return None if half is None or half.matmul is None else half.matmul / half.peak
