"""Options of PyTorch's `DistributedDataParallel` (torch 2.13), under their names."""

from collections.abc import Iterator
from enum import StrEnum

from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag, Positive, Whole
from zsim.strategy.runtime_options import Formats, RuntimeOptions

MIB = 2**20
FIRST_BUCKET_BYTES = MIB  # dist._DEFAULT_FIRST_BUCKET_BYTES
DEFAULT_CAP_MB = 25  # _DEFAULT_BUCKET_CAP_MB


class CommunicationHook(StrEnum):
    """Hooks of `torch.distributed.algorithms.ddp_comm_hooks`."""

    NONE = "none"
    BF16_COMPRESS = "bf16_compress"
    FP16_COMPRESS = "fp16_compress"
    POWER_SGD = "powersgd"


OF_POWER_SGD = ("matrix_approximation_rank", "min_compression_rate", "use_error_feedback")
"""Options of `PowerSGDState`."""

WIRE = {CommunicationHook.BF16_COMPRESS: DType.BF16, CommunicationHook.FP16_COMPRESS: DType.FP16}
"""Format in which a compressing hook reduces a bucket."""


class DDP(RuntimeOptions):
    """Options of `DistributedDataParallel`.

    With bf16 and fp16, forward and backward run in `torch.autocast`: parameters, gradients and
    states are fp32, and weights are cast in every forward. A model that is itself bf16 is
    `pure_bf16`.

    Attributes:
        bucket_cap_mb: MiB of gradients from which a bucket is closed; None for 25, with a first
            bucket of 1 MiB.
        gradient_as_bucket_view: gradients are views of buckets and need no additional memory.
        find_unused_parameters: buckets stay in the reverse order of the model, and ranks add up a
            map of the parameters that they used.
        static_graph: the graph is the same in every iteration, so that buckets are rebuilt even
            with `find_unused_parameters`, and no map is reduced after the first one.
        no_sync: accumulate gradients without communication before the last micro-batch.
        broadcast_buffers: fp32 elements of module buffers that rank 0 broadcasts before a forward;
            models of zsim have no buffers, so 0 by default.
        comm_hook: the registered communication hook.
        matrix_approximation_rank, min_compression_rate, use_error_feedback: of `PowerSGDState`.
        repeat_kv: the model copies keys and values that query heads share before attention, and
            separates the output of a joined layer (`CausalSelfAttention` of LitGPT).
    """

    stages = (0,)
    usual_stage = 0
    has_replicas = False
    takes_frozen = True
    trains_narrow = True
    takes_quantized = True
    keeps_quantized = True

    bucket_cap_mb: Positive | None = None
    gradient_as_bucket_view: Flag = False
    find_unused_parameters: Flag = False
    static_graph: Flag = False
    no_sync: Flag = True
    broadcast_buffers: Whole = 0
    comm_hook: CommunicationHook = CommunicationHook.NONE
    matrix_approximation_rank: Count = 1
    min_compression_rate: Positive = 2.0
    use_error_feedback: Flag = True
    repeat_kv: Flag = False

    @property
    def finds_unused(self) -> bool:
        """True if every backward looks for unused parameters."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def limits(self) -> tuple[int, int]:
        """Return the bytes from which the first bucket and later ones are closed."""
        # as BucketCapacityConfig in nn/parallel/distributed.py does
        if self.bucket_cap_mb is None:
            return FIRST_BUCKET_BYTES, DEFAULT_CAP_MB * MIB
        cap = int(self.bucket_cap_mb * MIB)
        return cap, cap

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield refusals of options of PowerSGD without its hook."""
        del stage, moments
        for name in OF_POWER_SGD if self.comm_hook is not CommunicationHook.POWER_SGD else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield name, value, "needs comm_hook = powersgd"

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: gradients accumulate in that of the parameters, hooks reduce in theirs."""
        del stage
        return Formats(
            compute=compute,
            reduction=WIRE.get(self.comm_hook, optimizer),
            whole=optimizer,
            reduced=optimizer,
            optimizer=optimizer,
        )
