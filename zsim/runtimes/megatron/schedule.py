"""Megatron-LM's distributed optimizer: whole parameters and gradients, sharded optimizer state.

As `megatron/core/distributed` does it (2026-08): parameters stand in buckets in the reverse order
of the model, each from a multiple of 64 elements on, buckets padded to a multiple of the ranks and
of 128. Gradients of all micro-batches are added into buffers that live as long as the training, and
each bucket is reduce-scattered in place once a step (and all-reduced over the replicas, which are
`num_distributed_optimizer_instances`). Ranks update their N-th of each bucket, and it
is gathered in place: after the step, or bucket by bucket while the next forward goes on. Megatron
has one allocation for all buckets of a format; here each bucket has its own, of the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.megatron.volume import VOLUME
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Copy,
    Edge,
    Fill,
    Previous,
    ReduceScatter,
    Reduction,
    Together,
    View,
)
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, whole
from zsim.zero.bucket import Bucket, Buckets, Place, Placing, numbered
from zsim.zero.forward_backward import Passes
from zsim.zero.optimizer_step import Ending, Trained
from zsim.zero.state import BucketState, Holding, own_view, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMMUNICATION, COMPUTE, DATA, REPLICATE, Draft

START = 64
"""A parameter begins at a multiple of so many elements (`param_and_grad_buffer.py`)."""
END = 128
"""A bucket's size is a multiple of this and of the data ranks, for aligned shards (as above)."""
BUCKET_LEAST, BUCKET_EACH = 40_000_000, 1_000_000
"""Elements of a bucket if nothing is said: at least, and for each data rank."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What Megatron-LM does to train `model` on `strategy.data` ranks.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(Megatron)
    need_fitting(model, strategy)
    ranks, precision = strategy.data, strategy.precision
    buckets = numbered(model, groups(model, ranks, options), place=aligned(ranks), ranks=ranks)
    draft = Draft()
    holding = Holding(
        parameter=precision.compute,
        parameter_sharded=False,
        optimizer=precision.optimizer,
        optimizer_sharded=True,
        has_master=precision.has_master,
        moments=strategy.moments,
    )
    states = write_setup(draft, buckets, holding)
    step = _Step(draft, model, strategy, options=options, buckets=buckets, states=states)
    step.write_setup()
    setup, draft.operations = draft.operations, []
    step.write()
    return framed(
        "Megatron distributed optimizer",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=(COMPUTE, COMMUNICATION),
        layouts=buckets.layouts,
    )


def groups(model: Model, ranks: int, options: Megatron) -> list[list[Parameter]]:
    """The parameters of each bucket, from the last of the model to the first.

    A bucket is closed once it has `bucket_size` elements, gaps included; without overlap there is
    one.
    """
    limit = options.bucket_size or max(BUCKET_LEAST, BUCKET_EACH * ranks)
    found: list[list[Parameter]] = [[]]
    for parameter in reversed(model.parameters):
        if options.overlap_grad_reduce and _end(found[-1]) >= limit:
            found.append([])
        found[-1].append(parameter)
    return found


def _starts(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    starts: list[int] = []
    end = 0
    for parameter in parameters:
        starts.append(-(-end // START) * START)
        end = starts[-1] + parameter.elements
    return tuple(starts)


def _end(parameters: Sequence[Parameter]) -> int:
    return _starts(parameters)[-1] + parameters[-1].elements if parameters else 0


def aligned(ranks: int) -> Place:
    """Starts at multiples of 64, the end at one of the ranks and of 128."""

    def place(parameters: Sequence[Parameter]) -> Placing:
        multiple = lcm(ranks, END)
        elements = -(-_end(parameters) // multiple) * multiple
        starts = _starts(parameters)
        return Placing(starts=starts, elements=elements, alignment=multiple // ranks)

    return place


@dataclass(slots=True)
class _Progress:
    """How many units have contributed in the last micro-batch, and what wrote the gradient last."""

    contributions: int = 0
    written: str = ""


class _Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        options: Megatron,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.states = states
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self._progress = [_Progress() for _ in buckets.all]
        self._expected = [
            sum(run.bucket == bucket.index for runs in buckets.runs for run in runs)
            for bucket in buckets.all
        ]
        self._gathered: dict[int, str] = {}
        self._waited: set[int] = set()

    def _held(self, bucket: int, _visit: UnitVisit) -> str:
        return self.states[bucket].parameter

    def write_setup(self) -> None:
        """Gradient buffers live as long as the parameters."""
        for bucket in self.buckets.all:
            self.draft.prefix = f"setup/{bucket.name}"
            name = self._gradient(bucket)
            self.draft.persistent.append(name)
            self.draft.allocate(name)
            self._zero(bucket)

    def _gradient(self, bucket: Bucket) -> str:
        wire = DType.FP32 if self.options.grad_reduce_in_fp32 else self.strategy.precision.compute
        return self.draft.buffer(
            f"{bucket.name}/gradient", bucket.padded, wire, Kind.GRADIENT, layout=bucket.name
        )

    def _zero(self, bucket: Bucket) -> None:
        target = self.draft.all(self._gradient(bucket))
        self.draft.add(
            Fill(id=self.draft.path("zero/gradient"), stream=COMPUTE, target=target, value=0.0)
        )

    def write(self) -> None:
        """Append the step to the draft."""
        draft, units = self.draft, self.model.units
        for bucket in self.buckets.all:
            draft.prefix = f"step/zero/{bucket.name}"
            self._zero(bucket)
        micro_batches = self.strategy.gradient_accumulation_steps
        once = visits(self.model, self.strategy)
        for micro_batch in range(micro_batches):
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
                    self.passes.backward(visit, ())
                    self._contribute(visit.unit, last=micro_batch == micro_batches - 1)
                else:
                    self.passes.forward(visit, self._parameters(visit.unit))
        if not self.options.overlap_grad_reduce:
            draft.prefix = "step/backward/end"
            self._reduce(self.buckets.all)
        self._update()

    def _parameters(self, unit: int) -> tuple[Edge, ...]:
        """What the first reads of a step wait for: gathers of the step before, or of this one."""
        needed = [run.bucket for run in self.buckets.runs[unit] if run.bucket not in self._waited]
        self._waited.update(needed)
        if not self.options.overlap_param_gather:
            return tuple(Previous(self._gather_path(bucket)) for bucket in needed)
        found: list[Edge] = []
        for bucket in needed:
            self._gather_ahead(bucket)
            if bucket + 1 < len(self.buckets.all):
                self._gather_ahead(bucket + 1)
            found.append(self._gathered[bucket])
        return tuple(found)

    def _gather_ahead(self, number: int) -> None:
        """Dispatch the gather of a bucket's parameters, unless that is done."""
        if number not in self._gathered:
            bucket = self.buckets.all[number]
            after = Previous(f"step/update/{bucket.name}/{self._last}")
            self._gathered[number] = self._gather(self.draft, bucket, after)

    @property
    def _last(self) -> str:
        """What an update ends with."""
        return "cast" if self.strategy.precision.has_master else "update"

    def _gather_path(self, number: int) -> str:
        return f"step/update/{self.buckets.all[number].name}/gather"

    def _gather(self, draft: Draft, bucket: Bucket, after: Edge) -> str:
        """Gather the updated parameters of a bucket group in place."""
        parameter = self.states[bucket.index].parameter
        overlaps = self.options.overlap_param_gather
        path = draft.path(f"gather/{bucket.name}") if overlaps else self._gather_path(bucket.index)
        member = AllGather(
            id=f"{path}/member",
            stream=COMMUNICATION,
            group=DATA,
            source=own_view(draft, bucket, parameter),
            target=draft.all(parameter),
            wire=self.strategy.precision.compute,
        )
        return draft.add(Together(id=path, stream=COMMUNICATION, after=(after,), members=(member,)))

    def _contribute(self, unit: int, *, last: bool) -> None:
        """Add what backward of a unit made; reduce the buckets that are ready."""
        draft = self.draft
        ready: list[Bucket] = []
        for position, run in enumerate(self.buckets.runs[unit]):
            bucket, progress = self.buckets.all[run.bucket], self._progress[run.bucket]
            source = self.passes.transient(unit, position)
            target = self._gradient(bucket)
            whole = View(buffer=target, start=run.start, size=run.size)
            progress.written = draft.add(
                Copy(
                    id=draft.path(f"add/{target}"),
                    stream=COMPUTE,
                    source=draft.all(source),
                    target=whole if run.layout is None else draft.all(target),
                    accumulate=True,
                    divisor=self.strategy.gradient_accumulation_steps,
                    by_parameter=run.layout is not None,
                )
            )
            draft.free(source)
            if last:
                progress.contributions += 1
                if progress.contributions == self._expected[run.bucket]:
                    ready.append(bucket)
        if self.options.overlap_grad_reduce:
            for bucket in ready:
                self._reduce((bucket,))

    def _reduce(self, ready: Sequence[Bucket]) -> None:
        """Scale and reduce-scatter a bucket group in place."""
        draft, options = self.draft, self.options
        members: list[ReduceScatter] = []
        for bucket in ready:
            target = self._gradient(bucket)
            view, wire = draft.all(target), draft.buffers[target].dtype
            progress = self._progress[bucket.index]
            if not options.average_in_collective:
                progress.written = draft.add(
                    Copy(
                        id=draft.path(f"scale/{target}"),
                        stream=COMPUTE,
                        source=view,
                        target=view,
                        divisor=self.strategy.replicas,
                    )
                )
            mean = options.average_in_collective
            members.append(
                ReduceScatter(
                    id=draft.path(f"reduce/{bucket.name}/member"),
                    stream=COMMUNICATION,
                    group=DATA,
                    source=view,
                    target=own_view(draft, bucket, target),
                    reduction=Reduction.AVERAGE if mean else Reduction.SUM,
                    wire=wire,
                    accumulate=wire,
                )
            )
        reduced = draft.add(
            Together(
                id=draft.path(f"reduce/{ready[0].name}"),
                stream=COMMUNICATION,
                after=tuple(self._progress[bucket.index].written for bucket in ready),
                members=tuple(members),
            )
        )
        for bucket in ready:
            self._progress[bucket.index].written = reduced
        if self.strategy.replicate > 1:
            self._all_reduce(ready)

    def _all_reduce(self, ready: Sequence[Bucket]) -> None:
        """Sum what is scattered inside one instance of the optimizer over all instances."""
        draft, mean = self.draft, self.options.average_in_collective
        members: list[AllReduce] = []
        for bucket in ready:
            target = self._gradient(bucket)
            view, wire = own_view(draft, bucket, target), draft.buffers[target].dtype
            members.append(
                AllReduce(
                    id=draft.path(f"all_reduce/{bucket.name}/member"),
                    stream=COMMUNICATION,
                    group=REPLICATE,
                    source=view,
                    target=view,
                    reduction=Reduction.AVERAGE if mean else Reduction.SUM,
                    wire=wire,
                    accumulate=wire,
                )
            )
        path = draft.path(f"all_reduce/{ready[0].name}")
        draft.add(Together(id=path, stream=COMMUNICATION, members=tuple(members)))
        for bucket in ready:
            self._progress[bucket.index].written = path

    def _update(self) -> None:
        draft = self.draft
        trained = [
            Trained(
                name=bucket.name,
                layout=bucket.layout,
                gradient=own_view(draft, bucket, self._gradient(bucket)),
                measured=own_view(draft, bucket, self._gradient(bucket)),
                after=(self._progress[bucket.index].written,),
                parameter=own_view(draft, bucket, state.parameter),
                master=None if state.master is None else draft.all(state.master),
                moments=tuple(draft.all(moment) for moment in state.moments),
                keeps_gradient=True,
            )
            for bucket, state in zip(self.buckets.all, self.states, strict=True)
        ]
        numbers = {bucket.name: bucket for bucket in self.buckets.all}

        def updated(draft: Draft, item: Trained, operation: str) -> None:
            if not self.options.overlap_param_gather:
                self._gather(draft, numbers[item.name], operation)

        after = tuple(dict.fromkeys(progress.written for progress in self._progress))
        Ending(draft, self.strategy, trained, measured_after=after, updated=updated).write()
