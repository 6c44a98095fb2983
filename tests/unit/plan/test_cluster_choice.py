"""Several clusters or quotes in one question: compared by what is minimized, on one page."""

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.mistake import MistakeError
from zsim_plan.answer.best_search import best
from zsim_plan.answer.cluster_choice import ClusterAnswer, ClusterChoice, best_clusters, quoted

TINY = (
    "model.layers=2",
    "model.sequence_length=256",
    "model.vocab_size=1000",
    "parallel.tensor=1",
    "activations.checkpointing=none",
    "train.micro_batch_size=1",
)
CLUSTERS = ["2xh100@2", "2xa100@1", "2xh100@9"]


@pytest.fixture(scope="module")
def choice() -> ClusterChoice:
    return best_clusters(
        "llama3.2-1b",
        CLUSTERS,
        TINY,
        among=["fsdp2"],
        tokens=10**9,
        batch_tokens=256 * 4,
        objective="cost",
        operations=1,
        search={"workers": 1},
    )


def test_each_cluster_has_the_answer_of_its_own_question(choice: ClusterChoice) -> None:
    alone = best(
        "llama3.2-1b",
        "2xa100",
        TINY,
        among=["fsdp2"],
        tokens=10**9,
        batch_tokens=256 * 4,
        objective="cost",
        price=1.0,
        operations=1,
        workers=1,
    )
    found = choice.answers[1].result
    assert replace(found, wall_time_s=0.0).text() == replace(alone, wall_time_s=0.0).text()


def test_the_best_cluster_costs_least_and_the_others_are_compared_with_it(
    choice: ClusterChoice,
) -> None:
    costs: dict[str, float] = {}
    for each in choice.answers:
        assert each.best is not None
        budget = each.result.budget(each.best)
        assert budget is not None
        assert budget.cost is not None
        costs[each.gpus] = budget.cost
    assert [each.gpus for each in choice.ranked] == sorted(costs, key=lambda name: costs[name])
    assert choice.chosen is not None
    for each in choice.ranked:
        ratio = costs[each.gpus] / costs[choice.chosen.gpus]
        assert choice.more(each) == pytest.approx(ratio - 1, abs=1e-12)
    dear = choice.answers[2]
    assert choice.more(dear) > 3  # the same GPUs at 4.5 times the price
    assert choice.is_tie(dear) is not True
    names = [name for name, _ in choice.facts()]
    assert names == ["best", *(each.gpus for each in choice.ranked[1:])]


def test_one_page_has_all_clusters(choice: ClusterChoice, tmp_path: Path) -> None:
    path = tmp_path / "choice.html"
    choice.report(path, command="zsim best ...")
    text = path.read_text("utf-8")
    for each in choice.answers:
        assert each.gpus in text
        assert each.best is not None
        assert each.best.name() in text
    assert text.count("As a scenario") == len(CLUSTERS)


def test_the_object_has_all_clusters_the_best_first(choice: ClusterChoice) -> None:
    found = choice.to_dict()
    assert choice.chosen is not None
    assert found["best"] == choice.chosen.gpus
    clusters = found["clusters"]
    assert isinstance(clusters, list)
    assert [each["gpus"] for each in clusters] == [each.gpus for each in choice.ranked]
    assert all(each["best"]["budget"]["goodput"] for each in clusters)


def test_the_setting_of_the_best_cluster_is_saved(choice: ClusterChoice, tmp_path: Path) -> None:
    assert choice.chosen is not None
    choice.save(tmp_path / "choice.toml")
    choice.chosen.result.save(tmp_path / "alone.toml")
    assert (tmp_path / "choice.toml").read_text() == (tmp_path / "alone.toml").read_text()


def test_a_cluster_on_which_nothing_fits_is_last(choice: ClusterChoice) -> None:
    none = replace(choice.answers[0], result=replace(choice.answers[0].result, tried=()))
    found = replace(choice, answers=(none, *choice.answers[1:]))
    assert found.ranked[-1] is none
    assert found.facts()[-1] == (none.gpus, "nothing fits")
    assert "none fits" in found.text() or "nothing fits" in found.text()
    alone = replace(choice, answers=(none, none))
    assert alone.best is None
    assert dict(alone.facts())["best"].startswith("nothing fits")
    with pytest.raises(MistakeError, match="no setting fits"):
        alone.save("choice.toml")


def test_a_quote_is_gpus_and_a_price() -> None:
    assert quoted("64xb200@4.20") == ("64xb200", 4.2)
    assert quoted("64xb200") == ("64xb200", None)
    with pytest.raises(MistakeError, match="must be more than 0"):
        quoted("64xb200@0")


@pytest.mark.parametrize(
    ("clusters", "price", "why"),
    [
        (["8xh100@2", "8xa100"], None, "give a price after @ to all GPUs or to none"),
        (["8xh100@2", "8xa100@1"], 2.0, "cannot be combined with a price after @"),
        (["8xh100"] * 9, None, "9 clusters must be at most 8"),
    ],
)
def test_quotes_that_contradict_each_other_are_refused(
    clusters: list[str], price: float | None, why: str
) -> None:
    with pytest.raises(MistakeError, match=why):
        best_clusters("llama3.2-1b", clusters, price=price)


def test_times_of_a_data_sheet_are_not_compared_with_measured_ones_without_a_caution(
    choice: ClusterChoice,
) -> None:
    first, second, third = choice.answers
    assert "caution" not in dict(choice.facts())
    found = replace(choice, answers=(first, _without_error(second), third))
    caution = dict(found.facts())["caution"]
    assert caution.startswith(f"no published run is like that on {second.gpus}, ")
    assert first.gpus in caution
    assert third.gpus in caution
    assert "mostly too short" in caution
    other = replace(second, result=replace(_without_error(second).result, gpu="MI300X-192GB"))
    scaled = dict(replace(choice, answers=(first, other, third)).facts())["caution"]
    assert f"like that on {second.gpus}, whose times scale those of measured GPUs" in scaled
    unknown = tuple(_without_error(each) for each in choice.answers)
    assert "caution" not in dict(replace(choice, answers=unknown).facts())


def _without_error(answer: ClusterAnswer) -> ClusterAnswer:
    """Return `answer` without an error of its step times, as on a GPU of a data sheet."""
    tried = tuple(
        replace(each, outcome=replace(each.outcome, error=None)) for each in answer.result.tried
    )
    return replace(answer, result=replace(answer.result, tried=tried))
