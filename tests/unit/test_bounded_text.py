"""Text that users give is read within one budget, or refused in one line before it costs much."""

import json
import tomllib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.bounded_text import bounded_json, bounded_toml, bounded_xml, need_small, repeated
from zsim.limits import Limits, using

READ: dict[str, Callable[[str], object]] = {
    "toml": bounded_toml,
    "json": bounded_json,
    "xml": bounded_xml,
}
LAUGHS = "".join(f'<!ENTITY a{n} "&a{n - 1};&a{n - 1};&a{n - 1};">' for n in range(1, 40))
BOMBS = {
    "a dotted key": ("toml", "a." * 2_000 + "a = 1", "nested too deeply"),
    "a dotted header": ("toml", "[" + "a . " * 2_000 + "a]", "nested too deeply"),
    "a quoted key": ("toml", '"a".' * 2_000 + "a = 1", "nested too deeply"),
    "a key of escaped quotes": ("toml", r'"\"".' * 2_000 + "a = 1", "nested too deeply"),
    "a key in a table": ("toml", "x = {y = 1, " + "a." * 2_000 + "a = 1}", "nested too deeply"),
    "a large text": ("toml", "[]," * 2_000_000, "has 6 MB, must have at most 4.19 MB"),
    "lists in lists": ("toml", "a = " + "[" * 150 + "]" * 150, "nested too deeply"),
    "deeper lists": ("toml", "a = " + "[" * 100_000, "nested too deeply"),
    "many values": ("toml", "a = [" + "1," * 110_000 + "]", "must have at most 100,000 values"),
    "hexadecimal digits": ("toml", "a = 0x" + "f" * 5_000, "a number has too many digits"),
    "decimal digits": ("toml", "a = 1" + "0" * 5_000, "a number has too many digits"),
    "objects in objects": ("json", '{"a":' * 150 + "1" + "}" * 150, "nested too deeply"),
    "deeper objects": ("json", '{"a":' * 100_000, "nested too deeply"),
    "keys": ("json", json.dumps(dict.fromkeys(map(str, range(110_000)))), "at most 100,000 values"),
    "a late key twice": (
        "json",
        "{" + "".join(f'"k{n}": 1, ' for n in range(20_000)) + '"k19999": 1}',
        '"k19999" is repeated',
    ),
    "entities": ("xml", f"<!DOCTYPE x [<!ENTITY a0 'a'>{LAUGHS}]><x>&a39;</x>", "document type"),
    "elements in elements": ("xml", "<a>" * 1_000 + "</a>" * 1_000, "nested too deeply"),
    "elements": ("xml", "<x>" + "<a/>" * 110_000 + "</x>", "must have at most 100,000 elements"),
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", BOMBS)
def test_text_whose_kind_takes_longer_than_its_bytes_is_refused_in_one_line(name: str) -> None:
    form, text, why = BOMBS[name]
    with pytest.raises(ValueError, match=r"^[^\n]*\Z") as caught:
        READ[form](text)
    assert why in str(caught.value)


VALUES = st.recursive(
    st.booleans() | st.integers() | st.text("ab.\"' =[", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.\"'"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("ab.\"' "), VALUES, max_size=4))
def test_small_text_is_read_as_python_reads_it(tables: dict[str, object]) -> None:
    assert bounded_json(json.dumps(tables)) == tables
    text = "".join(f"{json.dumps(key)} = {json.dumps(each)}\n" for key, each in tables.items())
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # tables of JSON are none of TOML
        return
    assert bounded_toml(text) == found


@pytest.mark.parametrize("part", ["a", '"a"', "'a'", r'"\""', r'"\\"', r'"a\"\\"', "'\\'", "'\"'"])
def test_a_long_key_is_refused_before_it_is_parsed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bounded_toml(f"{part}.a.{part} = 1") == tomllib.loads(f"{part}.a.{part} = 1")

    def parse(text: str) -> dict[str, object]:
        raise AssertionError(f"{len(text)} letters are parsed")

    monkeypatch.setattr(tomllib, "loads", parse)
    for before in ("", "[", "x = {", r'x = "\\"' + "\n"):
        with pytest.raises(ValueError, match=r"^nested too deeply\Z"):
            bounded_toml(before + f"{part}.a." * 300 + "a = 1")


def test_a_key_of_many_parts_is_read_and_a_limit_bounds_it() -> None:
    text = "a." * 90 + "a = 1"
    assert bounded_toml(text) == tomllib.loads(text)
    with using(Limits(config_depth=50)), pytest.raises(ValueError, match="nested too deeply"):
        bounded_toml(text)
    with using(Limits(config_values=3)), pytest.raises(ValueError, match="at most 3 values"):
        bounded_json("[1, 2, 3]")


def test_what_stands_several_times_counts_each_time() -> None:
    found: object = [1]
    for _ in range(40):
        found = [found, found]
    with pytest.raises(ValueError, match="at most 100,000 values"):
        need_small(found)


@given(st.lists(st.text("abc", max_size=2)))
def test_the_first_name_that_stands_twice_is_found(names: list[str]) -> None:
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    assert repeated(names) == next(iter(twice), "")
