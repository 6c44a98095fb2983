"""DeepSpeed's ZeRO stage 3, as its runtime orders it from the second iteration on.

Parameters are padded and cut one by one. Each unit is a submodule: it gathers those of its
parameters that are not there, waits, and gathers ahead what the recorded order has next, a limited
number of elements; after it those are freed that are not used again soon. Small parameters stay
from one update to the next. Gradients are reduced in every micro-batch. As a checkpointed unit is
run again right before its backward, the two are one visit here.

A unit is what DeepSpeed calls a leaf module (`set_z3_leaf_modules`). Without leaf modules its
submodules are single layers: gathers are smaller, and more of them are ahead.
"""

from zsim.memory import book, peak_bytes
from zsim.model.model import Model
from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.runtimes.deepspeed.stage_3_gather import Gathers
from zsim.runtimes.deepspeed.stage_3_reduce import Reductions
from zsim.runtimes.deepspeed.stage_3_shards import Shards, shards
from zsim.runtimes.deepspeed.stage_3_trace import fetches
from zsim.runtimes.deepspeed.stage_3_volume import VOLUME
from zsim.runtimes.deepspeed.update import MeasuredGroups
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, whole
from zsim.zero.forward_backward import Passes
from zsim.zero.optimizer_step import Trained
from zsim.zero.state import BucketState, Holding, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMPUTE, POOL, Draft

ALL_GATHER = "all_gather"
REDUCE = "reduce"
STEPS = 2
"""Steps after which the book of a program repeats."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What DeepSpeed does with stage 3 to train `model` on `strategy.data` ranks.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(DeepSpeed)
    need_fitting(model, strategy)
    draft = Draft()
    sharded = shards(model, strategy, options)
    holding = Holding(
        parameter=strategy.precision.compute,
        parameter_sharded=True,
        optimizer=strategy.precision.optimizer,
        optimizer_sharded=True,
        has_master=True,
        moments=strategy.moments,
    )
    states = write_setup(draft, sharded.groups, holding)
    step = _Step(draft, model, strategy, options=options, shards=sharded, states=states)
    step.write_setup()
    setup, draft.operations = draft.operations, []
    step.write()
    return framed(
        "DeepSpeed ZeRO-3",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(draft, setup),
        streams=tuple(dict.fromkeys((COMPUTE, step.gathers.stream, step.reductions.stream))),
        layouts=(*sharded.layouts, *step.gathers.layouts, *step.reductions.layouts),
        peak_of=_worst_case,
    )


def _worst_case(program: Program) -> int:
    """The largest book if memory returns as late as waits of the host allow."""
    return peak_bytes(book(program, STEPS), POOL)


class _Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        options: DeepSpeed,
        shards: Shards,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.options = options
        self.shards = shards
        self.states = states
        overlaps = options.overlap_comm is not False
        self.gathers = Gathers(
            draft,
            strategy,
            shards=shards,
            states=states,
            stream=ALL_GATHER if overlaps else COMPUTE,
        )
        self.passes = Passes(draft, model, strategy, buckets=shards.parameters, held=self._held)
        self.reductions = Reductions(
            draft,
            strategy,
            options,
            shards=shards,
            passes=self.passes,
            stream=REDUCE if overlaps else COMPUTE,
        )

    def _held(self, parameter: int, _visit: UnitVisit) -> str:
        return self.gathers.whole(parameter)

    def write_setup(self) -> None:
        """What lives as long as the shards: gradients, the bucket, small parameters."""
        self.reductions.write_setup()
        self.draft.prefix = "setup/persistent"
        self.gathers.setup_persistent()

    def write(self) -> None:
        """Append the step to the draft."""
        draft, units = self.draft, self.model.units
        once = visits(self.model, self.strategy)
        needs = [
            tuple(sorted(run.bucket for run in self.shards.parameters.runs[visit.unit]))
            for visit in once
        ]
        sizes = [bucket.elements for bucket in self.shards.parameters.all]
        trace = fetches(needs, sizes, self.shards.persistent, self.options)
        used = ""
        for micro_batch in range(self.strategy.gradient_accumulation_steps):
            self.passes.micro_batch = self.reductions.micro_batch = micro_batch
            for number, visit in enumerate(once):
                part = f"step/{'backward' if visit.backward else 'forward'}/mb{micro_batch}"
                draft.prefix = part
                if number == 0:
                    self.passes.load()
                if number == len(units):
                    self.passes.seed()
                draft.prefix = f"{part}/{units[visit.unit].name}"
                after = self.gathers.fetch(needs[number], trace[number])
                run = self.passes.backward if visit.backward else self.passes.forward
                used = run(visit, after)
                if visit.backward:
                    self.reductions.collect(visit.unit, used)
                self.gathers.release(trace[number].freed, used)
            draft.prefix = f"step/backward/mb{micro_batch}/end"
            self.reductions.end_backward()
        self._update(used)

    def _update(self, used: str) -> None:
        draft, groups = self.draft, self.shards.groups
        draft.prefix = "step/update"
        self.gathers.free_persistent(used)
        reduced = (self.reductions.finished,) if self.reductions.finished else ()
        trained = [
            Trained(
                name=group.name,
                layout=group.layout,
                gradient=draft.all(self.reductions.gradient(group)),
                measured=draft.all(self.reductions.gradient(group)),
                after=reduced,
                parameter=draft.all(state.parameter),
                master=None if state.master is None else draft.all(state.master),
                moments=tuple(draft.all(moment) for moment in state.moments),
                keeps_gradient=True,
            )
            for group, state in zip(groups.all, self.states, strict=True)
            if not group.frozen
        ]
        MeasuredGroups(
            draft, self.strategy, trained, measured_after=reduced, stream=COMPUTE
        ).write()
        draft.prefix = "step/end"
        self.gathers.end_step(f"step/update/{groups.trained[-1].name}/cast")
