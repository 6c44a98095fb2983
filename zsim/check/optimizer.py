"""The optimizer's operations: norm and finite test, unscale, clip, update, and their operands."""

from zsim.check.content import NEXT, Content, What
from zsim.check.contribution import whole
from zsim.check.coverage import Coverage, Covered
from zsim.check.ledger import VALUE, Ledger
from zsim.check.placed import (
    ANY,
    COMPLETE,
    MIXED,
    PARTIAL,
    SHARD,
    VERDICT,
    WHOLE,
    WORDS,
    WRITTEN,
    ZERO,
    Number,
    Placement,
    Rule,
    both,
)
from zsim.check.signature import Signatures
from zsim.check.tensor import Tensors
from zsim.operation import Action, Compute, Operand, Role, SetScalar, View
from zsim.rule import Adam
from zsim.schedule import Schedule


class Optimizer:
    """The optimizer of one program; `judges` says whether the contract is held against contents."""

    def __init__(
        self,
        schedule: Schedule,
        ledger: Ledger,
        tensors: Tensors,
        *,
        signatures: Signatures,
        data: list[bool],
        judges: bool,
    ) -> None:
        self.ledger = ledger
        self.tensors = tensors
        self.data = data
        self.judges = judges
        self.complete = Rule([COMPLETE] * len(data), "no summand, and whole where it is read")
        self.whole = Rule([WHOLE] * len(data), "equal on all ranks")
        self.written = Rule([WRITTEN] * len(data), "whole where it is read")
        contents, strategy = ledger.contents, schedule.contract.strategy
        batches = signatures.batches
        if strategy is not None:
            batches = set(range(strategy.gradient_accumulation_steps))
        mean = Content(
            What.GRADIENT,
            (1, schedule.contract.loss_divisor),
            parts=whole(batches),
        )
        clips = (False, True) if strategy is None else (strategy.clip_norm is not None,)
        self.due = [contents.code(mean._replace(clipped=int(each))) for each in clips]
        self.trained = contents.code(Content(What.PARAMETER))
        self.updated = contents.code(Content(What.PARAMETER, age=NEXT))
        self.moment = contents.code(Content(What.MOMENT))
        self.moved = contents.code(Content(What.MOMENT, age=NEXT))
        self.coverage = Coverage(schedule, tensors, ledger.contents)

    def run(self, compute: Compute) -> None:
        """Read what is read, and write what becomes of it."""
        match compute.action:
            case Action.UPDATE:
                self._update(compute)
            case Action.NORM | Action.FINITE:
                self._measure(compute)
            case Action.CLIP:
                self._clip(compute)
            case Action.UNSCALE:
                self._unscale(compute)
            case action:
                raise AssertionError(action)

    def decide(self, name: str, view: View) -> None:
        """A branch reads a verdict: it must be equal on all ranks, and of all gradients."""
        code = self.ledger.need(name, view, self.whole, "decides on")[-1]
        self._covers(name, view, code, "decides on")

    def count(self, change: SetScalar) -> None:
        """The host sets a number."""
        before = self.ledger.values.scalars.get(change.scalar, Number(None))
        amount = None if before.amount is None else before.amount + change.add
        if change.multiply != 1 or change.counter is not None:
            amount = None
        by = (*before.by, change.id)
        self.ledger.values.scalars[change.scalar] = Number(amount, before.changes + 1, by)

    def scalar(self, name: str) -> str:
        """A number of the host, told from the same one before the step changed it."""
        number = self.ledger.values.scalars.get(name)
        return name if number is None or not number.changes else f"{name} as set by {number.by[-1]}"

    def _scalars(self, compute: Compute) -> tuple[str, ...]:
        return tuple(map(self.scalar, compute.scalars))

    def _update(self, update: Compute) -> None:
        ledger, contents = self.ledger, self.ledger.contents
        (gradient,) = (each for each in update.operands if each.role is Role.GRADIENT)
        view = gradient.view
        placed = ledger.need(update.id, view, self.complete, "updates with")
        code = placed[-1]
        if self.judges and (code >= 0 or contents.put(code, None) not in self.due):
            ledger.expect(update.id, view, "updates with", code=code, due=self.due[-1])
        for operand in update.operands:
            if operand is not gradient:
                self.tensors.together(update.id, view, code, operand.view)
                self._change(update.id, operand, placed, view)
        self._is_counted(update)
        ledger.values.updated = True

    def _change(self, name: str, operand: Operand, placed: Placement, gradient: View) -> None:
        """One state is updated in place."""
        ledger, view = self.ledger, operand.view
        is_moment = operand.role is Role.MOMENT
        state = ledger.need(name, view, self.complete, "updates")
        if is_moment:
            if self.judges and state[-1] != ZERO:
                ledger.expect(name, view, "updates", code=state[-1], due=self.moment)
        else:
            constant = ledger.contents.what(state[-1]) is What.CONSTANT
            if self.judges or not constant:
                ledger.expect(name, view, "updates", code=state[-1], due=self.trained)
        for axis, mine, its in zip(ledger.axes, placed[:-1], state[:-1], strict=True):
            if mine != its and both(mine, its) == MIXED:
                ledger.note(
                    name,
                    f"updates {view.buffer} over {axis} with a gradient that is placed differently",
                    (
                        f"{gradient.buffer} is {WORDS[mine]} over {axis}",
                        f"{view.buffer} is {WORDS[its]} over {axis}",
                    ),
                )
        code = self.moved if is_moment else self.updated
        ledger.write(ledger.origin(name, gradient), view, (*state[:-1], code))

    def _is_counted(self, update: Compute) -> None:
        """The number of the step that Adam is given is that of its update."""
        if not self.judges or not isinstance(update.rule, Adam):
            return
        for name in update.scalars[:1]:
            number = self.ledger.values.scalars.get(name)
            if number is not None and number.amount != 1:
                why = f"is given {name}, which is not the number of updates with this one"
                ways = tuple(f"{each} sets it" for each in number.by) or ("nothing sets it before",)
                self.ledger.note(update.id, why, ways, VALUE)
                self.ledger.values.scalars[name] = Number(1.0, number.changes, number.by)

    def _measure(self, compute: Compute) -> None:
        """A number over gradients: a summand where they are cut, and where they have copies."""
        ledger, contents, placed = self.ledger, self.ledger.contents, self.ledger.anything
        gradients = [each.view for each in compute.operands if each.role is Role.GRADIENT]
        read: list[Covered] = []
        for view in gradients:
            mine = ledger.need(compute.id, view, self.complete, "measures")
            if view.size:
                read.append((view, mine[-1]))
                self._is_whole(compute.id, view, mine[-1])
            bare = contents.put(mine[-1], None)
            placed = tuple(map(both, placed, (*mine[:-1], bare)))
        if MIXED in placed[:-1]:
            axis = ledger.axes[placed.index(MIXED)]
            why = f"measures gradients of which some are Shard and some Replicate over {axis}"
            ledger.note(compute.id, why, ("no single reduction makes their sum complete",))
        tests = compute.action is Action.FINITE
        apart = VERDICT if tests else PARTIAL
        what = What.VERDICT if tests else What.NORM
        covered = self.coverage.of(read)
        number = (
            *(
                apart if code == SHARD or not data else ANY if code == MIXED else code
                for data, code in zip(self.data, placed[:-1], strict=True)
            ),
            self._number(what, placed[-1], covered),
        )
        origin = ledger.origin(compute.id, *gradients)
        for operand in compute.operands:
            if operand.role is Role.OUTPUT:
                ledger.write(origin, operand.view, number)

    def _number(self, what: What, code: int, covered: str) -> int:
        """What a measure is of."""
        content = Content(what, name=covered)
        if code == ANY and what is What.NORM:  # of no elements, or of padding alone
            content = content._replace(factor=(0, 1))
        elif code < 0 and what is What.NORM:
            _, factor, scalars, *_ = self.ledger.contents[code]
            content = content._replace(factor=factor, scalars=scalars)
        return self.ledger.contents.code(content)

    def _is_whole(self, name: str, view: View, code: int) -> None:
        """A finding if a gradient that is measured lacks micro-batches, or is clipped already."""
        contents = self.ledger.contents
        if not self.judges or code == ANY:
            return
        due = contents[self.due[0]]._replace(clipped=0)
        if code < 0 and contents.what(code) is What.GRADIENT:
            due = due._replace(factor=contents[code].factor, scalars=contents[code].scalars)
        wanted = contents.code(due)
        if code >= 0 or contents.put(code, None) != wanted:
            self.ledger.expect(name, view, "measures", code=code, due=wanted)

    def _covers(self, name: str, view: View, code: int, verb: str) -> None:
        """A finding if a number is not of all gradients, each once."""
        contents = self.ledger.contents
        if self.judges and contents.what(code) in (What.NORM, What.VERDICT):
            wrong = self.coverage.wrong(contents[code].name, once=contents.what(code) is What.NORM)
            if wrong:
                why = f"{verb} {view.buffer}, which {wrong}"
                self.ledger.note(name, why, self.ledger.history(view), VALUE)

    def _unscale(self, compute: Compute) -> None:
        for operand in compute.operands:
            placed = self.ledger.need(compute.id, operand.view, self.written, "unscales")
            code = self.ledger.contents.unscaled(placed[-1], self._scalars(compute))
            origin = self.ledger.origin(compute.id, operand.view)
            self.ledger.write(origin, operand.view, (*placed[:-1], code))

    def _clip(self, clip: Compute) -> None:
        ledger, contents = self.ledger, self.ledger.contents
        norm, norms = ANY, list[View]()
        for operand in clip.operands:
            if operand.role is Role.INPUT:
                norm = ledger.need(clip.id, operand.view, self.whole, "clips by")[-1]
                norms.append(operand.view)
                self._covers(clip.id, operand.view, norm, "clips by")
        due = contents.unscaled(norm, self._scalars(clip))
        for operand in clip.operands:
            if operand.role is not Role.GRADIENT:
                continue
            placed = ledger.need(clip.id, operand.view, self.complete, "clips")
            mine = placed[-1]
            judged = mine < 0 and due < 0 and contents[due].factor[0]  # a norm of something
            if judged and contents[due][:3] != (What.NORM, *contents[mine][1:3]):
                why = f"clips {operand.view.buffer}, {contents.word(mine)}"
                lines = ledger.tell(ledger.origin(clip.id, operand.view, *norms)[1])
                ledger.note(clip.id, f"{why}, by what is {contents.word(due)}", lines, VALUE)
            code = contents.clipped(mine)
            origin = ledger.origin(clip.id, operand.view, *norms)
            ledger.write(origin, operand.view, (*placed[:-1], code))
