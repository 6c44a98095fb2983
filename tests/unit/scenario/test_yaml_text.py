"""YAML of trainers is read within a budget: references count with everything they stand for."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.limits import Limits, using
from zsim.runtimes.trainer_files.tables import TrainerFileError
from zsim.runtimes.trainer_files.yaml_text import yaml_sections


def refusal(text: str) -> str:
    with pytest.raises(TrainerFileError, match=r"^f: [^\n]*\Z") as caught:
        yaml_sections("f", text)
    return str(caught.value)


def doubling(form: str, count: int = 20) -> str:
    """Return lines of which each has the one before it twice, in `form`."""
    lines = (form.format(n=n, before=n - 1) for n in range(1, count))
    return "a0: &a0 {x: 1}\n" + "\n".join(lines)


BOMBS = {
    "merged keys": (doubling("a{n}: &a{n} {{<<: [*a{before}, *a{before}]}}"), "at most 500 v"),
    "references": (doubling("a{n}: &a{n} [*a{before}, *a{before}]"), "at most 500 values"),
    "both": (doubling("a{n}: &a{n} {{<<: *a{before}, y: *a{before}}}"), "at most 500 values"),
    "in a key": (doubling("a{n}: &a{n} [*a{before}, *a{before}]") + "\n? *a19\n: 1", "at most 500"),
    "a chain": (doubling("a{n}: &a{n} {{x: *a{before}}}", 25), "nested too deeply"),
    "values": ("a: [" + "1," * 500 + "]", "at most 500 values"),
    "keys": ("? a\n" * 300, "at most 500 values"),
    "lists in lists": ("a: " + "[" * 500, "nested too deeply"),
    "a number in base 60": ("a: 1" + ":1" * 200, "must have at most 100 letters, or be quoted"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_text_that_stands_for_much_more_is_refused_in_one_line(name: str) -> None:
    text, why = BOMBS[name]
    with using(Limits(config_values=500, config_depth=20)):
        assert why in refusal(text)


def test_a_file_of_fewer_values_is_read() -> None:
    with using(Limits(config_values=500)):
        assert yaml_sections("f", "a: [" + "1," * 450 + "]") == {"a": [1] * 450}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('!!int ""', "could not determine a constructor for 'tag:yaml.org,2002:int'"),
        ("!!bool maybe", "could not determine a constructor for 'tag:yaml.org,2002:bool'"),
        ("!!timestamp foo", "could not determine a constructor for 'tag:yaml.org"),
        ("!!float x", "could not determine a constructor for 'tag:yaml.org,2002:float'"),
        ("!!set {a, b}", "could not determine a constructor for 'tag:yaml.org,2002:set'"),
        ("!!int [1]", "could not determine a constructor for 'tag:yaml.org,2002:int'"),
        ("{? [1] : 2}", "found unhashable key"),
        ("{? {b: 1} : 2}", "found unhashable key"),
        ("{<<: 1}", "expected a mapping or list of mappings for merging"),
        ("{x: 1, x: 2}", '"x" is repeated'),
        ("&a [*a]", "a value must not hold itself"),
        ("&a {<<: *a}", "a value must not hold itself"),
        ("0x_", "invalid literal for int() with base 16"),
        ("=", "could not determine a constructor for the tag"),
    ],
)
def test_a_value_that_cannot_be_made_is_one_line(value: str, why: str) -> None:
    assert why in refusal(f"a: {value}")


def test_references_and_merged_keys_are_read_as_pyyaml_reads_them() -> None:
    text = "s:\n  a: &a\n    <<: {x: 2, z: 3}\n    x: 1\nc:\n  <<: *a\n  y: [*a, *a]\n"
    assert yaml_sections("f", text) == yaml.safe_load(text)


@pytest.mark.one_commit_in(6)
@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_pyyaml_writes_is_read_as_it_reads_it(tree: dict[str, object]) -> None:
    text = yaml.safe_dump(tree)
    assert yaml_sections("f", text) == yaml.safe_load(text)


@given(st.text("a1:-[]{}&*!<?|>'\"# \n,.=~", max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        found = yaml_sections("f", text)
    except TrainerFileError as error:
        assert "\n" not in str(error)  # noqa: PT017  (either is right)
    else:
        assert found == yaml.safe_load(text) or set(found) == set(map(str, yaml.safe_load(text)))
