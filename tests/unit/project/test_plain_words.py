"""Pages, docstrings and messages use the words of the field: `tests/support/plain_words.py`."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from plain_words import excess, hits_in, our_files, texts, usual_rates

EXCESS_MAX = 270
"""Occurrences per 100,000 words above three times the usual rates; only ever to be lowered."""


def test_phrases_of_our_own_are_not_more_frequent_than_they_were() -> None:
    """`python tests/support/plain_words.py` lists the phrases, with a file each hit in it."""
    lines = [text for path in our_files() for _, text in texts(path)]
    assert sum(above for _, above in excess(lines).values()) <= EXCESS_MAX


@given(
    words=st.lists(st.sampled_from(["the", "bucket", "is", "reduced"]), min_size=40, max_size=60)
)
def test_a_phrase_counts_from_three_times_its_usual_rate(words: list[str]) -> None:
    line = " ".join(words)
    assert excess([line]) == {}
    over = excess([f"{line} beside"])
    assert over.keys() == {r"\bbeside\b"}
    (rate, above), usual = over[r"\bbeside\b"], usual_rates()[r"\bbeside\b"]
    assert rate == 100_000 / (len(words) + 1)
    assert above == rate - 3 * usual


FILE = '''"""A module beside others."""

# Nobody reads this.
def f() -> None:
    """Return the sum."""
    x = "beside"  # code, no prose
    raise ValueError("x: it stands alone")
'''
PAGE = """A page beside others.

```python
beside = 1
```

The option `beside` is code.
"""


def test_prose_is_read_and_code_is_not(tmp_path: Path) -> None:
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text(FILE, "utf-8")
    page.write_text(PAGE, "utf-8")
    found = [line for path in (module, page) for line in hits_in(path)]
    assert [re.sub(r"^.*/(\w+\.\w+:\d+):.*$", r"\1", line) for line in found] == [
        "module.py:1",
        "module.py:3",
        "module.py:7",
        "page.md:1",
    ]
