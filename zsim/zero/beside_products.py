"""NCCL's collectives of the tensor axis beside products of column-parallel layers.

Megatron-LM issues them on the stream of NCCL, behind all that was issued for the compute stream,
and has that wait for them behind the product (`LinearWithGradAccumulationAndAsyncCommunication`,
megatron/core/tensor_parallel/layers.py, 2026-08): `async_op=True`, then `handle.wait()`. With
CUDA_DEVICE_MAX_CONNECTIONS=1, before which it waited for a kernel of 3 us, each begins before the
product.
"""

from zsim.schedule.operation import Edge, StreamOperation
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import TENSOR

TOKEN_COLLECTIVES = "token_collectives"
"""The stream of these collectives."""


def gather_beside(writer: ScheduleWriter, path: str, own: str, whole: str) -> str:
    """Gather `own` of all ranks into `whole` beside the next `Compute` of a segment."""
    before = next(
        each.id
        for each in reversed(writer.operations)
        if isinstance(each, StreamOperation) and each.stream == COMPUTE
    )
    return writer.all_gather(
        path, TENSOR, own, whole, beside=True, stream=TOKEN_COLLECTIVES, after=(before,)
    )


def scatter_beside(
    writer: ScheduleWriter, path: str, summands: str, own: str, *, maker: Edge
) -> str:
    """Reduce `summands`, which end with it, to the `own` tokens beside the `maker`'s products."""
    done = writer.reduce_scatter(
        path, TENSOR, summands, own, beside=True, stream=TOKEN_COLLECTIVES, after=(maker,)
    )
    writer.free(summands, uses=(done,))
    return done


def sum_beside(writer: ScheduleWriter, path: str, summands: str, *, maker: Edge) -> str:
    """Sum `summands` over ranks, in place, beside the `maker`'s other products."""
    return writer.all_reduce(
        path, TENSOR, summands, beside=True, stream=TOKEN_COLLECTIVES, after=(maker,)
    )
