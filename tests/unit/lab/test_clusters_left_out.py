"""Clusters that are left out: what is predicted of one never rests on its own times."""

from dataclasses import replace

import pytest

from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.tuner import alone_s
from zsim_lab.fit.clusters_left_out import by_another, clusters_of, left_out
from zsim_lab.fit.constants import START
from zsim_lab.rows.collective_rows import Measurement

LINKS = Bandwidths(gpu=450 * 10**9, node=400 * 10**9, pair=50 * 10**9)
TRUTH = START.changed(link=0.8)


def sweep(system: str, *, gpu: str = "h100", slower: float = 1.0) -> list[Measurement]:
    """Return all-gathers over 2 and 8 ranks, so many times as long as `TRUTH` says."""
    return [
        Measurement(
            file="table",
            row=line,
            gpu=gpu,
            system=system,
            collective=Collective.ALL_GATHER,
            shape=GroupShape(ranks=ranks),
            size_bytes=size,
            seconds=slower
            * alone_s(TRUTH, Collective.ALL_GATHER, size, GroupShape(ranks=ranks), links=LINKS),
            links=LINKS,
            source="nobody",
        )
        for line, (ranks, size) in enumerate((r, 2**p) for r in (2, 8) for p in range(16, 33, 4))
    ]


def test_a_cluster_like_another_is_predicted_from_it() -> None:
    rows = [*sweep("one"), *sweep("other")]
    assert clusters_of(rows) == [("h100", "one"), ("h100", "other")]
    found = left_out(rows, ("h100", "one"))
    assert [each.measurement for each in found.judged] == rows[:10]
    assert max(each.error for each in found.judged) < 0.03


def test_its_own_times_change_no_prediction_of_a_cluster_that_is_left_out() -> None:
    as_measured, slowed = (
        left_out([*sweep("one", slower=slower), *sweep("other")], ("h100", "one"))
        for slower in (1.0, 3.0)
    )
    before, after = ([each.predicted_s for each in one.judged] for one in (as_measured, slowed))
    assert before == after
    assert min(each.error for each in slowed.judged) > 0.5


def test_the_only_cluster_with_a_gpu_is_predicted_by_nobody() -> None:
    rows = [*sweep("one"), *sweep("rack", gpu="b200")]
    assert left_out(rows, ("b200", "rack")).judged == ()


def test_without_a_model_a_row_is_as_long_as_the_very_same_of_another_cluster() -> None:
    one, other = sweep("one"), sweep("other", slower=2.0)
    larger = replace(one[0], system="third", size_bytes=one[0].size_bytes + 1)
    found = by_another([*one, *other, larger])
    assert len(found) == 20
    for each in found:
        expected = 1.0 if each.measurement.system == "one" else 0.5
        assert each.error == pytest.approx(expected)
