"""Proves values: any step of a schedule, run on exact numbers, is the step of plain training.

The state of training is arbitrary, and stored in persistent buffers with the layout that setup
leaves. A step is run from there, on each path through its branches. If it leaves a place with
another content than the layout says, that place is dropped from the layout and may then hold any
number. The step is run again until nothing more is dropped (Flanagan and Leino 2001, Houdini). A
constant that a step overwrites before it reads it is dropped from the start. If the remaining
layout holds all parameters and moments, every step of training of any length is proved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log2, prod

import numpy as np

from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Segment, Unit, Value
from zsim.proof.execution.class_memory import ClassMemory
from zsim.proof.execution.collective_runner import CollectiveRunner, UnfollowedError
from zsim.proof.execution.computations import Kernels
from zsim.proof.execution.constant_factors import hidden
from zsim.proof.execution.element_links import ElementLinks
from zsim.proof.execution.grid import Along, Grid, every
from zsim.proof.execution.inferred_model import CONTEXT, EXPERT, TENSOR, Training, expert_axes
from zsim.proof.execution.interpreter import Interpreter
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.persistent import LaidOut, Persistent, StateDifference
from zsim.proof.execution.representatives import tracked
from zsim.proof.execution.rows_as_places import kinds_of
from zsim.proof.execution.segments import Departure
from zsim.proof.execution.tensors import Tensors
from zsim.proof.execution.unions import Adopted
from zsim.schedule.operation import Branch
from zsim.schedule.schedule import Schedule
from zsim.specification.delayed import DelayedState
from zsim.specification.residues import BITS, Numbers, Random
from zsim.specification.step import PlainStep, TensorCuts, TrainingState
from zsim.strategy.optimizer_rule import settled

STEPS, SCALE = 1009.0, 2.0**13
"""Remaining steps of a warm-up, and a loss scale, distinct from all other numbers."""

ROUNDS_MAX = 64
"""Maximum number of rounds that drop parts of a layout; then the proof fails."""

_NOWHERE = np.zeros(0, np.int64)

RANKS_MAX = 4096
"""Maximum number of ranks that are run; a rank may represent a class."""


class TooManyRanksError(Exception):
    """Raised if a proof would have to run too many ranks; the message says how many."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Result of the runs; empty if values are proved.

    `departures` are the first segments with other inputs than in plain training.
    """

    differences: list[StateDifference] = field(default_factory=list[StateDifference])
    departures: list[Departure] = field(default_factory=list[Departure])
    failures: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    error_bits: int = 0


_LOSS = Value(name="loss", elements=1, dtype=DType.FP32)
UNKNOWN = Model(
    name="unknown",
    units=(Unit(name="", parameters=(), segments=(Segment(inputs=(BATCH,), outputs=(_LOSS,)),)),),
    batch=Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False),
)
"""Placeholder for an unknown model, which has no segment of the schedule."""


class StepProof:
    """One schedule, cut into pieces and ready to run."""

    def __init__(
        self,
        schedule: Schedule,
        model: Model | None,
        training: Training | None,
        *,
        seed: int,
        unfolded: bool = False,
    ) -> None:
        self.schedule = schedule
        judges = model is not None and training is not None
        self.model = model = model or UNKNOWN
        self.training = training = training or Training(
            micro_batches=1, divisor=1, rules={}, clip=None
        )
        self.misfits: list[tuple[str, str, str]] = []
        along, parts = (every(schedule), {}) if unfolded else tracked(schedule)
        if not self._cut_tensors(along, parts):
            self._cut_tensors(every(schedule), {})
        self.random = Random(seed)
        self.layout: list[LaidOut] = []
        self.counted = self._counted() if judges else []
        self.moves = Moves(self.tensors)
        self.cut = self._cut()
        self.moments = max((rule.moments for rule in training.rules.values()), default=0)
        self.plain = self._plain()
        self.initial = self.plain.state(0, 0.0)
        self.kernels = Kernels(
            self.tensors,
            self.moves,
            random=self.random,
            plain=self.plain,
            initial=self.initial.parameters,
            overflows=judges and training.overflows,
        )
        self.kernels.divisor = training.divisor
        self.kernels.judges = self.kernels.measures.judges = judges
        self.interpreter = Interpreter(
            self.tensors, CollectiveRunner(self.grid, self.tensors), self.kernels, self.moves
        )
        self.persistent = Persistent(
            self.tensors,
            self.moves,
            self.kernels.contents,
            random=self.random,
            initial=self.initial,
            moments={
                name: 0 if name in model.frozen else rule.moments
                for name, rule in training.rules.items()
            },
            delayed=training.warm_up is not None,
        )

    def _counted(self) -> list[str]:
        """Return the scalar on which branches decide, if updates are delayed after a warm-up.

        Raises:
            UnfollowedError: branches decide on a scalar without a warm-up, or on several scalars.
        """
        found: dict[str, str] = {}
        for program in self.schedule.programs:
            for operation in program.step_patterns:
                if isinstance(operation, Branch) and operation.scalar is not None:
                    found.setdefault(operation.scalar, operation.id)
        if len(found) > bool(self.training.warm_up):
            scalar, where = list(found.items())[-1]
            why = "which no warm-up of delayed updates counts"
            raise UnfollowedError(f"{where} decides on {scalar}, {why}")
        return list(found)

    def _cut_tensors(self, along: dict[str, Along], parts: Adopted) -> bool:
        """Cut all tensors for the ranks that are run; return True if these represent all others.

        Raises:
            TooManyRanksError: more than `RANKS_MAX` ranks would have to be run.
        """
        ranks = prod(len(each.coordinates) for each in along.values())
        if ranks > RANKS_MAX:
            raise TooManyRanksError(f"{ranks} ranks that no class stands for")
        self.grid = Grid(self.schedule, along)
        self.tensors = Tensors(self.schedule, self.grid, parts)
        links = ElementLinks(self.tensors, self.model)
        links.add()
        self.tensors.close(self.grid.classes)
        self.misfits = links.misfits
        return not self.tensors.spaces.cuts_what_is_left_out()

    def _plain(self) -> PlainStep:
        return PlainStep(
            self.model, self.cut, self.random, micro_batches=self.training.micro_batches
        )

    def _cut(self) -> TensorCuts:
        spaces = self.tensors.spaces.by_key
        axes = self.grid.axes
        data = tuple(
            1 + place for place, name in enumerate(axes) if name in self.schedule.contract.data_axes
        )
        copied = {each.name for each in self.model.parameters if not each.tensor_sharded}
        tensor = 1 + axes.index(TENSOR) if TENSOR in axes else None
        if tensor is not None and len(self.grid.tracked[TENSOR].coordinates) == 1:
            tensor = None
        contract, mesh = self.schedule.contract, self.schedule.mesh
        tracked = [self.grid.tracked[name] for name in axes]
        return TensorCuts(
            shape=tuple(len(each.coordinates) for each in tracked),
            weights=tuple(each.weights for each in tracked),
            data=data,
            tensor=tensor,
            parameters={
                key[1]: (space.sizes * space.weights).tolist()
                for key, space in spaces.items()
                if key[0] == "parameter"
            },
            values={key[1]: space.count for key, space in spaces.items() if key[0] == "value"},
            whole={key[1]: space.count for key, space in spaces.items() if key[0] == "whole"},
            copied=frozenset(copied),
            context=1 + axes.index(CONTEXT) if CONTEXT in axes else None,
            shared={key[1]: space.count for key, space in spaces.items() if key[0] == "shared"},
            experts=frozenset(each.name for each in contract.parameters if each.expert),
            expert=tuple(
                1 + place for place, name in enumerate(axes) if name in contract.expert_axes
            ),
            swap=tuple(1 + axes.index(name) for name in expert_axes(mesh, EXPERT)),
            joins=tuple(1 + axes.index(name) for name in expert_axes(mesh)),
            joined={key[1]: space.count for key, space in spaces.items() if key[0] == "joined"},
            kinds=kinds_of(self.schedule, self.model),
        )

    def run(self, scalars: Mapping[str, float]) -> StepResult:
        """Run steps from states in which the host has `scalars`, and return the result.

        Raises:
            UnfollowedError: the schedule has operations that the proof cannot follow.
        """
        outcome = StepResult(error_bits=self._error_bits())
        if self.training.overflows and not self.kernels.tests_overflow and self._trains():
            why = "tests no gradient for overflow (FINITE), and the strategy trains in fp16"
            outcome.failures["", "step"] = why
        self.layout = layout = self.persistent.begin(self._setup())
        for _ in range(ROUNDS_MAX):
            kept, differences = self._round(layout, scalars)
            outcome.failures.update(self.interpreter.failures)
            if not differences:
                break
            if not outcome.differences:
                outcome.differences = differences
            self.layout = layout = kept
        else:
            why = (
                f"each of {ROUNDS_MAX} steps leaves persistent buffers otherwise than it found them"
            )
            outcome.failures["", "step"] = why
        missing = [*self.persistent.missing(layout), *self.persistent.drifting(layout)]
        if not missing:
            outcome.differences = []
        elif outcome.differences:
            self._explain(outcome, scalars)
        else:
            outcome.differences = missing
        return outcome

    def _trains(self) -> bool:
        """Return True if the model has a parameter that is not frozen."""
        return any(each.name not in self.model.frozen for each in self.model.parameters)

    def stands_for_more(self, alike: Iterable[Sequence[str]]) -> bool:
        """Return True if all segments have the inputs of plain training.

        Persistent buffers in one sequence of `alike` must have equal layouts, too.
        """
        return not self.kernels.segments.departed and all(
            np.array_equal(places.get(name, _NOWHERE), places.get(names[0], _NOWHERE))
            for places in self.layout
            for names in alike
            for name in names
        )

    def _round(
        self, layout: list[LaidOut], scalars: Mapping[str, float]
    ) -> tuple[list[LaidOut], list[StateDifference]]:
        """Run a step on each path; return the remaining layout, and the differences."""
        scalars = {**scalars, **self._given()}
        plain = self.plain = self._plain()
        state = plain.state(self.moments, scalars["updates"])
        gradients = plain.gradients(state.parameters, self.training.divisor)
        used = plain.clipped(gradients, self.training.clip)
        rules = {name: settled(rule, scalars) for name, rule in self.training.rules.items()}
        none = {name: np.zeros_like(each) for name, each in state.parameters.items()}
        kept = [dict(each) for each in layout]
        differences: list[StateDifference] = []

        def apply(state: TrainingState, gradients: dict[str, Numbers]) -> TrainingState:
            return plain.updated(state, plain.clipped(gradients, self.training.clip), rules)

        for before in self._states(state):
            self.kernels.begin(plain, none | used | plain.loads)
            begun = {**scalars, **dict.fromkeys(self.counted, before.warm_up)}
            states = before.training, before.applied(apply)
            begin = partial(self.persistent.memory, layout, states, begun)
            cases = (False, True) if self.kernels.follows_overflow else (False,)
            for overflows, memory in self.interpreter.run_outcomes(begin, cases):
                after = before.after(gradients, apply, scale=1.0, overflows=overflows)
                if plain.loads:
                    after = replace(after, training=plain.balanced(after.training, rules))
                differences += self.persistent.compare(
                    memory,
                    layout,
                    kept,
                    (after.training, after.applied(apply)),
                    overflows=overflows,
                )
        return kept, differences

    def _states(self, state: TrainingState) -> Iterator[DelayedState]:
        """Yield initial states of steps: any state if updates are not delayed.

        Otherwise yield the first step of the warm-up, its last step, the first step whose
        gradients are kept, and steps with pending gradients of the previous step.
        """
        waiting = DelayedState(training=state, pending={})
        if self.training.warm_up is None:
            yield replace(waiting, warm_up=1.0)
            return
        if self.training.warm_up:
            yield replace(waiting, warm_up=STEPS)
            yield replace(waiting, warm_up=1.0)
        yield waiting
        parameters = state.parameters.items()
        pending = {name: self.random.draw(each.shape[1:]) for name, each in parameters}
        kept = replace(state, updates=state.updates - 1)
        yield replace(waiting, training=kept, pending=pending, scale=SCALE, valid=True)
        if self.kernels.follows_overflow:
            yield replace(waiting, pending=pending, valid=True, overflowed=True)

    def _given(self) -> dict[str, float]:
        """Draw values of given scalars for a step: any numbers."""
        names = [scalar.name for scalar in self.schedule.scalars if scalar.given]
        drawn = self.random.draw((len(names),))[0]
        return {name: float(each) / 2**31 for name, each in zip(names, drawn, strict=True)}

    def _explain(self, outcome: StepResult, scalars: Mapping[str, float]) -> None:
        """Run the first round again to find where it departs from plain training."""
        self.kernels.explains = True
        self._round(self.persistent.begin(self._setup()), scalars)
        outcome.departures = list(self.kernels.segments.departures)
        self.kernels.explains = False

    def unheld(self) -> list[StateDifference]:
        """Return the parameters from setup that the ranks together do not keep completely."""
        return list(self.persistent.missing(self.persistent.begin(self._setup())))

    def wander(self) -> dict[tuple[str, str], str]:
        """Run steps on all pairs of paths after setup; return faults independent of the model.

        Raises:
            UnfollowedError: the schedule has operations that the proof cannot follow.
        """
        memory = self._setup()
        self.kernels.begin(self.plain, {})
        for overflows in (False, False, True, True, False):
            self.interpreter.run(memory, setup=False, overflows=overflows)
        return self.interpreter.failures

    def _error_bits(self) -> int:
        """Return b such that the probability of overlooking a difference is below 2**-b.

        Kernels are random functions of a digest of their inputs, and factors are never zero. So a
        difference is lost only if a sum of differences, each times its own random number, happens
        to be zero: below 2**-BITS for each digest, square of a norm, and number compared. Large
        constants may be equal modulo both primes, too.
        """
        count = 1
        for ranks in self.grid.classes:
            count += 2 * int(np.prod(ranks.shape)) * len(ranks.program.by_id)
        count += sum(space.count for space in self.tensors.spaces.by_key.values())
        return int(-log2(count * 2.0**-BITS + hidden(self.schedule, self.training)))

    def _setup(self) -> list[ClassMemory]:
        """Run setup and return the memory that it leaves."""
        initial = {each.name: each.initial for each in self.schedule.scalars}
        memory = [ClassMemory(scalars=dict(initial)) for _ in self.grid.classes]
        self.interpreter.run(memory, setup=True, overflows=False)
        return memory
