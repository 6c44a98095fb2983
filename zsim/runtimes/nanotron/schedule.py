"""nanotron's data parallelism and ZeRO-1: whole gradients in fp32, reduced once a step.

As `nanotron/optim` and `nanotron/parallel` do it (2025-02). Parameters are whole in the format of
the forward, and so is a buffer of gradients in fp32 that lives as long as the training. Autograd's
own gradients live until the end of each backward, and are then added to it. With several replicas
the model is wrapped in PyTorch's DistributedDataParallel: in the last micro-batch its buckets,
which live as long too, take a gradient as soon as there is one, and a hook adds it to the fp32 one
and reduces that: all-reduced without ZeRO, reduce-scattered with ZeRO-1, where ranks update their
part of each parameter and gather the others once all are updated, which nothing hides.

Parameters of which ranks that see other tokens hold copies are a bucket of their own, summed over
the tensor axis at the end; nanotron sums them after they were reduced, which is the same.
"""

from collections import Counter

from zsim.dtype import DType
from zsim.memory import book, peak_bytes
from zsim.model.model import Model, Parameter
from zsim.runtimes.nanotron.lists import Lists
from zsim.runtimes.nanotron.options import MIB, Nanotron
from zsim.runtimes.nanotron.volume import VOLUME
from zsim.schedule.operation import (
    AllReduce,
    Copy,
    Fill,
    Reduction,
    StreamOperation,
    Together,
    View,
)
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, need_single_calls, whole
from zsim.zero.bucket import Bucket, Buckets, numbered, one_after_the_other
from zsim.zero.forward_backward import Passes
from zsim.zero.optimizer_step import Ending, Trained
from zsim.zero.sequence import shared_parameters
from zsim.zero.state import BucketState, Holding, own_view, updated_view, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMMUNICATION, COMPUTE, DATA, POOL, TENSOR, Draft

GRADIENT = DType.FP32
"""Format in which gradients are collected and reduced (`accumulate_grad_in_fp32`)."""

STREAMS = (COMPUTE, COMMUNICATION)

STEPS = 2
"""Steps after which the worst case repeats: the host waits at the end of each."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What nanotron does to train `model` on `strategy.data` ranks.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(Nanotron)
    need_fitting(model, strategy)
    need_single_calls(model, "nanotron")
    draft = Draft()
    buckets = filled(model, strategy, options)
    states = write_setup(draft, buckets, holding(strategy))
    step = Step(draft, model, strategy, buckets=buckets, states=states)
    step.write_setup()
    setup, draft.operations = draft.operations, []
    step.write()
    return framed(
        f"nanotron, ZeRO-{strategy.stage}",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=STREAMS,
        layouts=buckets.layouts,
        peak_of=worst_case,
    )


def filled(model: Model, strategy: Strategy, options: Nanotron, *, name: str = "bucket") -> Buckets:
    """The buckets of `model`, whose names begin with `name`."""
    return numbered(
        model,
        groups(model, strategy, options),
        place=one_after_the_other(strategy.data),
        ranks=strategy.data,
        name=name,
    )


def holding(strategy: Strategy) -> Holding:
    """What ranks hold: whole parameters, and with ZeRO-1 a shard of optimizer state."""
    precision = strategy.precision
    return Holding(
        parameter=precision.compute,
        parameter_sharded=False,
        optimizer=precision.optimizer,
        optimizer_sharded=strategy.stage == 1,
        has_master=precision.has_master,
        moments=strategy.moments,
    )


def worst_case(program: Program) -> int:
    """The most that may be held at once, whenever deferred memory returns."""
    return peak_bytes(book(program, STEPS), POOL)


def groups(model: Model, strategy: Strategy, options: Nanotron) -> list[list[Parameter]]:
    """The parameters of each bucket, from the last of the model to the first.

    What several units use is a bucket of its own: it is complete with the last use.
    """
    size_bytes = strategy.precision.compute.size_bytes
    limit = options.ddp_bucket_cap_mb * MIB // size_bytes
    apart = shared_parameters(model)
    uses = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    tied = [[each] for each in model.parameters if uses[each.name] > 1]
    found: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in reversed(model.parameters):
        if parameter.name in apart or uses[parameter.name] > 1:
            continue
        if filled and filled + parameter.elements > limit:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += parameter.elements
    together = [each for each in model.parameters if each.name in apart]
    return [group for group in (*tied, *found, together) if group]


class Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.buckets = buckets
        self.states = states
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self.lists = Lists(draft, strategy, buckets, states)
        self.wrapped = strategy.data > 1
        self.shared = shared_parameters(model)
        self._users = [
            sum(run.bucket == bucket.index for runs in buckets.runs for run in runs)
            for bucket in buckets.all
        ]
        self._missing = list(self._users)
        self._written = ["" for _ in buckets.all]

    def _held(self, bucket: int, _visit: UnitVisit) -> str:
        return self.states[bucket].parameter

    def write_setup(self) -> None:
        """Gradients and buckets live as long as the parameters."""
        for bucket in self.buckets.all:
            self.draft.prefix = f"setup/{bucket.name}"
            kept = [self._gradient(bucket)]
            if self.wrapped:
                kept.append(self._staging(bucket))
            for name in kept:
                self.draft.persistent.append(name)
                self.draft.allocate(name)
                self._zero(name)

    def _gradient(self, bucket: Bucket) -> str:
        return self.draft.buffer(
            f"{bucket.name}/gradient", bucket.padded, GRADIENT, Kind.GRADIENT, layout=bucket.name
        )

    def _staging(self, bucket: Bucket) -> str:
        """DistributedDataParallel's own bucket."""
        compute = self.strategy.precision.compute
        return self.draft.buffer(
            f"{bucket.name}/staging", bucket.padded, compute, Kind.GRADIENT, layout=bucket.name
        )

    def _zero(self, name: str) -> None:
        self.draft.add(
            Fill(
                id=self.draft.path(f"zero/{name}"),
                stream=COMPUTE,
                target=self.draft.all(name),
                value=0.0,
            )
        )

    def write(self) -> None:
        """Append the step to the draft."""
        draft, units = self.draft, self.model.units
        self.begin()
        micro_batches = self.strategy.gradient_accumulation_steps
        once = visits(self.model, self.strategy)
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            self.passes.micro_batch = micro_batch
            for visit in once:
                part = f"step/{'backward' if visit.backward else 'forward'}/mb{micro_batch}"
                draft.prefix = part
                if visit is once[0]:
                    self.passes.load()
                if visit is once[len(units)]:
                    self.passes.seed()
                draft.prefix = f"{part}/{units[visit.unit].name}"
                if visit.backward:
                    self.backward(visit, last=last)
                else:
                    self.passes.forward(visit, ())
            self.collect(f"step/backward/mb{micro_batch}", last=last)
        self.end()

    def begin(self) -> None:
        """The buffers of gradients are emptied."""
        self.draft.prefix = "step"
        for bucket in self.buckets.all:
            self._zero(self._gradient(bucket))

    def backward(self, visit: UnitVisit, *, last: bool) -> None:
        """One unit backward; in the `last` micro-batch its gradients are reduced."""
        self.passes.backward(visit, ())
        if last and self.wrapped:
            self._stage(visit.unit)

    def end(self) -> None:
        """What follows the last backward."""
        self.draft.prefix = "step/backward/end"
        self._reduce_shared()
        self._update()

    def _stage(self, unit: int) -> None:
        """Backward of `unit` in the last micro-batch: reduce the buckets that are complete."""
        draft = self.draft
        for position, run in enumerate(self.buckets.runs[unit]):
            bucket = self.buckets.all[run.bucket]
            source, staging = self.passes.transient(unit, position), self._staging(bucket)
            whole = View(buffer=staging, start=run.start, size=run.size)
            draft.add(
                Copy(
                    id=draft.path(f"stage/{source}"),
                    stream=COMPUTE,
                    source=draft.all(source),
                    target=whole if run.layout is None else draft.all(staging),
                    accumulate=self._is_used_again(bucket),
                    by_parameter=run.layout is not None,
                    launches=len(run.parameters),
                )
            )
            self._missing[run.bucket] -= 1
            if not self._missing[run.bucket]:
                whole, target = draft.all(staging), draft.all(self._gradient(bucket))
                self._add(bucket, whole, target, launches=len(bucket.layout.pieces))
                if not self._is_shared(bucket):
                    self._reduce(bucket)

    def _is_used_again(self, bucket: Bucket) -> bool:
        """Whether it is of one parameter that several units use, and this is not the first use."""
        tied = len(bucket.layout.pieces) == 1
        return tied and self._missing[bucket.index] < self._users[bucket.index]

    def _is_shared(self, bucket: Bucket) -> bool:
        return any(piece.parameter in self.shared for piece in bucket.layout.pieces)

    def collect(self, prefix: str, *, last: bool) -> None:
        """The end of a micro-batch's backward: add autograd's gradients, unless they are staged."""
        draft, staged = self.draft, last and self.wrapped
        for unit in reversed(range(len(self.model.units))):
            draft.prefix = f"{prefix}/{self.model.units[unit].name}"
            for position, run in enumerate(self.buckets.runs[unit]):
                bucket = self.buckets.all[run.bucket]
                source, target = self.passes.transient(unit, position), self._gradient(bucket)
                if not staged:
                    whole = View(buffer=target, start=run.start, size=run.size)
                    apart = run.layout is not None
                    into = draft.all(target) if apart else whole
                    count = len(run.parameters)
                    self._add(bucket, draft.all(source), into, launches=count, by_parameter=apart)
                draft.free(source)

    def _add(
        self,
        bucket: Bucket,
        source: View,
        target: View,
        *,
        launches: int,
        by_parameter: bool = False,
    ) -> None:
        draft = self.draft
        self._written[bucket.index] = draft.add(
            Copy(
                id=draft.path(f"add/{source.buffer}"),
                stream=COMPUTE,
                source=source,
                target=target,
                accumulate=True,
                divisor=self.strategy.gradient_accumulation_steps,
                by_parameter=by_parameter,
                launches=launches,
            )
        )

    def _reduce_shared(self) -> None:
        """Sum over the tensor axis what its ranks have of copies, then reduce as the others."""
        for bucket in self.buckets.all:
            if not self._is_shared(bucket):
                continue
            view = self.draft.all(self._gradient(bucket))
            self._written[bucket.index] = self.draft.add(
                AllReduce(
                    id=self.draft.path(f"sum/{bucket.name}"),
                    stream=COMMUNICATION,
                    after=(self._written[bucket.index],),
                    group=TENSOR,
                    source=view,
                    target=view,
                    wire=GRADIENT,
                    accumulate=GRADIENT,
                )
            )
            if self.wrapped:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Average a bucket's fp32 gradients over the data axis, in place."""
        draft, written = self.draft, (self._written[bucket.index],)
        gradient = self._gradient(bucket)
        if self.strategy.stage == 1:
            after = written if self._is_shared(bucket) else ()  # which another stream has summed
            self._written[bucket.index] = self.lists.reduce_scatter(bucket, gradient, after)
            return
        path, view = draft.path(f"reduce/{bucket.name}"), draft.all(gradient)
        member = AllReduce(
            id=f"{path}/member",
            stream=COMMUNICATION,
            group=DATA,
            source=view,
            target=view,
            reduction=Reduction.AVERAGE,
            wire=GRADIENT,
            accumulate=GRADIENT,
        )
        self._written[bucket.index] = draft.add(
            Together(id=path, stream=COMMUNICATION, after=written, members=(member,))
        )

    def _update(self) -> None:
        draft, strategy = self.draft, self.strategy
        trained = [
            Trained(
                name=bucket.name,
                layout=bucket.layout,
                gradient=updated_view(draft, bucket, self._gradient(bucket), strategy),
                measured=own_view(draft, bucket, self._gradient(bucket)),
                after=(self._written[bucket.index],),
                parameter=updated_view(draft, bucket, state.parameter, strategy),
                master=None if state.master is None else draft.all(state.master),
                moments=tuple(draft.all(moment) for moment in state.moments),
                keeps_gradient=True,
            )
            for bucket, state in zip(self.buckets.all, self.states, strict=True)
        ]
        last = ""

        def updated(draft: Draft, item: Trained, operation: str) -> None:
            nonlocal last
            last = operation
            if strategy.stage == 1 and item is trained[-1]:
                last = self.lists.all_gather(draft, operation)

        after = tuple(dict.fromkeys(self._written))
        Ending(draft, strategy, trained, measured_after=after, updated=updated).write()
        # Every step is logged, and the loss read for that (`iteration_step_info_interval` is 1).
        if not last and strategy.clip_norm is not None:  # a stage without parameters
            last = f"{draft.prefix}/norm/reduce"
        draft.host_wait(last or self.made())

    def made(self) -> str:
        """The last operation of the compute stream so far."""
        return next(
            each.id
            for each in reversed(self.draft.operations)
            if isinstance(each, StreamOperation) and each.stream == COMPUTE
        )
