"""PowerSGD's hook: each large gradient is all-reduced as two narrow factors.

The hook of a bucket adds the error of the step before and copies the bucket. Small tensors are
all-reduced in one piece. Every other gradient M is a matrix: P = M Q is all-reduced and
orthogonalized, Q = M^T P is all-reduced and divided, and P Q^T replaces M. The host then waits for
the device, and the hook keeps the difference of the copy and the result. Factors stay from step to
step, as with `warm_start`. The step is one after `start_powerSGD_iter`.

Functions named in comments are from `torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`
in torch 2.13. There the copy is freed while the last kernel may still read it; here it is not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, matmul, streaming
from zsim.model.model import Parameter
from zsim.schedule.operation import Action, Edge, Role, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket
from zsim.zero.names import DATA
from zsim.zero.state import persist_zeros
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.ddp.options import DDP

GRAM_SCHMIDT_MAX = 2
"""Largest rank that is orthogonalized by Gram-Schmidt in fp32; beyond, by a QR factorization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A compressed gradient: its extents, and the places of its factors."""

    name: str
    rows: int
    columns: int
    rank: int
    left: int
    right: int


def extents(shape: Sequence[int], options: DDP) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a gradient; None if it is not compressed."""
    # `tensor.view(tensor.shape[0], -1)`, _should_compress
    rows, columns = shape[0], 1
    for extent in shape[1:]:
        columns *= extent
    rank = min(rows, columns, options.matrix_approximation_rank)
    least = (rows + columns) * rank * options.min_compression_rate
    return (rows, columns, rank) if least < rows * columns else None


def matrices(parameters: Sequence[Parameter], options: DDP) -> list[Matrix]:
    """Return the compressed gradients of a bucket, grouped by shape."""
    # `shape_to_tensors`
    found = [(each.name, size) for each in parameters if (size := extents(each.shape, options))]
    first = {size: place for place, (_, size) in reversed([*enumerate(found)])}
    made: list[Matrix] = []
    left = right = 0
    for name, (rows, columns, rank) in sorted(found, key=lambda each: first[each[1]]):
        made.append(
            Matrix(name=name, rows=rows, columns=columns, rank=rank, left=left, right=right)
        )
        left, right = left + rows * rank, right + columns * rank
    return made


def orthogonalized(rows: int, rank: int, dtype: DType) -> list[Kernel]:
    """Return the kernels that orthogonalize the columns of a factor."""
    # _orthogonalize: _orthogonalize_gram_schmidt, or torch.linalg.qr

    def passes(columns: int, streams: int) -> Kernel:
        return streaming(KernelKind.ELEMENTWISE, (rows, columns), dtype, streams=streams)

    if rank > GRAM_SCHMIDT_MAX and dtype.size_bytes > DType.FP16.size_bytes:
        # Householder: the rest of the matrix is multiplied by a column, and updated; then back
        rests = [*range(rank, 0, -1)]
        return [passes(rest, streams) for rest in 2 * rests for streams in (1, 2)]
    found: list[Kernel] = []
    for column in range(rank):
        found += [passes(1, 1), passes(1, 2)]  # norm, `col /=`
        if rest := rank - column - 1:  # product, sum, product, `rest -=`
            found += [passes(rest, 2), passes(rest, 1), passes(rest, 2), passes(rest, 3)]
    return found


class LowRankReducer(StepPart):
    """Replaces the gradients of a bucket by the product of their all-reduced factors."""

    def __init__(self, step: Step, options: DDP, *, stream: str) -> None:
        super().__init__(step)
        self._options = options
        self._stream = stream
        self._dtype = step.strategy.train.precision.optimizer
        self._parameters = {each.name: each for each in step.model.parameters}

    def write_setup(self, bucket: Bucket) -> None:
        """Allocate the factors of a bucket and its error."""
        # p_memory_dict, q_memory_dict, error_dict
        compressed = self._matrices(bucket)
        factors = self._factors(bucket, compressed) if compressed else ()
        errors = (self._error(bucket),) if self._options.use_error_feedback else ()
        for buffer in (*factors, *errors):
            persist_zeros(self.writer, buffer, buffer)

    def all_reduce(self, bucket: Bucket, name: str) -> str:
        """Reduce the gradients in buffer `name`; return the operation that ends the hook."""
        writer = self.writer
        keeps = self._options.use_error_feedback
        whole = bucket.buffer(writer, "uncompressed", self._dtype, Kind.WORKSPACE)
        if keeps:
            writer.copy(f"feed/{bucket.name}", self._error(bucket), name, accumulate=True)
            writer.allocate(whole)
            writer.copy(f"keep/{bucket.name}", name, whole)
        compressed = self._matrices(bucket)
        done = self._reduce_rest(bucket, name, compressed)
        if compressed:
            done = self._reduce_factors(bucket, name, compressed, after=done)
        writer.host_wait(f"synchronize/{bucket.name}", done)
        if keeps:
            done = self._keep_error(bucket, name, whole)
            writer.free(whole, uses=(done,))
        return done

    def _matrices(self, bucket: Bucket) -> list[Matrix]:
        pieces = bucket.layout.pieces
        return matrices([self._parameters[each.parameter] for each in pieces], self._options)

    def _factors(self, bucket: Bucket, compressed: Sequence[Matrix]) -> tuple[str, str]:
        last, writer = compressed[-1], self.writer
        sizes = (
            ("left", last.left + last.rows * last.rank),
            ("right", last.right + last.columns * last.rank),
        )
        left, right = (
            writer.buffer(f"{bucket.name}/{side}", size, self._dtype, Kind.COMMUNICATION)
            for side, size in sizes
        )
        return left, right

    def _error(self, bucket: Bucket) -> str:
        return bucket.buffer(self.writer, "error", self._dtype, Kind.COMMUNICATION)

    def _reduce_rest(self, bucket: Bucket, name: str, compressed: Sequence[Matrix]) -> str:
        """Write the left factors; all-reduce gradients that are not compressed."""
        writer, stream = self.writer, self._stream
        runs = list(_runs(bucket, {each.name for each in compressed}))
        size = sum(end - start for start, end, _ in runs)
        flat = writer.buffer(f"{bucket.name}/rest", size, self._dtype, Kind.COMMUNICATION)
        place, done, moves = 0, "", list[tuple[View, View, int]]()
        if runs:
            writer.allocate(flat)
        for start, end, count in runs:  # torch.cat
            here = View(buffer=name, start=start, size=end - start)
            there = View(buffer=flat, start=place, size=end - start)
            moves.append((here, there, count))
            done = writer.copy(f"join/{bucket.name}/{place}", here, there)
            place += end - start
        if compressed:
            done = self._multiply(bucket, name, compressed, is_left=True)
        if not runs:  # an all-reduce of nothing
            return done
        summed = writer.all_reduce(f"reduce/{bucket.name}/rest", DATA, flat, after=(done,))
        # unpack_uncompressed_tensors_and_allreduce_ps
        ranks = self.strategy.replicas
        after: tuple[Edge, ...] = (summed,)
        path = f"divide/{bucket.name}/rest"
        done = writer.copy(path, flat, flat, divisor=ranks, stream=stream, after=after)
        for here, there, count in moves:
            path = f"split/{bucket.name}/{there.start}"
            done = writer.copy(path, there, here, launches=count, stream=stream)
        writer.free(flat, uses=(done,))
        return done

    def _reduce_factors(
        self, bucket: Bucket, name: str, compressed: Sequence[Matrix], *, after: str
    ) -> str:
        """All-reduce both factors in turn, and multiply them."""
        writer, stream = self.writer, self._stream
        left, right = self._factors(bucket, compressed)
        summed = writer.all_reduce(f"reduce/{bucket.name}/left", DATA, left, after=(after,))
        # compute_qs
        done = self._multiply(bucket, name, compressed, is_left=False, after=(summed,))
        summed = writer.all_reduce(f"reduce/{bucket.name}/right", DATA, right, after=(done,))
        # decompress
        path, ranks = f"divide/{bucket.name}/right", self.strategy.replicas
        done = writer.copy(path, right, right, divisor=ranks, stream=stream, after=(summed,))
        for each in compressed:
            done = writer.compute(
                f"decompress/{each.name}",
                Action.DECOMPRESS,
                (
                    (Role.INPUT, self._left(bucket, compressed, each)),
                    (Role.INPUT, self._right(bucket, compressed, each)),
                    (Role.GRADIENT, _place(bucket, name, each)),
                ),
                kernels=(matmul(each.rows, each.columns, each.rank, self._dtype),),
                stream=stream,
            )
        return done

    def _multiply(
        self,
        bucket: Bucket,
        name: str,
        compressed: Sequence[Matrix],
        *,
        is_left: bool,
        after: tuple[Edge, ...] = (),
    ) -> str:
        """Orthogonalize one factor of each gradient, and multiply the gradient by it."""
        done = ""
        for each in compressed:
            left = self._left(bucket, compressed, each)
            right = self._right(bucket, compressed, each)
            read, written = (right, left) if is_left else (left, right)
            long, wide = (each.columns, each.rows) if is_left else (each.rows, each.columns)
            kernels = orthogonalized(long, each.rank, self._dtype)
            done = self.writer.compute(
                f"compress/{each.name}/{'left' if is_left else 'right'}",
                Action.COMPRESS,
                (
                    (Role.GRADIENT, _place(bucket, name, each)),
                    (Role.INPUT, read),
                    (Role.OUTPUT, written),
                ),
                kernels=(*kernels, matmul(wide, each.rank, long, self._dtype)),
                stream=COMPUTE if is_left else self._stream,
                after=after,
            )
            after = ()
        return done

    def _left(self, bucket: Bucket, compressed: Sequence[Matrix], each: Matrix) -> View:
        buffer, _ = self._factors(bucket, compressed)
        return View(buffer=buffer, start=each.left, size=each.rows * each.rank)

    def _right(self, bucket: Bucket, compressed: Sequence[Matrix], each: Matrix) -> View:
        _, buffer = self._factors(bucket, compressed)
        return View(buffer=buffer, start=each.right, size=each.columns * each.rank)

    def _keep_error(self, bucket: Bucket, name: str, whole: str) -> str:
        """Write the difference of the copy and the gradients, which is made in new memory."""
        # `state.error_dict[bucket_index] = input_tensor_cp - input_tensor`
        writer = self.writer
        new = bucket.buffer(writer, "new_error", self._dtype, Kind.WORKSPACE, home=self._stream)
        writer.allocate(new)
        done = writer.compute(
            f"error/{bucket.name}",
            Action.RESIDUAL,
            (
                (Role.GRADIENT, writer.all(name)),
                (Role.INPUT, writer.all(whole)),
                (Role.OUTPUT, writer.all(self._error(bucket))),
                (Role.WORKSPACE, writer.all(new)),
            ),
            kernels=(streaming(KernelKind.ELEMENTWISE, (bucket.padded,), self._dtype, streams=3),),
            stream=self._stream,
        )
        writer.free(new)
        return done


def _place(bucket: Bucket, name: str, matrix: Matrix) -> View:
    """Return the place of a gradient in the buffer of its bucket."""
    start = next(each.start for each in bucket.layout.pieces if each.parameter == matrix.name)
    return View(buffer=name, start=start, size=matrix.rows * matrix.columns)


def _runs(bucket: Bucket, compressed: set[str]) -> Iterator[tuple[int, int, int]]:
    """Yield start and end of each run of other gradients in a bucket, and their number."""
    for is_other, run in groupby(
        bucket.layout.pieces, lambda each: each.parameter not in compressed
    ):
        pieces = list(run)
        if is_other:
            yield pieces[0].start, pieces[-1].start + pieces[-1].size, len(pieces)
