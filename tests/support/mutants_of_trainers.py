"""Mutants of the executor as a trainer has it: without poison, with nobody who watches.

Updates by Adam are prepared there, parameters are leaves, learning rates are read of groups, and
memory serves again.
"""

from executor_mutant import ALONE, MOVED, RANKS_ALONE, Mutant

from zsim_torch import trainer
from zsim_torch.execute import copying, executor, sharded_optimizer
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.cut_parts import CutParts
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.operands import SteadyParameters
from zsim_torch.execute.reserve import (
    Reserve,
    _ReservedBlock,  # pyright: ignore[reportPrivateUsage]  # what is changed is private
)
from zsim_torch.execute.shard_compute import SteadyUpdate
from zsim_torch.execute.sharded_optimizer import SteadyAdam
from zsim_torch.optimizer_groups import RateGroups
from zsim_torch.rank_run import RankRun

MUTANTS_OF_TRAINERS = (
    # An update that is prepared once.
    Mutant(
        "a prepared update counts no steps",
        ALONE,
        SteadyAdam,
        "update",
        'self._step.fill_(scalars["step"])',
        "self._step.fill_(1.0)",
    ),
    Mutant(
        "a prepared update is a step behind",
        RANKS_ALONE,
        SteadyAdam,
        "update",
        'self._step.fill_(scalars["step"])',
        'self._step.fill_(max(scalars["step"] - 1, 1.0))',
    ),
    Mutant(
        "a prepared update keeps the rate of its first step",
        ALONE,
        SteadyAdam,
        "update",
        "rate_of(rule, scalars), (trained",
        "self._step.__dict__.setdefault('rate', rate_of(rule, scalars)), (trained",
    ),
    Mutant(
        "a prepared update has the gradients of its first step",
        ALONE,
        SteadyUpdate,
        "__call__",
        "prepared.update(gradient, scalars)",
        "held = self.memory.__dict__.setdefault('first', {})\n"
        "    prepared.update(held.setdefault(id(self), gradient.clone()), scalars)",
    ),
    Mutant(
        "a prepared update trains a copy",
        RANKS_ALONE,
        SteadyAdam,
        "__init__",
        "[[each[:whole]] if whole else [] for each in state]",
        "[[each[:whole].clone()] if whole else [] for each in state]",
    ),
    Mutant(
        "what is left over of a shard is updated and not put back",
        ALONE,
        SteadyAdam,
        "update",
        "_copy_each(ends, self._slots[1:])",
        "pass",
    ),
    Mutant(
        "what is left over of a shard is not read",
        RANKS_ALONE,
        SteadyAdam,
        "update",
        "_copy_each(self._slots, [gradient[whole:], *ends])",
        "_copy_each(self._slots[:1], [gradient[whole:]])",
    ),
    Mutant(
        "what is left over of a gradient is that of its first step",
        ALONE,
        SteadyAdam,
        "update",
        "_copy_each(self._slots, [gradient[whole:], *ends])",
        "late = self._step.item() > 0\n"
        "        _copy_each(self._slots[late:], [gradient[whole:], *ends][late:])",
    ),
    Mutant(
        "what is left over of a gradient is its beginning",
        ALONE,
        SteadyAdam,
        "update",
        "[gradient[whole:], *ends]",
        "[gradient[: gradient.numel() - whole], *ends]",
    ),
    Mutant(
        "weights do not decay",
        ALONE,
        sharded_optimizer,
        "_fused",
        "weight_decay=rule.weight_decay",
        "weight_decay=0.0",
    ),
    Mutant(
        "a prepared update outlives its memory",
        MOVED,
        SteadyUpdate,
        "__call__",
        "self.memory.keep({each.buffer for each in state}, self)",
        "pass",
    ),
    Mutant(
        "a prepared update that is cleared stays",
        MOVED,
        SteadyUpdate,
        "clear",
        "self.prepared = None",
        "pass",
    ),
    Mutant(
        "a prepared update has moments that take turns",
        ALONE,
        SteadyAdam,
        "update",
        "trained, first, second = self._blocks",
        "trained, *moments = self._blocks\n"
        "    first, second = moments[:: 1 if scalars['step'] % 2 else -1]",
    ),
    # Numbers of the host.
    Mutant(
        "a trainer reads the rates of its first step",
        ALONE,
        trainer.Trainer,
        "step",
        "name: at(self.steps_done) for name, at",
        "name: self.__dict__.setdefault(name, at(self.steps_done)) for name, at",
    ),
    Mutant(
        "rates are those of another group",
        ALONE,
        RateGroups,
        "rates",
        'float(group["lr"])',
        'float(groups[0]["lr"])',
    ),
    Mutant(
        "rates of a step are not given to the executor",
        ALONE,
        Executor,
        "run_step",
        "self.scalars |= given",
        "self.scalars |= given if step == 0 else {}",
    ),
    Mutant(
        "what was given for a step is that of the next",
        MOVED,
        trainer.Trainer,
        "step",
        "at(self.steps_done)",
        "at(self.steps_done + 1)",
    ),
    Mutant(
        "micro-batches of a step are one",
        ALONE,
        RankRun,
        "_next_batch",
        "self.prepared(next(self._batches))",
        "self.prepared(self.__dict__.setdefault('one', next(self._batches)))",
    ),
    # Gradients.
    Mutant(
        "pieces of a gradient are added to what was in its memory",
        MOVED,
        copying,
        "_join",
        "for each in pieces], out=target)",
        "for each in pieces], out=(cat := torch.empty_like(target)))\n    target.add_(cat)",
    ),
    Mutant(
        "a whole gradient is added to what was in its memory",
        MOVED,
        copying,
        "_move_all",
        "elif copy.accumulate:",
        "elif copy.accumulate or copy.divisor == 1:",
    ),
    Mutant(
        "what a fill should overwrite stays",
        ALONE,
        executor,
        "_fill",
        "target.fill_(value)",
        "pass",
    ),
    # Memory that serves again.
    Mutant(
        "parameters that are views outlive their memory",
        MOVED,
        SteadyParameters,
        "clear",
        "self.views, self.leaves = [], None",
        "pass",
    ),
    Mutant(
        "leaves outlive their memory",
        MOVED,
        SteadyParameters,
        "clear",
        "self.views, self.leaves = [], None",
        "self.views = []",
    ),
    Mutant(
        "parts outlive their memory",
        MOVED,
        CutParts,
        "forget",
        "self._by_buffer.pop(buffer, None)",
        "pass",
    ),
    Mutant(
        "what holds parts is not told when they go",
        MOVED,
        CutParts,
        "forget",
        "kept.clear()",
        "pass",
    ),
    Mutant(
        "one alone of those that hold parts is told",
        MOVED,
        CutParts,
        "tie",
        "tied.append(kept)",
        "tied[:] = [kept]",
    ),
    Mutant(
        "a free forgets no parts",
        MOVED,
        LiveMemory,
        "take_away",
        "self._cuts.forget(name)",
        "pass",
    ),
    Mutant(
        "memory is lent while a tensor is on it",
        MOVED,
        _ReservedBlock,
        "is_free",
        "== 2",
        "<= 3",
    ),
    Mutant(
        "memory that serves again is longer than its buffer",
        MOVED,
        Reserve,
        "_block",
        "if block.size == size",
        "if block.size >= size",
    ),
    Mutant(
        "every buffer of a size has one memory",
        RANKS_ALONE,
        LiveMemory,
        "_take",
        "made = self._reserve.take(buffer.elements, dtype)\n"
        "        see_taken(made)\n"
        "        return made",
        "held = self.__dict__.setdefault('held', {})\n"
        "        if (buffer.elements, dtype) not in held:\n"
        "            held[buffer.elements, dtype] = self._reserve.take(buffer.elements, dtype)\n"
        "        return held[buffer.elements, dtype]",
    ),
    Mutant(
        "freed memory is held",
        ALONE,
        LiveMemory,
        "take_away",
        "flat = self._flat.pop(name, None)",
        "flat = self._flat.pop(name, None)\n    self.__dict__.setdefault('kept', []).append(flat)",
    ),
    Mutant(
        "gradients of a unit are held",
        ALONE,
        Executor,
        "_bound_free_of_produced",
        "take_away(buffer).parts.clear",
        "self.machine.memory.__dict__.setdefault('kept', []).append(take_away(buffer)) "
        "or (lambda: None)",
    ),
    Mutant(
        "links of units outlive what they lead to",
        ALONE,
        Computer,
        "forget",
        "self._links.pop(buffer, None)",
        "pass",
    ),
)
