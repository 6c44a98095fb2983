"""The goodput of a training: its defaults have sources, and options replace them."""

import pytest

import zsim
from zsim.api.goodput_answer import FAILURES, Goodput, checkpoint_bytes, reliability_of
from zsim.api.training_budget import TrainingBudget
from zsim.mistake import MistakeError

DAY_S = 86_400
LLAMA3_405B = 14 * 405_000_000_000
"""Bytes of weights in bf16, and of masters and both moments in fp32."""


def goodput(*given: str, gpus: int = 16_384) -> Goodput:
    return Goodput(gpus=gpus, gpus_per_node=8, bytes=LLAMA3_405B, given=reliability_of(given))


def test_the_defaults_give_the_goodput_that_llama_3_published() -> None:
    found = goodput()
    hours = found.interruptions.between_s / 3600
    assert hours == pytest.approx(54 * 24 / 419)
    assert 0.9 < found.goodput < 0.95  # "higher than 90% effective training time"
    text = dict(found.facts())
    assert "419 in 54 days on 16,384 H100" in text["goodput"]
    assert "arXiv 2402.15627" in text["goodput"]
    assert "2 TB/s for 16,384 GPUs" in text["checkpoints"]


def test_what_is_asked_replaces_a_default_and_its_source() -> None:
    found = goodput("failures=1e-4", "checkpoint=60s", "restart=5 min", "interval=1h", gpus=1024)
    assert found.interruptions.between_s == pytest.approx(3600 / (1e-4 * 1024))
    assert found.interruptions.checkpoint_s == 60
    assert found.interruptions.restart_s == 300
    assert found.interval_s == 3600
    text = " ".join(line for _, line in found.facts(10 * DAY_S))
    assert "arXiv" not in text
    assert "every 60 min as asked" in text
    assert "TB/s" not in text


def test_a_checkpoint_takes_its_bytes_over_the_bandwidth_of_all_gpus() -> None:
    found = goodput("storage=10 GB/s")
    assert found.interruptions.checkpoint_s == LLAMA3_405B / 1e10
    assert found.interruptions.restart_s == 600 + LLAMA3_405B / 1e10


def test_a_checkpoint_has_weights_masters_and_moments_of_what_is_trained() -> None:
    job = zsim.load("tiny", {"train.precision": "bf16"}).job
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    assert checkpoint_bytes(strategy, 1000) == 1000 * (2 + 3 * 4)


def test_days_include_failures_and_the_cost_includes_spare_nodes() -> None:
    given = ("failures=1e-4", "repair=1 day", "goodput=85%")
    lost = goodput(*given, gpus=512)
    assert lost.spares is not None
    assert lost.spares > 0
    budget = TrainingBudget(tokens=1, seconds=30 * DAY_S, gpus=512, goodput=lost)
    assert budget.days == pytest.approx(30 / lost.goodput)
    assert budget.gpu_hours == pytest.approx((512 + 8 * lost.spares) * 24 * budget.days)
    assert lost.goodput >= 0.85
    fewer = goodput(*given[:2], f"spares={lost.spares - 1}", gpus=512)
    assert fewer.goodput < 0.85
    without = TrainingBudget(tokens=1, seconds=30 * DAY_S, gpus=512)
    assert "of steps alone" in budget.text()
    assert "of steps alone" not in without.text()


def test_a_goodput_that_spares_cannot_reach_is_said() -> None:
    lost = goodput("failures=1e-4", "repair=1 day", "goodput=99%")
    assert lost.spares is None
    assert "none reach a goodput of 99.0%" in dict(lost.facts())["spare nodes"]
    assert lost.goodput == lost.running


def test_simulated_trainings_surround_the_expected_time() -> None:
    lost, work_s = goodput(gpus=4096), 20 * DAY_S
    simulated = lost.simulated_s(work_s)
    assert simulated is not None
    assert simulated[0] < lost.passing_s(work_s) < simulated[1]
    assert simulated == goodput(gpus=4096).simulated_s(work_s)  # the seeds are fixed


def test_without_failures_nothing_is_lost_and_nothing_is_simulated() -> None:
    lost = goodput("failures=0")
    assert lost.passing_s(1.0) == 1
    assert [name for name, _ in lost.facts(1.0)] == ["goodput"]
    assert lost.to_dict()["between_failures_s"] is None
    assert goodput("failures=0", "repair=1day").spares == 0


def test_a_training_that_makes_no_progress_is_refused() -> None:
    with pytest.raises(MistakeError, match="the training does not end"):
        goodput("failures=1", "checkpoint=1h").passing_s(1.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("failure=1", "'failure': did you mean failures?"),
        ("failures", "'failures' must be KEY=VALUE"),
        ("failures=-1", "failures: '-1' must be failures per GPU and hour, from 0 to 1"),
        ("failures=nan", "must be failures per GPU and hour"),
        ("restart=10", "restart: '10' is not a quantity such as '30 days'"),
        ("interval=0s", "must be at least 1 s"),
        ("storage=10Gb/s", "bits are not accepted"),
        ("spares=2", "spares: needs repair=TIME"),
        ("repair=1d goodput=120%", "goodput: '120%' must be a share below 1"),
        ("repair=1d goodput=95% spares=2", "goodput: finds the number of spares; remove spares"),
        ("repair=1d spares=-2", "spares: '-2' must be a whole number of nodes"),
        ("failures=0 failures=1", "failures: given twice"),
        ("checkpoint=1s restart=1s storage=1GB/s", "storage: unused with checkpoint and restart"),
    ],
)
def test_a_wrong_reliability_is_refused_in_one_line(given: str, why: str) -> None:
    with pytest.raises(MistakeError) as refused:
        reliability_of(given.split())
    assert str(refused.value).startswith("--reliability: ")
    assert why in str(refused.value)


def test_the_default_rate_is_per_gpu_and_hour() -> None:
    assert pytest.approx(1.97e-5, rel=1e-2) == FAILURES
