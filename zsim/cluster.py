"""What a schedule runs on: GPUs, the links between them, how many of each. A value, not a graph."""

from dataclasses import dataclass

from zsim.dtype import DType


class ClusterError(ValueError):
    """A cluster that cannot exist; the message starts with the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Operations per second that kernels of one format reach.

    `peak` is the vendor's number, for utilisation; `matmul` and `elementwise` are what kernels are
    predicted to reach.
    """

    dtype: DType
    peak: int
    matmul: int
    elementwise: int

    def __post_init__(self) -> None:
        for name in ("peak", "matmul", "elementwise"):
            if getattr(self, name) < 1:
                raise ClusterError(f"rate of {self.dtype}: {name} must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator: memory, its bandwidth, and rates by format."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: int
    rates: tuple[Rate, ...]
    launch_ps: int = 0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ClusterError(f"gpu {self.name}: {name} must be more than 0")
        if self.launch_ps < 0:
            raise ClusterError(f"gpu {self.name}: launch_ps {self.launch_ps} must be at least 0")

    def rate(self, dtype: DType) -> Rate:
        """Rates of `dtype`.

        Raises:
            ClusterError: the GPU has none for it.
        """
        for rate in self.rates:
            if rate.dtype is dtype:
                return rate
        known = ", ".join(rate.dtype for rate in self.rates)
        raise ClusterError(f"gpu {self.name}: no rate for {dtype}, it has {known or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link, per direction: bytes per second and latency of one hop."""

    bytes_per_s: int
    latency_ps: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_ps < 0:
            raise ClusterError("link: bandwidth must be more than 0 and latency at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs. GPUs of a node meet on a switch; nodes meet on another.

    Attributes:
        switch_link: from a GPU to the switch of its node (NVLink to NVSwitch).
        nic_link: from a node's switch to the network, one of `nics_per_node`.
        cites: where each number comes from, by key.
    """

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    switch_link: Link
    nics_per_node: int
    nic_link: Link
    cites: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise ClusterError(f"{name}: {getattr(self, name)} must be at least 1")

    @property
    def ranks(self) -> int:
        """GPUs in the cluster."""
        return self.nodes * self.gpus_per_node
