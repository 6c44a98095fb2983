"""PyTorch's DistributedDataParallel: whole states on every rank, gradients all-reduced in buckets.

Autograd's gradients are divided by the ranks as they are copied into a bucket. A complete bucket is
all-reduced on the stream of its communicator while backward continues. Buckets start in a fixed
order. After backward, compute waits for each bucket and copies it back, unless gradients are views
of it. With bf16 and fp16, forward runs in `torch.autocast`, which casts weights once a forward.

The schedule is that of the second and later iterations: the first one has other buckets.

Functions named in comments are from `torch/csrc/distributed/c10d/reducer.cpp` in torch 2.13.
"""

from zsim.dtype import DType
from zsim.model.architecture import Transformer
from zsim.model.model import Model, ModelError
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import need_single_calls
from zsim.zero.bucket import Buckets, frozen_groups, numbered, one_after_the_other
from zsim.zero.state import Holding, persist_zeros
from zsim.zero.step_skeleton import Step
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.ddp.assignment import buckets_of
from zsim_runtimes.ddp.autocast import CastParameters
from zsim_runtimes.ddp.buckets import BucketReducer
from zsim_runtimes.ddp.options import DDP, WIRE, CommunicationHook
from zsim_runtimes.ddp.volume import VOLUME
from zsim_runtimes.replicated import LocalOptimizerStep, whole

HOOK = "hook"
"""The stream on which the future of a communication hook decompresses a bucket."""


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError if DDP cannot wrap the model.

    Raises:
        ModelError: a unit is called twice, there is a tensor axis, or a hook casts gradients of one
            16-bit format to another.
    """
    need_single_calls(model, "DDP")
    if strategy.parallel.tensor > 1:
        tensor = strategy.parallel.tensor
        raise ModelError(f"parallel.tensor: {tensor} is not modelled for DDP, allowed is 1")
    hook, compute = strategy.options(DDP).comm_hook, strategy.train.precision.compute
    if compute in WIRE.values() and WIRE.get(hook, compute) is not compute:
        raise ModelError(
            f"zero.ddp.comm_hook: {hook} is not modelled for {compute}; say {compute}_compress"
        )


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of DDP training `model`.

    Raises:
        ModelError: the model was built for other parallel degrees, a unit is called twice, or a
            checkpoint cannot be partitioned.
    """
    need(model, strategy)
    options = strategy.options(DDP)
    step = DDPStep(model, strategy, whole_buckets(model, strategy))
    step.write()
    hooks = options.comm_hook is not CommunicationHook.NONE
    return step.schedule(
        "DDP",
        VOLUME,
        streams=(COMPUTE, COMMUNICATION, *([HOOK] if hooks else [])),
        layouts=(*step.buckets.layouts, *step.casts.layouts),
    )


def whole_buckets(model: Model, strategy: Strategy) -> Buckets:
    """Return the reducer's buckets and one of frozen parameters; every rank holds them whole."""
    size_bytes = strategy.train.precision.optimizer.size_bytes
    groups = buckets_of(model, strategy.options(DDP), size_bytes)
    every = [*groups, *frozen_groups(model)]
    return whole(numbered(model, every, place=one_after_the_other(1), ranks=1))


def quantized_inputs(shape: Transformer) -> int:
    """Return the elements for each token of the inputs of a block's quantized layers.

    Layers that read the same tensor count it once.
    """
    if shape.lora is None or shape.lora.quantization is None:
        return 0
    norms = 1 if shape.parallel_residual and shape.shared_norm else 2
    return norms * shape.hidden_size + shape.attention_heads * shape.head_width + shape.wide


class DDPStep(Step):
    """Forward and backward of every micro-batch, then the update."""

    optimizer_step = LocalOptimizerStep

    def __init__(self, model: Model, strategy: Strategy, buckets: Buckets) -> None:
        precision = strategy.train.precision
        holding = Holding(
            parameter=precision.optimizer,
            optimizer_sharded=False,
            frozen=precision.compute,
        )
        super().__init__(model, strategy, buckets, holding)
        self.options = strategy.options(DDP)
        self.casts = CastParameters(self)
        self.reducer = BucketReducer(self, self.options, hook_stream=HOOK)

    def write_setup(self) -> None:
        """Allocate the reducer's buckets, and inputs of the step before that the loop holds."""
        self.reducer.write_setup()
        self._hold_inputs()

    def _hold_inputs(self) -> None:
        """Allocate what the graph of the step before keeps until the loop replaces its logits.

        `MatMul4Bit` of bitsandbytes before 0.43.2 keeps inputs as attributes of the graph, not as
        saved tensors, so backward does not free them. The loop of LitGPT (`fit`) computes new
        logits before it drops the old ones, which hold the graph. Here both live through the step.
        """
        shape = self.model.architecture
        holds = self.strategy.train.holds_logits
        if shape is None or shape.lora is None or not (holds and shape.lora.keeps_inputs):
            return
        sequences = self.model.batch.elements // (shape.sequence_length + 1)
        tokens = sequences * shape.sequence_length
        compute = self.strategy.train.precision.compute
        inputs = shape.layers * quantized_inputs(shape) * tokens
        held = (("inputs", inputs, compute), ("logits", tokens * shape.vocab_size, DType.FP32))
        self.writer.prefix = "setup"
        for kind, elements, dtype in held:
            name = self.writer.buffer(f"held_{kind}", elements, dtype, Kind.SAVED)
            persist_zeros(self.writer, name, name)

    def begin_forward(self) -> None:
        """Broadcast the module's buffers, if the backward will synchronize."""
        # DistributedDataParallel._pre_forward: _sync_buffers if will_sync_module_buffers
        if self.reducer.syncs(last=self.is_last):
            self.reducer.broadcast_buffers()

    def forward(self, visit: UnitVisit) -> None:
        """Cast the weights of a unit, and run it."""
        self.casts.need(visit.unit)
        self.passes.forward(visit, self.reducer.waits())

    def begin_backward(self) -> None:
        """Free the casts that only the cache of autocast held."""
        self.casts.end_forward()

    def backward(self, visit: UnitVisit) -> None:
        """Run a unit backward, and hand its gradients to the reducer."""
        self.casts.need(visit.unit)
        self.passes.backward(visit, ())
        if not visit.only_recomputes:
            self.casts.release(visit.unit)
            self.reducer.take(visit.unit, first=self.micro_batch == 0, last=self.is_last)

    def end_backward(self) -> None:
        """Wait for all buckets, and copy gradients back."""
        self.casts.end()
        if self.reducer.syncs(last=self.is_last):
            self.reducer.finalize()

    def end(self) -> None:
        """Update every parameter on every rank."""
        reduced = self.reducer.reduced
        after = tuple(dict.fromkeys(each.operation for each in reduced.values()))
        keeps = self.options.gradient_as_bucket_view
        self.update(reduced, after=after, stream=COMPUTE, keeps_gradients=keeps)
