"""Constants of a schedule: the primes drawn for it, and how likely they hide a difference.

A step computes sums of products, each times a rational constant: the reciprocal of the divisors of
copies and means, times the numbers that fills write. Two such constants whose difference, with one
denominator, has a numerator below 2**BITS are equal only if they are equal modulo both primes. A
larger numerator is a multiple of few primes, and the primes are drawn by a digest of the schedule.
"""

from collections.abc import Iterator
from fractions import Fraction
from hashlib import blake2b
from math import exp2, lcm

from zsim.proof.execution.inferred_model import Training
from zsim.schedule.access import COMPUTE_ACCESS, touching
from zsim.schedule.communication import Communication, ReducingOperation, Reduction
from zsim.schedule.operation import Action, Compute, Copy, Fill, Operation, Role, SetScalar, View
from zsim.schedule.program import Program
from zsim.schedule.schedule import Schedule
from zsim.specification.residues import BITS, PRIMES_BITS

SCALE = 2**13
"""The initial loss scale of a proof."""

LINEAR = {
    Action.BACKWARD: {Role.OUTPUT_GRADIENT},
    Action.BACKWARD_INPUT: {Role.OUTPUT_GRADIENT},
    Action.BACKWARD_WEIGHT: {Role.INTERMEDIATE_GRADIENT},
    Action.UNSCALE: {Role.GRADIENT},
    Action.CLIP: {Role.GRADIENT},
    Action.NORM: {Role.GRADIENT},
}
"""Operands in which kernels are linear, or quadratic; other kernels are random functions."""

Factor = tuple[int, int]
"""Bound of a constant, and a multiple of its denominator."""

ONE: Factor = (1, 1)


def seed_of(schedule: Schedule) -> int:
    """Return a digest of a schedule: its operations in order, its contract and its constants."""
    digest = blake2b(digest_size=4)
    head = (schedule.name, schedule.mesh, schedule.roles, schedule.groups, schedule.scalars)
    for each in (*head, schedule.contract):
        digest.update(repr(each).encode())
    for program in schedule.programs:
        digest.update("\n".join((program.role, *program.by_id)).encode())
        digest.update(repr(list(_constants(program))).encode())
    return int.from_bytes(digest.digest())


def divisors(schedule: Schedule) -> Iterator[int]:
    """Yield the divisors of a step and of training; each divisor of a role at least once."""
    yield schedule.contract.loss_divisor
    for group in schedule.groups:
        yield group.size(schedule.mesh)
    for program in schedule.programs:
        yield from {each.divisor for each in program.patterns if type(each) is Copy}


def hidden(schedule: Schedule, training: Training) -> float:
    """Return a bound of the probability that different constants are equal modulo both primes.

    The primes must be drawn for the schedule. The bound sums, over operations that make numbers
    with large constants, the share of pairs of primes that divide one of them.
    """
    plain = training.micro_batches * schedule.mesh.size, training.divisor  # it scales no loss
    walk = _Walk(schedule, plain)
    for program in schedule.programs:
        walk.go(program)
    return sum(walk.hidden.values())


class _Walk:
    """Factors of the content of each buffer, and the probability for each operation.

    If an operation works in place on the parts of a buffer in turn, its factor counts once:
    `_turns` holds the parts that already have it, and the factor before.
    """

    def __init__(self, schedule: Schedule, plain: Factor) -> None:
        self.schedule = schedule
        self.plain = plain
        self.elements = max(1, sum(each.elements for each in schedule.contract.parameters))
        self.factors: dict[tuple[str, str], Factor] = {}
        self.hidden: dict[tuple[str, str], float] = {}
        self._turns: dict[tuple[str, str], tuple[int, int, Factor]] = {}
        self._sent: Factor = ONE

    def go(self, program: Program) -> None:
        """Follow a step of one role."""
        role = program.role
        for operation in touching(program.step_work):
            match operation:
                case Fill(target=target, value=value, scalar=scalar):
                    constant = Fraction(value) * (1 if scalar is None else SCALE)
                    bound = -(-abs(constant.numerator) // constant.denominator)
                    self._write(role, operation, target, (bound, constant.denominator))
                case Copy(source=source, target=target, divisor=divisor):
                    above, below = self._read(role, source, target)
                    made = -(-above // divisor), below * divisor
                    in_place = source.buffer == target.buffer
                    adds = operation.accumulate
                    self._write(role, operation, target, made, adds=adds, in_place=in_place)
                case Compute(action=Action.UNSCALE | Action.CLIP):
                    for operand in operation.operands:
                        if operand.role is Role.GRADIENT:
                            above, below = self._read(role, operand.view, operand.view)
                            made = above, below * (SCALE if operation.scalars else 1)
                            self._write(role, operation, operand.view, made, in_place=True)
                case Compute(action=action) if action in LINEAR:
                    self._compute(role, operation)
                case Communication():
                    self._communicate(role, operation)
                case _:
                    pass

    def _compute(self, role: str, compute: Compute) -> None:
        above, below = ONE
        for operand in compute.operands:
            if operand.role in LINEAR[compute.action]:
                size, under = self.factors.get((role, operand.view.buffer), ONE)
                above, below = max(above, size), lcm(below, under)
        if compute.action is Action.NORM:
            above, below = above**2 * self.elements, below**2
        table = COMPUTE_ACCESS[compute.action]
        for operand in compute.operands:
            if table[operand.role][1]:
                adds = operand.role is Role.GRADIENT
                self._write(role, compute, operand.view, (above, below), adds=adds)

    def _communicate(self, role: str, member: Communication) -> None:
        source, target = member.reads, member.writes
        if source is not None:
            factor = self._read(role, source, source if target is None else target)
            if isinstance(member, ReducingOperation):
                ranks = self.schedule.group_by_name[member.group].size(self.schedule.mesh)
                above, below = factor
                if member.reduction is Reduction.SUM:
                    factor = above * ranks, below
                elif member.reduction is Reduction.AVERAGE:
                    factor = above, below * ranks
        else:
            factor = self._sent
        if target is None:
            above, below = self._sent
            self._sent = max(above, factor[0]), lcm(below, factor[1])
        else:
            in_place = source is not None and source.buffer == target.buffer
            self._write(role, member, target, factor, in_place=in_place)

    def _read(self, role: str, source: View, target: View) -> Factor:
        """Return the factor of the values that are read to write `target`."""
        key = (role, source.buffer)
        now = self.factors.get(key, ONE)
        if source.buffer != target.buffer:
            return now
        low, high, before = self._turns.get(key, (0, 0, now))
        start, end = target.start, target.start + target.size
        if target.axis is not None or (start < high and low < end):
            low, high, before = start, start, now
        self._turns[key] = min(low, start) if high > low else start, max(high, end), before
        return before

    def _write(
        self,
        role: str,
        operation: Operation,
        target: View,
        factor: Factor,
        *,
        adds: bool = False,
        in_place: bool = False,
    ) -> None:
        key = (role, target.buffer)
        found = self.factors[key] = _merged(self.factors.get(key, ONE), factor, adds=adds)
        if not in_place and key in self._turns:
            low, high, before = self._turns[key]
            self._turns[key] = low, high, _merged(before, factor, adds=adds)
        squares = isinstance(operation, Compute) and operation.action is Action.NORM
        self.hidden[role, operation.id] = self._probability(found, squares=squares)

    def _probability(self, factor: Factor, *, squares: bool) -> float:
        """Return the probability that both primes divide a difference from plain training."""
        above, below = self.plain
        if squares:
            above, below = above**2 * self.elements, below**2
        bits = ((above + factor[0]) * lcm(below, factor[1])).bit_length()
        if bits <= BITS:
            return 0.0
        return (2 * bits // BITS) ** 2 * exp2(-2 * PRIMES_BITS)


def _merged(one: Factor, other: Factor, *, adds: bool) -> Factor:
    """Return the factor of a buffer that holds either content, or their sum with `adds`."""
    above = one[0] + other[0] if adds else max(one[0], other[0])
    return above, lcm(one[1], other[1])


def _constants(program: Program) -> Iterator[object]:
    """Yield the constants of a role, with their operations."""
    for operation in program.by_id.values():
        match operation:
            case Copy(divisor=divisor):
                if divisor != 1:
                    yield operation.id, divisor
            case Fill() | SetScalar():
                yield operation
            case Compute(rule=rule) if rule is not None:
                yield operation.id, rule
            case _:
                pass
