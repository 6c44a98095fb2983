"""Libraries that exchange tokens of expert ranks in place of NCCL's all-to-all."""

from dataclasses import dataclass
from enum import StrEnum


class DispatchLibrary(StrEnum):
    """Libraries of `--moe-flex-dispatcher-backend`."""

    DEEPEP = "deepep"
    """DeepEP 1.x, normal kernels: a token crosses once to each node, on the rail of its GPU, and
    goes from there once to each GPU."""
    HYBRIDEP = "hybridep"
    """HybridEP, the branch hybrid-ep of DeepEP: the same with TMA copies, in fewer blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDispatch:
    """A library, and the multiprocessors that its kernels occupy."""

    library: DispatchLibrary
    num_sms: int
