"""Data sheets of the hardware in published measurements: nominal bandwidths, never fitted.

A row names its hardware in free text. This module parses that text and knows the hardware.
"""

import re
from dataclasses import dataclass

GB = 10**9

UNNAMED = "unnamed"
"""Name of a GPU that a source does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of GPU in its usual node. Bandwidths are bytes per second, per direction.

    Attributes:
        domain: number of GPUs in one NVSwitch domain.
        nic_bytes_per_s: bandwidth of all NICs of such a domain, if the source names no other.
        reduces: True if the switch can reduce (third generation NVSwitch and later).
        nics: number of groups of these NICs, each for the GPUs nearest to it.
    """

    gpu_bytes_per_s: int
    domain: int
    nic_bytes_per_s: int
    reduces: bool
    nics: int = 8

    @property
    def is_rack(self) -> bool:
        """True if the domain spans many nodes."""
        return self.domain > 16


# NVLink: A100 600 GB/s in both directions together, H100, H200 and H20 900, B200 1800 (NVIDIA's
# data sheets of each). NICs of a node: DGX A100 8 x 200 Gb/s, DGX H100 and B200 8 x 400 Gb/s, GB200
# NVL72 one of 400 Gb/s per GPU, GB300 NVL72 of 800 Gb/s (NVIDIA's system user guides). Checked:
# the DGX B200 user guide, which lists 14.4 TB/s of NVLink for 8 GPUs and 8 NICs of 400 Gb/s; and
# for GB200 a system description in MLCommons' inference results v6.1, where each GPU has 18 links
# like B200, and each tray of 4 has four ConnectX-7. An unnamed GPU has 4 x 200 Gb/s: the only
# such publication reaches that with four ranks on each of four HDR nodes.
GPUS = {
    "gb300": Hardware(
        gpu_bytes_per_s=900 * GB, domain=72, nic_bytes_per_s=72 * 100 * GB, reduces=True, nics=72
    ),
    "gb200": Hardware(
        gpu_bytes_per_s=900 * GB, domain=72, nic_bytes_per_s=72 * 50 * GB, reduces=True, nics=72
    ),
    "b200": Hardware(gpu_bytes_per_s=900 * GB, domain=8, nic_bytes_per_s=400 * GB, reduces=True),
    "h200": Hardware(gpu_bytes_per_s=450 * GB, domain=8, nic_bytes_per_s=400 * GB, reduces=True),
    "h100": Hardware(gpu_bytes_per_s=450 * GB, domain=8, nic_bytes_per_s=400 * GB, reduces=True),
    "h20": Hardware(gpu_bytes_per_s=450 * GB, domain=8, nic_bytes_per_s=400 * GB, reduces=True),
    "a100": Hardware(gpu_bytes_per_s=300 * GB, domain=8, nic_bytes_per_s=200 * GB, reduces=False),
    "v100": Hardware(gpu_bytes_per_s=150 * GB, domain=16, nic_bytes_per_s=100 * GB, reduces=False),
    UNNAMED: Hardware(gpu_bytes_per_s=300 * GB, domain=8, nic_bytes_per_s=100 * GB, reduces=False),
}

# NICs of a node in clouds: AWS p4d and p4de 400 Gb/s, p5, p5en and p6-b200 3,200 Gb/s of EFA
# (AWS's pages of these instances); Google a3-megagpu-8g 1,600 Gb/s (its page of machine types);
# Azure ND A100 v4 8 x 200 Gb/s (its page of sizes). p5 under Kubernetes (EKS) is a separate system.
CLOUDS = (
    (r"p4de?\b", "aws_p4", 50 * GB),
    (r"p5en\b", "aws_p5en", 400 * GB),
    (r"p5\b.*\beks\b", "aws_p5_eks", 400 * GB),
    (r"p5\b", "aws_p5", 400 * GB),
    (r"p6", "aws_p6", 400 * GB),
    (r"a3-?mega", "gcp_a3mega", 200 * GB),
    (r"azure|nd96", "azure_nd", 200 * GB),
)

OWN_TRANSPORT = ("aws_", "gcp_")
"""Prefixes of systems without InfiniBand verbs: EFA, TCPXO."""


def gpu_in(text: str) -> str:
    """Return the kind of GPU in `text`: a key of GPUS, or "unnamed"."""
    found = [name for name in GPUS if re.search(rf"(?<![a-z0-9]){name}(?![0-9])", text.lower())]
    return found[0] if found else UNNAMED


def memory_gb_in(text: str) -> int | None:
    """Return the gigabytes of memory in a GPU's name ("H100 95.04GiB", "a100_80gb"), or None."""
    found = re.search(r"(\d+)(?:\.\d+)?[ _]?gi?b", text.lower())
    return None if found is None else int(found.group(1))


def system_in(text: str, otherwise: str, gpu: str) -> tuple[str, int]:
    """Return the cloud in `text`, else the words of `otherwise`; and a node's NIC bytes/s."""
    for pattern, name, nic_bytes_per_s in CLOUDS:
        if re.search(pattern, text.lower()):
            return name, nic_bytes_per_s
    words = re.findall(r"[a-z0-9]+", re.split(r"[,;(]", otherwise.lower())[0])
    return "_".join(words) or gpu, GPUS[gpu].nic_bytes_per_s


def uses_verbs(system: str, gpu: str) -> bool:
    """Return True if measurements on this system represent ordinary InfiniBand nodes.

    They do not if the cloud has its own transport, if the node is a rack, or if the data sheet of
    the NICs is unknown.
    """
    own = system.startswith(OWN_TRANSPORT)
    return not own and gpu != UNNAMED and not GPUS[gpu].is_rack
