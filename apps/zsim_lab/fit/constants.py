"""The fitted constants: start of the search, bounds, and which ones a system may change.

Constants of the GPU, its links and the algorithms are shared by all its systems. The only
exceptions of a system are its host (launch time), its fabric, and constants that differ between
software releases (how fast kernels add and copy, and how well the reducing switch is used).
"""

from collections.abc import Mapping
from math import log

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.constant import TENSOR_WAIT_S
from zsim.network.algorithm.installed_algorithms import constants

START = NetworkProfile(
    {
        "launch_s": 35e-6,
        "pair_s": 4e-6,
        "base_s": 6e-6,
        "ll_hop_s": 1e-6,
        "ll128_hop_s": 1.5e-6,
        "simple_hop_s": 3e-6,
        "nvls_hop_s": 8e-6,
        "far_base_s": 20e-6,
        "far_hop_s": 6e-6,
        "link": 0.85,
        "ll": 0.25,
        "ll128": 0.8,
        "tree": 0.85,
        "direct": 0.8,
        "channel": 0.045,
        "spread": 0.03,
        "nvls": 0.68,
        "nvls_choice": 0.64,
        "nic": 0.9,
        "copy": 2.0,
        "add": 2.0,
        "fill_s": 350e-6,
        "fill_bytes": 2e9,
        "nvls_fill_s": 8e-6,
        "nvls_fill_bytes": 20e6,
        "direct_fill_s": 40e-6,
        "direct_fill_bytes": 16e6,
        "far_fill_s": 50e-6,
        "far_fill_bytes": 64e6,
        **{
            each.name: each.default
            for each in constants()
            if each.default is not None and each is not TENSOR_WAIT_S
        },
        "congestion": 0.1,
    }
)
"""Start of a search, similar to the assumptions of NCCL's tuner; rows move the constants they
determine.

An algorithm of another package starts from the defaults of its constants."""

IN_TRAINING: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("h100", "aws_p5"): {TENSOR_WAIT_S.name: 42e-6},
}
"""Constants that no benchmark of collectives determines, by GPU and system.

The wait of tensor ranks is from the Ultra-Scale Playbook's sweep on AWS p5: errors of the rows of
3B without a pipeline, with tensor 16 and 32, are smallest with 42 us."""

IN_TRAINING_REST_ON = ("Ultra-Scale Playbook",)
"""Short names of the publications of these constants."""

CHOICES = (0.64, 0.6125, 0.69)
"""Values of nvls_choice: from 5, from 6 or from 4 ranks on."""

HOST = ("launch_s", "pair_s", "base_s")
SCALE = ("nic", "far_hop_s", "congestion")
"""Constants of collectives on many nodes; a system known only by single values on many nodes
differs in no others."""
FABRIC = ("far_base_s", "far_fill_s", "far_fill_bytes", *SCALE)
SOFTWARE = ("nvls", "copy", "add")
EXCEPTIONS = frozenset({*HOST, *FABRIC, *SOFTWARE})
"""Constants that a system may change if its measurements determine them."""

RACK_NIC = 0.2
"""Start of the search for `nic` if a rack is one node: few channels do not saturate its NICs."""

_BOUNDS = (
    ("fill_s", (1e-6, 1e-2)),
    ("_bytes", (1e5, 1e11)),
    ("launch_s", (2e-6, 1e-4)),
    ("pair_s", (1e-7, 5e-5)),
    ("far_base_s", (1e-6, 1e-3)),
    ("far_hop_s", (1e-6, 1e-3)),
    ("base_s", (1e-6, 1e-4)),
    ("hop_s", (1e-7, 2e-5)),
    ("ll128", (0.3, 0.95)),  # 1 of 16 words is a flag
    ("ll", (0.05, 0.5)),  # 1 of 2 is
    ("channel", (0.01, 0.2)),
    ("spread", (0.001, 0.2)),
    ("congestion", (1e-3, 1.0)),
    ("nic", (0.5, 1.0)),
    ("copy", (0.8, 10.0)),
    ("add", (0.8, 10.0)),
    ("", (0.4, 1.0)),  # the other fractions of the link
)


def searched(start: NetworkProfile) -> list[str]:
    """Return the constants to search from `start`; constants of missing hardware stay 0."""
    return [name for name, value in start.numbers.items() if name != "nvls_choice" and value]


def bounds(name: str, start: NetworkProfile) -> tuple[float, float]:
    """Return the logarithms of the minimum and maximum of a constant, by the suffix of its name."""
    low, high = next(limits for end, limits in _BOUNDS if name.endswith(end))
    if name == "nic" and start["nic"] < low:  # a rack, see RACK_NIC
        low = RACK_NIC / 4
    return log(low), log(high)
