"""PyTorch's FSDP2: `fully_shard` on every block and on the root, which has the other parameters.

As `torch/distributed/fsdp/_fully_shard` does it (torch 2.13). Each group's shards are copied into
their slot of the gathered tensor on one stream, gathered on another, and copied out into whole
parameters on the compute stream. In forward no rule says how far ahead that happens: the host runs
ahead, and what was gathered is kept until the next group is copied out. In backward each group
gathers the one before it. The last block is freed and gathered again; a block whose inputs have no
gradient is reduced at the very end, after the root.

A group gathers its frozen parameters with the others, and reduces the gradients that there are
(`FSDPParamGroup.post_backward`). A block whose outputs have no gradient has no backward (the hook
is on outputs: `_register_pre_backward_hook`), but the one after it gathers it all the same; what
came is dropped at the end (`finalize_backward`: "a mistargeted unshard").
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from zsim.model.model import Model, Parameter
from zsim.runtimes.fsdp2.gather import ALL_GATHER, COPY_IN, Gathers
from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.fsdp2.reduce import ALL_REDUCE, REDUCE_SCATTER, Reductions
from zsim.runtimes.fsdp2.shards import shards
from zsim.runtimes.fsdp2.volume import VOLUME
from zsim.runtimes.wrapping import Wrapping, groups, write_ending
from zsim.schedule.operation import Edge
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, need_single_calls, whole
from zsim.zero.bucket import Buckets, Place, Placing, numbered
from zsim.zero.forward_backward import Passes
from zsim.zero.state import BucketState, Holding, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMPUTE, Draft


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What FSDP2 does to train `model` on `strategy.data` ranks, times the replicas.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(FSDP2)
    need_fitting(model, strategy)
    need_single_calls(model, "FSDP2")
    place = padded_rows(strategy.data)
    buckets = numbered(model, groups(model), place=place, ranks=strategy.data)
    sharded = shards(model, buckets, place=place, ranks=strategy.data)
    draft = Draft()
    precision = strategy.precision
    holding = Holding(
        parameter=precision.optimizer,
        parameter_sharded=True,
        optimizer=precision.optimizer,
        optimizer_sharded=True,
        has_master=False,
        moments=strategy.moments,
        frozen=precision.compute,
    )
    states = write_setup(draft, sharded, holding)
    setup, draft.operations = draft.operations, []
    step = _Step(
        draft, model, strategy, options=options, buckets=buckets, sharded=sharded, states=states
    )
    step.write()
    streams = (COMPUTE, COPY_IN, ALL_GATHER, REDUCE_SCATTER)
    return framed(
        "FSDP2",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=streams if strategy.replicate == 1 else (*streams, ALL_REDUCE),
        layouts=tuple(dict.fromkeys((*buckets.layouts, *sharded.layouts, *step.layouts))),
    )


def padded_rows(ranks: int) -> Place:
    """Each parameter padded to a multiple of `ranks` along its first dimension."""

    def place(parameters: Sequence[Parameter]) -> Placing:
        ends: list[int] = []
        for parameter in parameters:
            rows, *others = parameter.shape or (1,)
            ends.append(-(-rows // ranks) * ranks * prod(others))
        starts = (0, *accumulate(ends))
        return Placing(starts=starts[:-1], elements=starts[-1], blocks=starts[:-1])

    return place


class _Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        options: FSDP2,
        buckets: Buckets,
        sharded: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.sharded = sharded
        self.states = states
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self.gathers = Gathers(
            draft, strategy, options=options, buckets=buckets, sharded=sharded, states=states
        )
        self.reductions = Reductions(
            draft, strategy, options, buckets=buckets, sharded=sharded, passes=self.passes
        )
        self.layouts = (*self.gathers.layouts, *self.reductions.layouts)
        self.wrapping = Wrapping(model, buckets)
        self.order, self.root = self.wrapping.order, self.wrapping.root

    def _held(self, bucket: int, _visit: UnitVisit) -> str:
        return self.gathers.whole(self.buckets.all[bucket])

    def write(self) -> None:
        """Append the step to the draft."""
        once = visits(self.model, self.strategy)
        micro_batches = self.strategy.gradient_accumulation_steps
        for micro_batch in range(micro_batches):
            self.passes.micro_batch = micro_batch
            self.gathers.last = self.reductions.last = micro_batch == micro_batches - 1
            self._forward(micro_batch, [visit for visit in once if not visit.backward])
            self._backward(micro_batch, [visit for visit in once if visit.backward])
        write_ending(
            self.draft,
            self.strategy,
            buckets=self.sharded,
            states=self.states,
            reduced=self.reductions.reduced,
        )

    def _forward(self, micro_batch: int, sequence: list[UnitVisit]) -> None:
        draft, gathers = self.draft, self.gathers
        draft.prefix = f"step/forward/mb{micro_batch}"
        self.passes.load()
        if self.root is not None:
            draft.prefix = f"step/forward/mb{micro_batch}/root"
            gathers.gather(self.root)
            gathers.copy_out(self.root, forward=True)
        position = 0
        for visit in sequence:
            draft.prefix = f"step/forward/mb{micro_batch}/{self.model.units[visit.unit].name}"
            block = self.wrapping.block(visit.unit)
            if block is not None:
                gathers.gather(block)
                gathers.copy_out(block, forward=True)
                position += 1
                for ahead in self.order[position : position + self.options.forward_prefetch]:
                    gathers.gather(ahead)
            self.passes.forward(visit, ())
            if block is not None:
                gathers.after_forward(block)
        gathers.end_forward()

    def _backward(self, micro_batch: int, sequence: list[UnitVisit]) -> None:
        draft, gathers = self.draft, self.gathers
        draft.prefix = f"step/backward/mb{micro_batch}"
        self.passes.seed()
        ahead = [*self.order]
        if self.root is not None and ahead:
            draft.prefix = f"step/backward/mb{micro_batch}/root"
            gathers.gather(ahead[-1])
        late: list[int] = []
        for visit in sequence:
            draft.prefix = f"step/backward/mb{micro_batch}/{self.model.units[visit.unit].name}"
            block = self.wrapping.block(visit.unit)
            if block is not None:
                gathers.gather(block)
                gathers.copy_out(block, forward=False)
                while ahead.pop() != block:
                    pass
                if ahead:
                    gathers.gather(ahead[-1])
            self.passes.backward(visit, ())
            self.reductions.collect(visit.unit)
            if block is not None and self.wrapping.has_input_gradient(visit.unit):
                self._after_backward(block)
            elif block is not None:
                late.append(block)
        done = {self.wrapping.block(visit.unit) for visit in sequence}
        late += [block for block in self.order if block not in done]
        draft.prefix = f"step/backward/mb{micro_batch}/end"
        waits: tuple[Edge, ...] = ()
        for bucket in ([] if self.root is None else [self.root]) + sorted(late):
            self._after_backward(bucket, waits)
            waits = self.reductions.finished
        self.reductions.end_backward()

    def _after_backward(self, bucket: int, after: tuple[Edge, ...] = ()) -> None:
        self.gathers.after_backward(bucket)
        self.reductions.reduce(bucket, after)
