"""Collectives of the tensor axis that overlap the GEMMs of column-parallel layers.

Megatron-LM issues them on NCCL's stream after all work issued so far on the compute stream. The
compute stream waits for them after the GEMM (`LinearWithGradAccumulationAndAsyncCommunication`,
megatron/core/tensor_parallel/layers.py, 2026-08): `async_op=True`, then `handle.wait()`. With
CUDA_DEVICE_MAX_CONNECTIONS=1, each collective starts before the GEMM.
"""

from zsim.schedule.operation import Edge, StreamOperation
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import TENSOR

TOKEN_COLLECTIVES = "token_collectives"
"""The stream of these collectives."""


def gather_overlapped(writer: ScheduleWriter, path: str, own: str, whole: str) -> str:
    """All-gather `own` into `whole`, overlapping the next `Compute` operation of a segment.

    Return the id of the all-gather.
    """
    before = next(
        each.id
        for each in reversed(writer.operations)
        if isinstance(each, StreamOperation) and each.stream == COMPUTE
    )
    return writer.all_gather(
        path, TENSOR, own, whole, beside=True, stream=TOKEN_COLLECTIVES, after=(before,)
    )


def scatter_overlapped(
    writer: ScheduleWriter, path: str, summands: str, own: str, *, maker: Edge
) -> str:
    """Reduce-scatter `summands` to `own`, overlapping the other GEMMs of `maker`; free `summands`.

    Return the id of the reduce-scatter.
    """
    done = writer.reduce_scatter(
        path, TENSOR, summands, own, beside=True, stream=TOKEN_COLLECTIVES, after=(maker,)
    )
    writer.free(summands, uses=(done,))
    return done


def sum_overlapped(writer: ScheduleWriter, path: str, summands: str, *, maker: Edge) -> str:
    """All-reduce `summands` in place, overlapping the other GEMMs of `maker`; return the id."""
    return writer.all_reduce(
        path, TENSOR, summands, beside=True, stream=TOKEN_COLLECTIVES, after=(maker,)
    )
