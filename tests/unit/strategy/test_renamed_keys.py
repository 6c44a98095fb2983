"""Keys of strategies in schedules: the page that maps old ones to those of today is right."""

import re
from pathlib import Path

from zsim.schedule.json import encode_value
from zsim.strategy.config_table import Table
from zsim.strategy.strategy import Strategy

PAGE = Path(__file__).parents[3] / "docs" / "adr" / "0011-strategy-is-nested-as-a-file-is.md"


def keys() -> set[str]:
    """Every key of a strategy: those of its tables, with their names before them."""
    return {
        f"{table}.{name}"
        for table, field in Strategy.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
        for name in field.annotation.model_fields
    }


def test_every_old_key_is_mapped_to_one_of_today() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    old, new = zip(*rows, strict=True)
    assert len(set(old)) == len(set(new)) == len(rows) > 25
    assert set(new) <= keys()


def test_what_is_written_has_these_keys_and_no_others() -> None:
    written = encode_value(Strategy.of({"zero.stage": 3}), Strategy)
    assert isinstance(written, dict)
    found = {f"{table}.{name}" for table, value in written.items() for name in value}
    assert found <= keys()
    assert "zero.stage" in found
