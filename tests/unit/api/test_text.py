"""Answers as text: lines that fit, numbers that keep their units, tables with straight columns."""

from hypothesis import given
from hypothesis import strategies as st

from zsim.api.answer_text import LINE_WIDTH, facts_text, table_text

words = st.text("abc/_", min_size=1, max_size=30)
tables = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(words, min_size=width, max_size=width).map(tuple), min_size=1, max_size=6
    )
)


def test_a_line_never_ends_between_a_number_and_its_unit() -> None:
    for width in range(40, 76):
        lines = facts_text([("name", "x" * width + " 1.05 MB, saved 6.61 MB")]).splitlines()
        assert not any(line.endswith(("1.05", "6.61")) for line in lines)
        assert max(map(len, lines)) <= LINE_WIDTH


@given(facts=st.lists(st.tuples(st.text("ab", max_size=23), words), max_size=5))
def test_facts_stand_below_each_other(facts: list[tuple[str, str]]) -> None:
    lines = facts_text(facts).splitlines()
    width = max((len(name) for name, _ in facts), default=0)
    assert [(line[:width].rstrip(), line[width + 2 :]) for line in lines] == facts


@given(table=tables, ruled=st.booleans(), data=st.data())
def test_every_cell_of_a_table_stands_in_its_column(
    table: list[tuple[str, ...]], ruled: bool, data: st.DataObject
) -> None:
    columns, *rows = table
    left = data.draw(st.sets(st.integers(0, len(columns) - 1)))
    lines = table_text(columns, rows, words=left, ruled=ruled, width=None).splitlines()
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    gap = 3 if ruled else 2
    if ruled:
        assert set(lines.pop(1)) == {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}
    for line, cells in zip(lines, table, strict=True):
        at = 0
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            field = line[at : at + width].ljust(width)
            assert field == (cell.ljust(width) if number in left else cell.rjust(width))
            at += width + gap


def test_a_long_first_cell_goes_on_below_itself() -> None:
    text = table_text(("", "A"), [("word " * 40, "1")])
    first, *more = text.splitlines()[1:]
    assert first.endswith(" 1")
    assert " ".join([first.removesuffix("1"), *more]).split() == ["word"] * 40
    assert max(map(len, text.splitlines())) <= LINE_WIDTH


def test_a_long_last_cell_does_not_squeeze_the_first() -> None:
    name = "Megatron, ZeRO-1, 8-way tensor parallel, 2 pipeline stages, micro-batch 1 x 128"
    verdict = "-8.9%, within the error, fits with probability 64%, published ones took 1.1 times"
    rows = [(name, "16", verdict), ("FSDP2", "16", "best")]
    lines = table_text(("setting", "GPUs", "to the best"), rows, words=(0, 2)).splitlines()
    assert len(lines) <= 5
    assert max(map(len, lines)) <= LINE_WIDTH
    at = lines[0].index("to the best")
    assert " ".join(line[at:].strip() for line in lines[1:-1]) == verdict


@given(table=tables, data=st.data())
def test_columns_of_words_share_a_line(table: list[tuple[str, ...]], data: st.DataObject) -> None:
    columns, *rows = table
    left = data.draw(st.sets(st.integers(0, len(columns) - 1)))
    numbers = [max(len(row[at]) for row in table) for at in range(len(columns)) if at not in left]
    width = sum(numbers) + 2 * (len(columns) - 1) + 8 * len(left)
    for line in table_text(columns, rows, words=left, width=width).splitlines():
        assert len(line) <= width
