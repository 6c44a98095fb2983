"""Proves values: any step of a schedule, run on exact numbers, is the step of plain training.

The state of training is arbitrary, and laid out in persistent buffers as setup lays it out. A step
is run from there, on each way of its branches; where what it leaves is not laid out in the same
way again, that layout is given up, any number may then be there, and the step is run again, until
nothing more is given up (Flanagan and Leino 2001, Houdini). A constant that a step writes over
before it reads it is given up from the start. If what is left holds all parameters and moments,
every step of any length of training is proved.
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
from zsim.proof.execution.inferred_model import CONTEXT, TENSOR, Training
from zsim.proof.execution.interpreter import Interpreter
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.persistent import LaidOut, Persistent, StateDifference
from zsim.proof.execution.representatives import tracked
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
"""Steps that are left of a warm-up, and a loss scale: numbers like no other."""

ROUNDS_MAX = 64
"""Times that a layout is given up in part before the proof is."""

_NOWHERE = np.zeros(0, np.int64)

RANKS_MAX = 4096
"""Ranks that are run at most, each for itself or for a class."""


class TooManyRanksError(Exception):
    """More ranks would have to be run than a proof runs; the message says how many."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Result of the runs: nothing of all this if values are proved.

    `departures` are the first segments that read something else than in plain training.
    """

    differences: list[StateDifference] = field(default_factory=list[StateDifference])
    departures: list[Departure] = field(default_factory=list[Departure])
    troubles: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    error_bits: int = 0


_LOSS = Value(name="loss", elements=1, dtype=DType.FP32)
UNKNOWN = Model(
    name="unknown",
    units=(Unit(name="", parameters=(), segments=(Segment(inputs=(BATCH,), outputs=(_LOSS,)),)),),
    batch=Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False),
)
"""Stands for a model of which nothing is known: no segment is its."""


class StepProof:
    """One schedule, cut and ready to run."""

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
        """Return the scalar that branches decide on, if updates are delayed after a warm-up.

        Raises:
            UnfollowedError: they decide on one without that, or on several.
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
        """Cut all tensors for the ranks that are run; whether these stand for the others.

        Raises:
            TooManyRanksError: more would have to be run than are.
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
        )

    def run(self, scalars: Mapping[str, float]) -> StepResult:
        """Run steps from the state that `scalars` of the host are of; what came of them.

        Raises:
            UnfollowedError: the schedule does what cannot be followed.
        """
        outcome = StepResult(error_bits=self._error_bits())
        if self.training.overflows and not self.kernels.tests_overflow and self._trains():
            why = "tests no gradient for overflow (FINITE), and the strategy trains in fp16"
            outcome.troubles["", "step"] = why
        self.layout = layout = self.persistent.begin(self._setup())
        for _ in range(ROUNDS_MAX):
            kept, differences = self._round(layout, scalars)
            outcome.troubles.update(self.interpreter.troubles)
            if not differences:
                break
            if not outcome.differences:
                outcome.differences = differences
            self.layout = layout = kept
        else:
            why = (
                f"each of {ROUNDS_MAX} steps leaves persistent buffers otherwise than it found them"
            )
            outcome.troubles["", "step"] = why
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
        """Return whether all segments read what plain training has them read.

        Persistent buffers whose names stand in a row have to be laid out alike, too.
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
        """Run a step on each of its ways: what is left of a layout, and what differs."""
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
            self.kernels.begin(plain, none | used)
            begun = {**scalars, **dict.fromkeys(self.counted, before.warm_up)}
            states = before.training, before.applied(apply)
            begin = partial(self.persistent.memory, layout, states, begun)
            ways = (False, True) if self.kernels.follows_overflow else (False,)
            for overflows, memory in self.interpreter.run_ways(begin, ways):
                after = before.after(gradients, apply, scale=1.0, overflows=overflows)
                differences += self.persistent.compare(
                    memory,
                    layout,
                    kept,
                    (after.training, after.applied(apply)),
                    overflows=overflows,
                )
        return kept, differences

    def _states(self, state: TrainingState) -> Iterator[DelayedState]:
        """Yield what steps begin with: any state where updates are not delayed, which is warm.

        Otherwise a first step, the last one of them, the first whose gradients are kept, and those
        that begin with gradients of the step before.
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
        """Draw what the caller gives for a step: any numbers."""
        names = [scalar.name for scalar in self.schedule.scalars if scalar.given]
        drawn = self.random.draw((len(names),))[0]
        return {name: float(each) / 2**31 for name, each in zip(names, drawn, strict=True)}

    def _explain(self, outcome: StepResult, scalars: Mapping[str, float]) -> None:
        """Run the first round again: where does it leave plain training?"""
        self.kernels.explains = True
        self._round(self.persistent.begin(self._setup()), scalars)
        outcome.departures = list(self.kernels.segments.departures)
        self.kernels.explains = False

    def unheld(self) -> list[StateDifference]:
        """Return parameters of which no rank keeps all that setup has made."""
        return list(self.persistent.missing(self.persistent.begin(self._setup())))

    def wander(self) -> dict[tuple[str, str], str]:
        """Run steps on all pairs of ways from what setup leaves; what is wrong whatever they train.

        Raises:
            UnfollowedError: the schedule does what cannot be followed.
        """
        memory = self._setup()
        self.kernels.begin(self.plain, {})
        for overflows in (False, False, True, True, False):
            self.interpreter.run(memory, setup=False, overflows=overflows)
        return self.interpreter.troubles

    def _error_bits(self) -> int:
        """Return b where a difference is overlooked with a probability below 2**-b.

        Kernels are random functions of a digest of what they read, and factors are never zero. So a
        difference is lost only where a sum of differences, each times a number of its own, happens
        to be zero: below 2**-BITS for each digest, square of a norm, and number compared. Large
        constants may be equal modulo both primes, too.
        """
        count = 1
        for ranks in self.grid.classes:
            count += 2 * int(np.prod(ranks.shape)) * len(ranks.program.by_id)
        count += sum(space.count for space in self.tensors.spaces.by_key.values())
        return int(-log2(count * 2.0**-BITS + hidden(self.schedule, self.training)))

    def _setup(self) -> list[ClassMemory]:
        """Run setup; what it leaves."""
        initial = {each.name: each.initial for each in self.schedule.scalars}
        memory = [ClassMemory(scalars=dict(initial)) for _ in self.grid.classes]
        self.interpreter.run(memory, setup=True, overflows=False)
        return memory
