"""Schedules with named counts in files: what `check` and `run` print of their binding."""

from dataclasses import replace
from pathlib import Path

import pytest
from drawn_clusters import NO_MODEL
from exact_training import cluster
from routed_by_hand import Routed

import zsim
from zsim.backend.document import Document, encode
from zsim.mistake import MistakeError
from zsim.schedule.binding import AnyBinding, CountTrace, Ratio
from zsim.schedule.schedule import Contract


def file(folder: Path, binding: AnyBinding | None) -> Path:
    named = Routed(ranks=4, experts=8, sent=32, maximum=70).schedule()
    contract = Contract(peak_bytes=(("all", "device", 20_000),))
    document = Document(
        schedule=replace(named, contract=contract),
        model=NO_MODEL,
        cluster=cluster(4),
        binding=binding,
    )
    path = folder / "routed.json"
    path.write_text(encode(document), "utf-8")
    return path


@pytest.mark.parametrize(
    ("binding", "words"),
    [(None, "1.54 kB as bound (balanced)"), (Ratio(busiest=1.5), "2.06 kB as bound (ratio 1.5)")],
)
def test_a_check_states_memory_at_the_maximum_and_as_bound(
    tmp_path: Path, binding: AnyBinding | None, words: str
) -> None:
    found = zsim.check(file(tmp_path, binding))
    assert found.is_right
    limit = "no rank receives more than 70 rows of routed in a layer (2.19 x mean)"
    assert f"memory 20 kB while {limit}; {words}" in found.proved


def test_a_run_with_more_rows_than_declared_says_how_many(tmp_path: Path) -> None:
    text = str(zsim.run(file(tmp_path, Ratio(busiest=3))))
    assert "out of memory at     layer0 of recv" in text
    assert "rows received        96 by rank 0, at most 70 are declared (routed)" in text


def test_a_run_takes_longer_with_a_busier_member(tmp_path: Path) -> None:
    even, busy = (
        zsim.run(file(tmp_path, binding)).step_time_s for binding in (None, Ratio(busiest=2))
    )
    assert even < busy


@pytest.mark.parametrize("verb", [zsim.check, zsim.run])
def test_counts_that_do_not_sum_are_one_line(tmp_path: Path, verb: object) -> None:
    path = file(tmp_path, CountTrace(rows=((0, 0, 0, 0, 0, 3),)))
    assert callable(verb)
    with pytest.raises(MistakeError) as caught:
        verb(path)
    assert str(caught.value).removeprefix(f"{path}: ") == (
        "binding.rows: micro-batch 0, layer 0, group 0, source 0: counts sum to 3, must be 32, the "
        "rows that a member sends (routed)"
    )


@pytest.mark.parametrize("busiest", [None, 1.5])
def test_a_simulated_run_is_checked_with_the_numbers_of_its_binding(busiest: float | None) -> None:
    changes: dict[str, object] = {
        "model.experts": {"count": 8, "top_k": 2, "intermediate_size": 64},
        "parallel.expert": 2,
        "train.steps": 2,
    }
    if busiest is not None:
        changes["experts.busiest"] = busiest
    scenario = zsim.load("tiny_llama", changes)
    assert zsim.check(scenario, against=zsim.run(scenario)).is_right
