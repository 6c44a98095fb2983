"""Quantities as people write them, large ones refused instead of computed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.units import (
    LARGEST,
    UnitError,
    format_seconds,
    parse_duration,
    parse_power,
    parse_ratio,
    parse_size,
    parse_tokens,
)


@given(st.integers(0, 10**15), st.sampled_from([("kB", 10**3), ("GiB", 2**30), ("PB", 10**15)]))
def test_a_quantity_is_its_number_times_its_unit(number: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    assert parse_size(f"{number} {name}") == number * factor
    assert parse_size(f"{number}e-2 {name}") == round(Fraction(number * factor, 100))


@pytest.mark.timeout(5)  # 10 to such a power is computed for hours
@pytest.mark.parametrize("exponent", ["e31", "e999", "e99999999", "e-99999999", "E+999999999999"])
def test_an_exponent_beyond_all_sizes_is_refused_at_once(exponent: str) -> None:
    with pytest.raises(UnitError):
        parse_size(f"1{exponent} B")
    with pytest.raises(UnitError):
        parse_ratio(f"1{exponent}")


def test_limits_themselves_are_read() -> None:
    assert parse_size("1e30 B") == LARGEST
    for text in ("1e9", "1e-9", "3/2", ".5", 2, 1.5):
        assert parse_ratio(text) == Fraction(str(text))
    for wrong in ("1e10", 1e-320, "0", 0, "-1", "2:1", "", ".", "1/0", "1_0", True, None):
        with pytest.raises(UnitError):
            parse_ratio(wrong)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1543.4, "1,543 s"), (999.0, "999 s"), (1.234, "1.23 s"), (0.0456, "45.6 ms"), (0.0, "0 ns")],
)
def test_seconds_are_shown_in_the_unit_that_reads_best(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("15e12", 15 * 10**12),
        ("15T", 15 * 10**12),
        ("2.5 B", 2_500_000_000),
        ("1,000", 1000),
        ("1t", 10**12),
    ],
)
def test_tokens_are_numbers_with_or_without_a_letter(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "15X", "T", "1/2", "nan", "1e40"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="whole number of tokens"):
        parse_tokens(text)


def test_durations_and_powers_have_units() -> None:
    assert parse_duration("30 days") == 30 * 86_400
    assert parse_duration("1.5 h") == 5400
    for short in ("30d", "30 day", "720hours", "43200 min"):
        assert parse_duration(short) == 30 * 86_400
    assert parse_power("1.2 kW") == 1200
    for wrong in ("30", "30 moons", "days", "30 m"):
        with pytest.raises(UnitError, match="30 days"):
            parse_duration(wrong)
