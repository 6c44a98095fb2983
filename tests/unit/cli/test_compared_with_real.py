"""`zsim compare --real`: what it prints, and which rank does."""

import pytest

from zsim.api import real_comparison
from zsim.api.real_comparison import PredictedClass, RealComparisonResult
from zsim.cli.main import answer


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that needs no ranks."""
    step = PredictedClass(name="step", predicted_s=0.011, lowest_s=0.009, median_s=0.01)
    found = RealComparisonResult(title="tiny", node="node.toml", steps=3, classes=(step,))

    def compared(*_: object, **__: object) -> RealComparisonResult:
        return found

    monkeypatch.setattr(real_comparison, "compare_with_real", compared)


def test_it_says_how_far_the_prediction_is_from_the_median(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["compare", "--real", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert "predicted on node.toml, measured over 3 steps" in printed
    assert "+10%" in printed  # 11 ms to 10 ms


def test_of_the_ranks_that_torchrun_started_the_first_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: dict[str, str] = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert answer(["compare", "--real", "tiny"]) == 0
        printed[rank] = capsys.readouterr().out
    assert printed["0"]
    assert not printed["1"]
