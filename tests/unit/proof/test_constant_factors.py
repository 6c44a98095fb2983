"""Constants of a schedule are told apart by value, or by primes that its digest draws."""

from dataclasses import replace

import pytest
from drawn_examples import examples
from faults.findings import left
from hypothesis import given
from hypothesis import strategies as st
from trained_weight import Trained

from zsim.proof import prove
from zsim.proof.execution.constant_factors import seed_of
from zsim.proof.values import Shown
from zsim.schedule.json import FieldError, decode_value
from zsim.schedule.operation import Copy
from zsim.schedule.program import Contract
from zsim.schedule.schedule import Schedule, ScheduleError
from zsim.schedule.view import OperationError, View
from zsim.specification.residues import HIGH, LOW, drawn_primes, is_prime, modulo, number

LARGEST = 2_147_483_647 * 2_147_483_629
"""Product of the two largest primes below 2**31."""

PAIRS = {
    2: (27_823, 165_750_852_728_955),
    4: (2_179, 2_116_423_118_622_173),
    8: (1_259, 3_662_975_357_805_969),
}
"""Divisors whose product is N + LARGEST."""


def divided(*divisors: int, promised: int, value: float | None = None) -> Schedule:
    """A gradient that is divided, one divisor after the other, before it is summed."""
    case = Trained()
    case.backward()
    for place, divisor in enumerate(divisors):
        case.step.copy(f"divide{place}", case.whole.all, case.whole.all, divisor=divisor)
    if value is not None:
        case.step.fill("fill", case.whole.all, value)
    case.scatter()
    case.update(case.shard.all)
    return case.schedule(divisor=promised)


def shown(made: Schedule) -> Shown:
    found = prove(made).values
    assert found is not None
    return found


@pytest.mark.parametrize("wanted", PAIRS)
def test_divisors_whose_product_is_right_modulo_the_largest_primes_are_found(wanted: int) -> None:
    one, other = PAIRS[wanted]
    assert one * other == wanted + LARGEST
    assert left(divided(one, other, promised=wanted)) == "step/update"


@given(st.integers(1, 2**20), st.integers(1, 2**20))
@examples(10)
def test_a_division_in_two_parts_is_proved_without_a_doubt(one: int, other: int) -> None:
    found = shown(divided(one, other, promised=one * other))
    assert found.findings == ()
    # Small constants differ by less than the product of the primes: the error is as with none.
    small = shown(divided(1, 1, promised=1))
    assert one * other > 2**28 or found.error_bits == small.error_bits


def test_large_constants_make_the_printed_error_larger() -> None:
    chain = shown(divided(*(2**50,) * 6, promised=2**50))
    assert 0 < chain.error_bits < shown(divided(4, promised=4)).error_bits


def test_a_right_chain_of_large_divisors_is_proved() -> None:
    large = 2**53 - 1
    assert prove(divided(large, promised=large)).findings == ()


def test_a_divisor_that_no_float_holds_is_refused() -> None:
    view = View(buffer="x", size=1)
    with pytest.raises(OperationError, match=r"^divide: divisor \d+ must be from 1 to \d+$"):
        Copy(id="divide", stream="s", source=view, target=view, divisor=4 + LARGEST)
    with pytest.raises(ScheduleError, match=r"^contract: loss_divisor \d+ must be from 1 to"):
        Contract(loss_divisor=2**53 + 1)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_a_whole_number_of_more_than_64_bits_is_not_read(value: int) -> None:
    with pytest.raises(FieldError, match=r"must have at most 64 bits"):
        decode_value(value, int)
    assert decode_value(2**63 - 1, int) == 2**63 - 1


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 2**53), max_size=3))
@examples(50)
def test_a_seed_draws_two_primes_that_divide_none_of_the_divisors(
    seed: int, divisors: list[int]
) -> None:
    one, other = drawn_primes(seed, divisors)
    again = drawn_primes(seed, [*divisors, one])
    assert LOW <= min(one, other) < max(one, other) < HIGH
    assert all(is_prime(each) for each in (one, other))
    assert all(each % one and each % other for each in divisors)
    assert (one, other) == drawn_primes(seed, divisors)
    assert one not in again


@given(st.integers(9, 2**22))
@examples(200)
def test_a_prime_has_no_divisor(candidate: int) -> None:
    divisors = range(2, int(candidate**0.5) + 1)
    assert is_prime(candidate) is all(candidate % each for each in divisors)


def test_numbers_are_those_of_the_primes_of_the_place() -> None:
    with modulo((101, 103)):
        assert number(1 / 4).tolist() == [76, 26]  # 4 * 76 = 3 * 101 + 1, 4 * 26 = 103 + 1
    assert number(5).tolist() == [5, 5]


def test_the_seed_is_printed_and_follows_every_constant() -> None:
    made = divided(4, promised=4, value=0.5)
    seeds = {
        seed_of(each)
        for each in (
            made,
            divided(8, promised=4, value=0.5),
            divided(4, promised=8, value=0.5),
            divided(4, promised=4, value=0.25),
            divided(2, 2, promised=4, value=0.5),
            replace(made, name="other"),
        )
    }
    assert len(seeds) == 6
    assert seed_of(divided(4, promised=4, value=0.5)) == seed_of(made)
    right = prove(divided(4, promised=4))
    (values,) = (each for each in right.proved if each.startswith("values"))
    assert f"with seed {seed_of(divided(4, promised=4)):08x}" in values
