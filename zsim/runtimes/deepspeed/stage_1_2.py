"""DeepSpeed's ZeRO stages 1 and 2: flat parameters cut anywhere, gradients reduced by all-reduce.

As `runtime/zero/stage_1_and_2.py` does it (0.19). The parameters of each group, which are updated
by one rule, stand in one flat tensor (`bit16_groups_flat`), padded to a multiple of twice the
ranks; each rank updates an N-th of it, whose borders cut through parameters. Gradients are copied
into a bucket as backward makes them; a full bucket is divided by the ranks, all-reduced, and what
the rank owns of it is kept. Stage 1 does so once a step, stage 2 in every micro-batch. The norm of
each group is reduced in every step, clipping or not. A gather in place of each ends the step.
What is frozen is in no group (`bit16_groups` has what `requires_grad`) and stays as it is, here in
one tensor.
"""

from collections import Counter

from zsim.model.model import Model, Parameter
from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.runtimes.deepspeed.stage_1_2_reduce import REDUCTION, Reductions
from zsim.runtimes.deepspeed.stage_1_2_volume import VOLUME
from zsim.runtimes.deepspeed.update import MeasuredGroups
from zsim.schedule.operation import AllGather, Copy, Edge, Previous, View
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, whole
from zsim.zero.bucket import Bucket, Buckets, Place, Run, numbered, one_after_the_other
from zsim.zero.forward_backward import Passes
from zsim.zero.optimizer_step import Trained
from zsim.zero.parameter_groups import by_rule
from zsim.zero.state import BucketState, Holding, gather_path, own_view, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMPUTE, DATA, Draft

ALIGNMENT = 2
"""Shards begin at multiples of so many elements (`nccl_start_alignment_factor`)."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What DeepSpeed does to train `model` in the stage of `strategy`, 1 or 2.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(DeepSpeed)
    need_fitting(model, strategy)
    place = flat(strategy.data)
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    frozen = [parameter for parameter in model.parameters if parameter.frozen]
    groups = [*by_rule(trained, strategy), *([frozen] if frozen else [])]
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
    return one_after_the_other(ranks, alignment=ALIGNMENT)


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
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self.reductions = Reductions(draft, strategy, options, flats=buckets.trained)
        self._uses = Counter(each.name for unit in model.units for each in unit.parameters)
        self._places = {
            parameter.name: (buckets.all[run.bucket], start)
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
        fresh: tuple[Edge, ...] = (Previous(gather_path(self.buckets.trained[-1])),)
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
        runs = self.buckets.trained_runs(unit)
        sources = [self.passes.transient(unit, position) for position, _ in runs]
        views = {
            parameter.name: view
            for source, (_, run) in zip(sources, runs, strict=True)
            for parameter, view in _views(source, run)
        }
        for parameter in reversed(self.model.units[unit].parameters):
            if parameter.frozen:
                continue
            view = views[parameter.name]
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
        for source in sources:
            self.draft.free(source)
        if self.strategy.stage == 1 and last and self.options.overlap_comm:
            for parameter in ready:
                self._bucket(parameter, self._accumulated(parameter), divides=False)

    def _bucket(self, parameter: Parameter, source: View, *, divides: bool) -> None:
        micro_batches = self.strategy.gradient_accumulation_steps
        self.reductions.add(
            parameter.name,
            source,
            *self._places[parameter.name],
            divisor=micro_batches if divides else 1,
        )

    def _accumulated(self, parameter: Parameter) -> View:
        """A parameter in the whole gradients of stage 1, in the format of the optimizer."""
        flat, start = self._places[parameter.name]
        name = self.draft.buffer(
            f"{flat.name}/accumulated",
            flat.padded,
            self.strategy.precision.optimizer,
            Kind.GRADIENT,
            layout=flat.name,
        )
        return View(buffer=name, start=start, size=parameter.elements)

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
            trained = [parameter for parameter in self.model.parameters if not parameter.frozen]
            for group in by_rule(trained, self.strategy):
                for parameter in reversed(group):
                    self._bucket(parameter, self._accumulated(parameter), divides=False)
        self.reductions.finish(last=last)
        for flat in self.buckets.trained:
            self.draft.free(f"{flat.name}/accumulated")

    def _update(self) -> None:
        draft, flats = self.draft, {bucket.name: bucket for bucket in self.buckets.trained}
        trained = [self._trained(each, self.states[each.index]) for each in self.buckets.trained]

        def gather(draft: Draft, item: Trained, _updated: str) -> None:
            bucket = flats[item.name]
            parameter = self.states[bucket.index].parameter
            draft.add(
                AllGather(
                    id=draft.path("gather"),
                    stream=COMPUTE,
                    group=DATA,
                    source=own_view(draft, bucket, parameter),
                    target=draft.all(parameter),
                    wire=self.strategy.precision.compute,
                )
            )

        after = tuple(dict.fromkeys(edge for item in trained for edge in item.after))
        ending = MeasuredGroups(
            draft, self.strategy, trained, measured_after=after, updated=gather, stream=COMPUTE
        )
        ending.write()

    def _trained(self, bucket: Bucket, state: BucketState) -> Trained:
        draft, reduced = self.draft, self.reductions.reduced[bucket.index]
        assert state.master is not None
        return Trained(
            name=bucket.name,
            layout=bucket.layout,
            gradient=draft.all(reduced.buffer),
            measured=draft.all(reduced.buffer),
            after=(reduced.operation,),
            parameter=own_view(draft, bucket, state.parameter),
            master=draft.all(state.master),
            moments=tuple(draft.all(moment) for moment in state.moments),
        )


def _views(source: str, run: Run) -> list[tuple[Parameter, View]]:
    """Each parameter's gradient in what backward made of a run."""
    found: list[tuple[Parameter, View]] = []
    start = 0
    for parameter in run.parameters:
        found.append((parameter, View(buffer=source, start=start, size=parameter.elements)))
        start += parameter.elements
    return found
