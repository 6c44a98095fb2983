"""Something is scaled otherwise: a divisor, a constant, a scalar that is forgotten."""

from collections.abc import Iterator
from functools import partial

from mutation import changed, without

from mutants.mutant import Mutant, Operator, around, in_step
from zsim.schedule.operation import Action, Compute, Copy, Fill, SetScalar
from zsim.schedule.schedule import Schedule


def sites(schedule: Schedule) -> Iterator[Mutant]:
    for operation in in_step(schedule):
        name = operation.id
        match operation:
            case Copy(divisor=divisor):
                yield Mutant((name,), partial(changed, schedule, name, divisor=2 * divisor))
                if divisor != 1:
                    yield Mutant((name,), partial(changed, schedule, name, divisor=1))
            case Fill(value=value, scalar=scalar):
                if value:
                    yield Mutant((name,), partial(changed, schedule, name, value=2 * value))
                else:
                    yield Mutant((name,), partial(changed, schedule, name, value=1.0))
                if scalar is not None:
                    yield Mutant((name,), partial(changed, schedule, name, scalar=None))
            case Compute(action=Action.UNSCALE | Action.CLIP):
                if operation.scalars:
                    yield Mutant((name,), partial(changed, schedule, name, scalars=()))
                if operation.action is Action.UNSCALE:
                    yield Mutant(around(operation), partial(without, schedule, name))
            case SetScalar(add=add) if add:
                yield Mutant((name,), partial(changed, schedule, name, add=2 * add))
            case _:
                pass


CHANGE_SCALE = Operator(
    "change a scale", frozenset({"value", "placement", "definedness", "skip path"}), sites
)
