"""DeepSpeed's ZeRO stages 1 and 2: flat parameters cut anywhere, gradients reduced by all-reduce.

As `runtime/zero/stage_1_and_2.py` does it (0.19). All parameters stand in one flat tensor, padded
to a multiple of twice the ranks; each rank updates an N-th of it, whose borders cut through
parameters. Gradients are copied into a bucket as backward makes them; a full bucket is divided by
the ranks, all-reduced, and what the rank owns of it is kept. Stage 1 does so once a step, stage 2
in every micro-batch. The norm is reduced in every step, clipping or not. One gather in place ends
the step. One group of parameters is assumed. What is
frozen is in none (`bit16_groups` has what `requires_grad`) and stays as it is, here in one tensor.
"""

from collections import Counter

from zsim.closed_form.deepspeed12 import VOLUME
from zsim.model import Model, Parameter
from zsim.operation import AllGather, Copy, Edge, Previous, View
from zsim.runtime.deepspeed import DeepSpeed
from zsim.schedule import Kind, Schedule
from zsim.strategy import Strategy
from zsim.zero.bucket import Buckets, Place, Run, numbered, one_after_the_other
from zsim.zero.draft import COMPUTE, DATA, Draft
from zsim.zero.emulate.deepspeed12_reduce import REDUCTION, Reductions
from zsim.zero.emulate.deepspeed_update import MeasuredGroups
from zsim.zero.flow import UnitVisit, visits
from zsim.zero.frame import framed, need_fitting, whole
from zsim.zero.optimizer import Trained
from zsim.zero.passes import Passes
from zsim.zero.state import BucketState, Holding, gather_path, own_view, write_setup

ALIGNMENT = 2
"""The flat tensor is a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What DeepSpeed does to train `model` in the stage of `strategy`, 1 or 2.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(DeepSpeed)
    need_fitting(model, strategy)
    place = flat(strategy.data)
    kinds = [[each for each in model.parameters if each.frozen is kind] for kind in (False, True)]
    groups = [group for group in kinds if group]
    buckets = numbered(model, groups, place=place, ranks=strategy.data)
    draft = Draft()
    precision = strategy.precision
    holding = Holding(
        parameter=precision.compute,
        parameter_sharded=False,
        optimizer=precision.optimizer,
        optimizer_sharded=True,
        has_master=True,
        moments=strategy.moments,
    )
    states = write_setup(draft, buckets, holding)
    setup, draft.operations = draft.operations, []
    _Step(draft, model, strategy, options=options, buckets=buckets, states=states).write()
    return framed(
        f"DeepSpeed ZeRO stage {strategy.stage}",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=(COMPUTE, REDUCTION) if options.overlap_comm else (COMPUTE,),
        layouts=buckets.layouts,
    )


def flat(ranks: int) -> Place:
    """Parameters without gaps, the end padded to a multiple of twice the ranks."""
    return one_after_the_other(ALIGNMENT * ranks)


class _Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        options: DeepSpeed,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.states = states
        (self.bucket,) = buckets.trained
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self.reductions = Reductions(draft, strategy, options, bucket=self.bucket)
        self._uses = Counter(each.name for unit in model.units for each in unit.parameters)
        self._starts = {
            parameter.name: start
            for runs in buckets.runs
            for run in runs
            for parameter, start in zip(run.parameters, run.starts, strict=True)
        }

    def _held(self, bucket: int, _visit: UnitVisit) -> str:
        return self.states[bucket].parameter

    def write(self) -> None:
        """Append the step to the draft."""
        draft, units = self.draft, self.model.units
        once = visits(self.model, self.strategy)
        micro_batches = self.strategy.gradient_accumulation_steps
        fresh: tuple[Edge, ...] = (Previous(gather_path(self.bucket)),)
        for micro_batch in range(micro_batches):
            self.passes.micro_batch = micro_batch
            last = micro_batch == micro_batches - 1
            contributed: Counter[str] = Counter()
            for position, visit in enumerate(once):
                part = f"step/{'backward' if visit.backward else 'forward'}/mb{micro_batch}"
                draft.prefix = part
                if position == 0:
                    self.passes.load()
                if position == len(units):
                    self.passes.seed()
                    self._begin_backward(last=last)
                draft.prefix = f"{part}/{units[visit.unit].name}"
                if visit.backward:
                    self.passes.backward(visit, ())
                    self._contribute(visit.unit, micro_batch, contributed, last=last)
                else:
                    self.passes.forward(visit, fresh)
                    fresh = ()
            draft.prefix = f"step/backward/mb{micro_batch}/end"
            self._end_backward(last=last)
        self._update()

    def _begin_backward(self, *, last: bool) -> None:
        if self.strategy.stage == 2 or (last and self.options.overlap_comm):
            self.reductions.begin()

    def _contribute(
        self, unit: int, micro_batch: int, contributed: Counter[str], *, last: bool
    ) -> None:
        """Move a unit's gradients where they collect: the bucket, or whole ones in stage 1."""
        ready: list[Parameter] = []
        for position, run in self.buckets.trained_runs(unit):
            source = self.passes.transient(unit, position)
            for parameter, view in reversed(_views(source, run)):
                first = not contributed[parameter.name]
                contributed[parameter.name] += 1
                complete = contributed[parameter.name] == self._uses[parameter.name]
                if self.strategy.stage == 1:
                    self._accumulate(parameter, view, adds=not first or micro_batch > 0)
                    ready += [parameter] if complete else []
                elif self._uses[parameter.name] == 1:
                    self._bucket(parameter, view, divides=True)
                else:
                    self._tie(parameter, view, first=first, complete=complete)
            self.draft.free(source)
        if self.strategy.stage == 1 and last and self.options.overlap_comm:
            for parameter in ready:
                self._bucket(parameter, self._accumulated(parameter), divides=False)

    def _bucket(self, parameter: Parameter, source: View, *, divides: bool) -> None:
        micro_batches = self.strategy.gradient_accumulation_steps
        self.reductions.add(
            parameter.name,
            source,
            self._starts[parameter.name],
            divisor=micro_batches if divides else 1,
        )

    def _accumulated(self, parameter: Parameter) -> View:
        """A parameter in the whole gradients of stage 1, in the format of the optimizer."""
        name = self.draft.buffer(
            "accumulated",
            self.bucket.padded,
            self.strategy.precision.optimizer,
            Kind.GRADIENT,
            layout=self.bucket.name,
        )
        return View(buffer=name, start=self._starts[parameter.name], size=parameter.elements)

    def _accumulate(self, parameter: Parameter, source: View, *, adds: bool) -> None:
        target = self._accumulated(parameter)
        if target.buffer not in self.draft.alive:
            self.draft.allocate(target.buffer)
        self._copy(
            f"accumulate/{parameter.name}",
            source,
            target,
            adds=adds,
            divisor=self.strategy.gradient_accumulation_steps,
        )

    def _tie(self, parameter: Parameter, source: View, *, first: bool, complete: bool) -> None:
        """The gradient of a parameter that several units use: the sum, until it is complete."""
        name = self.draft.buffer(
            f"tied/{parameter.name}",
            parameter.elements,
            self.strategy.precision.compute,
            Kind.WORKSPACE,
        )
        if first:
            self.draft.allocate(name)
        self._copy(f"tie/{parameter.name}", source, self.draft.all(name), adds=not first)
        if complete:
            self._bucket(parameter, self.draft.all(name), divides=True)
            self.draft.free(name)

    def _copy(self, name: str, source: View, target: View, *, adds: bool, divisor: int = 1) -> None:
        self.draft.add(
            Copy(
                id=self.draft.path(name),
                stream=COMPUTE,
                source=source,
                target=target,
                accumulate=adds,
                divisor=divisor,
            )
        )

    def _end_backward(self, *, last: bool) -> None:
        """Reduce what is left; in stage 1 everything, and only in the last micro-batch."""
        if self.strategy.stage == 2:
            self.reductions.finish(last=last)
            return
        if not last:
            return
        if not self.options.overlap_comm:
            self.reductions.begin()
            for parameter in reversed(self.model.parameters):
                if not parameter.frozen:
                    self._bucket(parameter, self._accumulated(parameter), divides=False)
        self.reductions.finish(last=last)
        self.draft.free("accumulated")

    def _update(self) -> None:
        draft, bucket = self.draft, self.bucket
        state = self.states[bucket.index]
        reduced = self.reductions.reduced
        assert state.master is not None
        trained = Trained(
            name=bucket.name,
            gradient=draft.all(reduced.buffer),
            measured=draft.all(reduced.buffer),
            after=(reduced.operation,),
            parameter=own_view(draft, bucket, state.parameter),
            master=draft.all(state.master),
            moments=tuple(draft.all(moment) for moment in state.moments),
        )

        def gather(draft: Draft, _item: Trained, _updated: str) -> None:
            draft.add(
                AllGather(
                    id=draft.path("gather"),
                    stream=COMPUTE,
                    group=DATA,
                    source=own_view(draft, bucket, state.parameter),
                    target=draft.all(state.parameter),
                    wire=self.strategy.precision.compute,
                )
            )

        after = (reduced.operation,)
        ending = MeasuredGroups(
            draft, self.strategy, [trained], measured_after=after, updated=gather, stream=COMPUTE
        )
        ending.write()


def _views(source: str, run: Run) -> list[tuple[Parameter, View]]:
    """Each parameter's gradient in what backward made of a run."""
    found: list[tuple[Parameter, View]] = []
    start = 0
    for parameter in run.parameters:
        found.append((parameter, View(buffer=source, start=start, size=parameter.elements)))
        start += parameter.elements
    return found
