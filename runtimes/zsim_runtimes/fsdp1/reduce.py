"""Gradients in FSDP1: a flat gradient for each flat parameter, reduced on a separate stream.

The division by the ranks is split: a part before the sum and a part after it. The memory of the
flat gradient returns when the reducing stream is done with it.

Functions named in comments are from `torch/distributed/fsdp/_runtime_utils.py` in torch 2.13.
"""

from zsim.schedule.operation import FreeMode, View
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket, UnitRun
from zsim.zero.names import DATA, REPLICATE
from zsim.zero.reduce import copy_run
from zsim.zero.state import Reduced
from zsim.zero.step_skeleton import StepPart
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.reduced_gradients import divide, set_or_add
from zsim_runtimes.wrapping import WrappedStep, two_parts

# _init_streams
POST_BACKWARD = "post_backward"
ALL_REDUCE = "all_reduce"


class FlatReductions(StepPart):
    """Takes the gradients of each unit's backward and reduces them, one flat gradient at a time."""

    def __init__(self, step: WrappedStep, options: FSDP1) -> None:
        super().__init__(step)
        self.reduced: dict[int, Reduced] = {}
        self.finished: tuple[str, ...] = ()
        self._wire = options.reduce_dtype or self.compute
        self._collected: dict[int, list[tuple[str, UnitRun]]] = {}
        self._written: dict[int, str] = {}

    def collect(self, unit: int) -> None:
        """Keep the gradients from backward of `unit` until its flat gradient is complete."""
        for position, run in self.buckets.trained_runs(unit):
            source = self.passes.transient(unit, position)
            self._collected.setdefault(run.bucket, []).append((source, run))

    def take(self, bucket: Bucket) -> None:
        """Create the flat gradient, or add to the one from an earlier micro-batch."""
        # FlatParamHandle.prepare_gradient_for_backward (_flat_param.py) keeps an unsharded gradient
        # of an earlier micro-batch; autograd accumulates into it.
        writer, flat = self.writer, self._flat(bucket)
        sources = self._collected.pop(bucket.index)
        adds = flat in writer.alive
        if not adds:
            writer.allocate(flat)
            alone = len(sources) == 1
            start = bucket.elements if alone else 0
            if start < bucket.padded:
                rest = View(buffer=flat, start=start, size=bucket.padded - start)
                writer.fill(f"zero/{flat}", rest, 0.0)
            adds = not alone
        for source, run in sources:
            self._written[bucket.index] = copy_run(
                writer,
                f"{'add' if adds else 'set'}/{flat}/{source}",
                run,
                source=source,
                target=flat,
                accumulate=adds,
                divisor=self.strategy.train.gradient_accumulation_steps,
            )
            writer.free(source)

    def reduce(self, bucket: Bucket) -> None:
        """Reduce the flat gradient to the rank's shard, in the dtype of the parameter."""
        writer, strategy, stream = self.writer, self.strategy, POST_BACKWARD
        before, after = two_parts(strategy.replicas)
        written = self._written[bucket.index]
        source = flat = self._flat(bucket)
        if self._wire is not self.compute:
            # _post_backward_hook casts on its stream, and records it for autograd's gradient
            source = bucket.buffer(writer, "wide", self._wire, home=stream)
            writer.allocate(source)
            path = f"cast/{source}"
            written = writer.copy(path, flat, source, stream=stream, after=(written,))
            writer.free(flat, uses=(written,), mode=FreeMode.DEFERRED)
        if before > 1:  # _reduce_grad, _div_if_needed(_gradient_predivide_factor)
            written = divide(writer, source, before, stream=stream, after=(written,))
        shard = bucket.shard_buffer(writer, "received", self._wire, home=stream)
        if self._wire is strategy.train.precision.optimizer and bucket.index not in self.reduced:
            shard = self._gradient(bucket, stream)
        writer.allocate(shard)
        path = f"reduce/{bucket.name}"
        done = writer.reduce_scatter(path, DATA, source, shard, stream=stream, after=(written,))
        # Memory of the compute stream is recorded; memory of this stream needs no recording.
        own = writer.buffers[source].home == stream
        mode = FreeMode.WAITED if own else FreeMode.DEFERRED
        writer.free(source, uses=(done,), mode=mode)
        self._settle(bucket, shard, done, divisor=after)

    def _settle(self, bucket: Bucket, shard: str, done: str, *, divisor: int) -> None:
        """Sum over the replicas, divide, cast, and set or add."""
        writer, stream = self.writer, POST_BACKWARD
        if self.strategy.parallel.replicate > 1:  # _reduce_grad, uses_hybrid_sharded_strategy
            stream, path = ALL_REDUCE, f"all_reduce/{bucket.name}"
            done = writer.all_reduce(path, REPLICATE, shard, stream=stream, after=(done,))
        if divisor > 1:
            done = divide(writer, shard, divisor, stream=stream)
        gradient = f"{bucket.name}/gradient"
        if shard != gradient:
            # _accumulate_sharded_grad: _cast_grad_to_param_dtype, then sets or adds to
            # `_saved_grad_shard`
            done = set_or_add(writer, shard, self._gradient(bucket, stream), stream=stream)
            writer.free(shard, uses=(done,), mode=FreeMode.DEFERRED)
        self.reduced[bucket.index] = Reduced(gradient, done)
        self.finished = (done,)

    def _flat(self, bucket: Bucket) -> str:
        return bucket.buffer(self.writer, "flat_gradient", self.compute, Kind.GRADIENT)

    def _gradient(self, bucket: Bucket, home: str) -> str:
        optimizer = self.strategy.train.precision.optimizer
        return bucket.shard_buffer(self.writer, "gradient", optimizer, Kind.GRADIENT, home=home)
