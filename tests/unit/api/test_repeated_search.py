"""A search depends on its question and on counted work: not on clocks, load or workers."""

import json
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import inf
from typing import Any, ParamSpec, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.api.counted_work import counted_work
from zsim.api.forecast import forecast
from zsim.cli.main import answer
from zsim_plan.answer import best_search
from zsim_plan.answer.best_question import Question, question_of
from zsim_plan.answer.best_result import BestResult
from zsim_plan.answer.best_search import best_of
from zsim_plan.answer.setting_pool import SettingPool
from zsim_plan.answer.setting_trial import SettingOutcome, tried
from zsim_plan.answer.tried_setting import TriedSetting
from zsim_plan.commands import best as best_command
from zsim_plan.search.search import Search, Trial
from zsim_plan.search.space import SettingGroup

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SMALL = ("model.layers=2", "model.sequence_length=256", "model.vocab_size=1000")
FEW = ("parallel.tensor=1", "parallel.pipeline=1")
SEVERAL = ("fsdp1", "fsdp2", "megatron")


def question(*more: str, among: tuple[str, ...] = ("fsdp2",), gpus: str = "4xh100") -> Question:
    return question_of("llama3.2-1b", gpus, (*SMALL, *more), batch_tokens=256 * 8, among=among)


def printed(found: BestResult) -> str:
    """Return everything that an answer prints."""
    return found.text() + json.dumps(found.to_dict())


class Disordered(Executor):
    """Threads of which each call is delayed, so that results come in another order."""

    def __init__(self, workers: int, seed: int) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.seed, self.count = seed, 0

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Call `fn` in a thread after up to 5 ms."""
        self.count += 1
        draw = sha256(f"{self.seed} {self.count}".encode()).digest()[0]

        def delayed() -> Result:
            time.sleep(draw / 50_000)
            return fn(*args, **kwargs)

        return self.pool.submit(delayed)


@contextmanager
def disordered(workers: int, *, seed: int) -> Generator[Executor]:
    executor = Disordered(workers, seed)
    with executor.pool:
        yield executor


def offloads(each: TriedSetting) -> bool:
    return any("offload" in key for key in each.changes)


def drawn_outcome(
    tables: Mapping[str, Any], *, times_unsure: bool = True, fitting: int = 200
) -> SettingOutcome:
    """Return an outcome that follows from the setting alone, sooner than a simulation has one.

    Of 256 settings `fitting` fit.
    """
    del times_unsure
    digest = sha256(json.dumps(tables, sort_keys=True).encode()).digest()
    return SettingOutcome(
        step_time_s=0.001 + digest[1] / 10_000,
        memory_bytes=(digest[2] + 1) * 2**27,
        usable_bytes=80 * 2**30,
        fits=digest[0] < fitting,
        error_text="drawn",
        operations=1_000 + 100 * digest[3],
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_search, "tried", drawn_outcome)


def slow_clock(step_s: float) -> Callable[[], float]:
    """Return a clock on which so much time passes between two looks."""
    now = iter(range(10**9))
    return lambda: step_s * next(now)


def slowly(tables: Mapping[str, Any], *, times_unsure: bool = True) -> SettingOutcome:
    """Simulate a setting, those without checkpoints slower than others."""
    time.sleep(0.02 * (tables["activations"]["checkpointing"] == "none"))
    return tried(tables, times_unsure=times_unsure)


@pytest.mark.one_commit_in(12)
def test_a_slow_machine_and_two_workers_print_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = question(*FEW)
    usual = best_of(asked, workers=1, operations=30_000)
    assert len(usual.tried) > 5
    monkeypatch.setattr(best_search, "tried", slowly)
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(best_search, name, slow_clock(40.0))
    slow = best_of(asked, workers=2, operations=30_000)
    assert printed(slow) == printed(usual)
    assert slow.wall_time_s >= 40.0


@pytest.mark.one_commit_in(12)
def test_workers_of_a_dask_cluster_find_the_same_answer() -> None:
    distributed: Any = pytest.importorskip("distributed")
    asked = question(*FEW)
    usual = best_of(asked, workers=1, operations=40_000)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=None
    ) as cluster:
        found = best_of(asked, scheduler=cluster.scheduler_address, operations=40_000)
    assert printed(found) == printed(usual)


@pytest.mark.matrix(12)
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_in_which_simulations_end_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    asked = question("parallel.tensor=1", among=SEVERAL)
    usual = best_of(asked, workers=1, operations=400_000)
    assert usual.best is not None
    assert len(usual.tried) > 2 * best_search.AHEAD
    monkeypatch.setattr(best_search, "processes", partial(disordered, seed=seed))
    for workers in (2, 5):
        found = best_of(asked, workers=workers, operations=400_000)
        assert printed(found) == printed(usual)


def drawn_far_from_bounds(
    tables: Mapping[str, Any], *, times_unsure: bool = True
) -> SettingOutcome:
    """Return a drawn outcome that no lower bound is close to."""
    found = drawn_outcome(tables, times_unsure=times_unsure)
    return replace(found, step_time_s=1 + found.step_time_s)


@pytest.mark.one_commit_in(9)
def test_more_operations_simulate_all_that_fewer_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_search, "tried", drawn_far_from_bounds)
    asked = question("parallel.tensor=1", among=SEVERAL)
    before: set[str] = set()
    least, texts = float("inf"), list[str]()
    for operations in (1, 200_000, 10**9):
        found = best_of(asked, workers=1, operations=operations)
        names = {each.name() for each in found.tried}
        assert before <= names
        assert found.operations >= sum(each.outcome.operations for each in found.tried)
        before = names
        assert found.best is not None
        assert found.best.value is not None
        assert found.best.value <= least
        least = found.best.value
        texts.append(found.text())
        is_unfinished = found.open_settings > 0 and found.gap > 0.05
        assert texts[-1].startswith("search unfinished: ") is is_unfinished
        assert (found.to_dict()["unfinished"] is not None) is is_unfinished
    assert texts[0].startswith("search unfinished: ")
    assert "\n" + texts[-1].splitlines()[0] in texts[0]  # the title follows


@pytest.mark.usefixtures("drawn")
def test_a_search_that_stops_for_its_time_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(*FEW)
    monkeypatch.setattr(best_search, "process_time", slow_clock(100.0))
    found = best_of(asked, workers=1, stop_s=250.0)
    first, second = found.text().splitlines()[:2]
    assert first.startswith("search unfinished: ")
    more = f"continue with --search-operations {2 * found.operations}"
    assert first.endswith(f"it reached its limit of processor time, {more}")
    assert second == found.title
    assert found.best is not None
    show = getattr(found, "_repr_html_")  # noqa: B009  (notebooks call it by its name)
    assert found.unfinished in show()


@pytest.mark.one_commit_in(9)
@pytest.mark.usefixtures("drawn")
def test_plain_settings_of_each_runtime_are_simulated_first_and_fsdp2_is_shown() -> None:
    asked = question("parallel.tensor=1", among=SEVERAL)
    begun = best_of(asked, workers=1, operations=1)
    assert {each.changes["zero.emulate"] for each in begun.tried} == {*SEVERAL}
    assert {each.changes["train.micro_batch_size"] for each in begun.tried} == {1}
    plain = [each for each in begun.tried if each.is_plain]
    assert [each.changes["zero.emulate"] for each in plain] == ["fsdp2", "fsdp2"]
    assert {each.changes["activations.checkpointing"] for each in plain} == {"none", "full"}
    assert {each.changes["parallel.pipeline"] for each in plain} == {1}
    ended = best_of(asked, workers=1)
    shown = {each.choice for each in ended.ten}
    roomy = [each for each in ended.answers if not each.outcome.is_tight]
    assert shown & {each.choice for each in roomy if each.is_plain}
    assert len(shown) == len(ended.ten) == min(10, len({each.choice for each in roomy}))
    assert {each.runtime for each in ended.ten} == {each.runtime for each in roomy}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("fitting", [3, 30, 200])
def test_no_setting_with_offload_is_simulated_where_one_fits_without(
    monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    monkeypatch.setattr(best_search, "tried", partial(drawn_outcome, fitting=fitting))
    found = best_of(question(*FEW, among=("deepspeed", "fsdp2")), workers=1, operations=10**9)
    assert found.open_settings == 0
    moved = [place for place, each in enumerate(found.tried) if offloads(each)]
    assert (found.left_out > 0) is not bool(moved)
    lost = sum(each.count for each in found.losses)
    best = [each for each in found.answers if each.value == found.answers[0].value]
    assert lost + len(best) == found.settings
    if fitting == 200:
        assert not moved
        assert f"{found.left_out:,} with offload left out" in dict(found.facts())["search"]


@pytest.mark.one_commit_in(9)
def test_settings_with_offload_are_simulated_where_none_fits_without() -> None:
    asked = question(*FEW, "cluster.gpu_memory=2500 MB", gpus="1xh100")
    found = best_of(asked, workers=1, operations=40_000)
    assert found.left_out == 0
    assert found.best is not None
    assert offloads(found.best)


def long_outcome(tables: Mapping[str, Any], *, times_unsure: bool = True) -> SettingOutcome:
    """Return an outcome that fits only if as many ranks as possible share a sequence."""
    del times_unsure
    fits = tables["parallel"].get("context", 1) == 8
    return SettingOutcome(
        step_time_s=1.0 if fits else 0.0,
        memory_bytes=(40 if fits else 90) * 10**9,
        usable_bytes=80 * 10**9,
        fits=fits,
        operations=LONG_OPERATIONS,
    )


LONG_OPERATIONS = 10_000


def test_plain_settings_that_do_not_fit_leave_operations_for_one_with_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_search, "tried", long_outcome)
    few, length = ("model.layers=4", "train.micro_batch_size=1"), 32_768
    chosen = question_of(
        "llama3.2-1b",
        "16xh100",
        (*few, f"model.sequence_length={length}", "parallel.tensor=2", "zero.stage=1"),
        batch_tokens=8 * length,
        among=("deepspeed", "megatron", "nanotron"),
    )
    begun = best_of(chosen, workers=1, operations=1)
    assert begun.best is None
    operations = LONG_OPERATIONS * len(begun.tried) + 1
    found = best_of(chosen, workers=1, operations=operations)
    assert found.best is not None
    assert found.best.changes["parallel.context"] == 8


@pytest.mark.parametrize("workers", [1, 3])
def test_settings_in_flight_count_before_they_end(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def costly(tables: Mapping[str, Any], *, times_unsure: bool = True) -> SettingOutcome:
        outcome = drawn_far_from_bounds(tables, times_unsure=times_unsure)
        return replace(outcome, operations=LONG_OPERATIONS)

    monkeypatch.setattr(best_search, "tried", costly)
    monkeypatch.setattr(best_search, "processes", partial(disordered, seed=1))
    asked, limit = question("parallel.tensor=1", among=SEVERAL), 20 * LONG_OPERATIONS
    found = best_of(asked, workers=workers, operations=limit)
    assert found.open_settings > 0
    assert limit <= found.operations < limit + LONG_OPERATIONS


def test_plain_settings_surely_fit_once_one_does() -> None:
    asked = question_of(
        "llama3.2-1b",
        "8xh100",
        ("cluster.gpu_memory=10 GB", "model.layers=6"),
        among=("fsdp2", "megatron", "deepspeed"),
    )
    pool = SettingPool(asked)
    unsure = [pool.bounds[place].is_unsure for place in pool.plain()]
    assert len(unsure) > 3
    assert unsure == sorted(unsure, reverse=True)
    assert any(each.is_unsure for each in pool.bounds)  # others that may not fit were left out


def test_work_is_counted_alike_with_and_without_results_that_a_process_keeps() -> None:
    asked = question(*FEW)
    group = next(each for each in asked.space().groups() if isinstance(each, SettingGroup))
    counts: list[int] = []
    for _ in range(2):
        with counted_work() as work:
            forecast(asked.scenario(group.setting(0)))
        counts.append(work.operations)
    assert counts[0] == counts[1] > 0


def test_a_limit_in_seconds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    old: dict[str, Any] = {"search_s": 5.0}
    with pytest.raises(TypeError, match=r"'search_s'; a search is limited by operations$"):
        zsim.best("llama3.2-1b", "4xh100", **old)
    assert answer(["best", "llama3.2-1b", "--gpus", "4xh100", "--search-time", "5"]) == 2
    assert capsys.readouterr().err == (
        "zsim: --search-time: seconds depend on the machine and no longer limit a search; use "
        f"--search-operations N (default: {best_search.OPERATIONS:,})\n"
    )


def test_the_command_has_the_limit_of_the_library() -> None:
    assert best_command.OPERATIONS == best_search.OPERATIONS


def test_a_search_knows_as_answers_the_settings_that_fit_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[tuple[int, bool]] = []

    def noted(search: Search, branch: int, number: int, trial: Trial) -> None:
        known.append((trial.memory_bytes, trial.is_answer))
        record(search, branch, number, trial)

    def one_of_four(tables: Mapping[str, Any], *, times_unsure: bool = True) -> SettingOutcome:
        drawn = drawn_outcome(tables, times_unsure=times_unsure)
        fits, step_time_s = OF_FOUR[drawn.operations // 100 % 4]
        return replace(drawn, fits=fits, step_time_s=step_time_s)

    record = Search.record
    monkeypatch.setattr(Search, "record", noted)
    monkeypatch.setattr(best_search, "tried", one_of_four)
    asked = question_of(
        "llama3.2-1b",
        "4xh100",
        (*SMALL, *FEW),
        batch_tokens=2048,
        among=("fsdp2",),
        tokens=10**6,
        within_s=10.0,  # 20 ms for each of 488 steps
    )
    found = best_of(asked, workers=1, operations=400_000)
    made = [(each.outcome.fits, each.outcome.step_time_s) for each in found.tried]
    answers = [each == IN_TIME for each in made]
    assert set(made) == set(OF_FOUR)
    assert [each.is_answer for each in found.tried] == answers
    memory = [each.outcome.memory_bytes for each in found.tried]
    assert sorted(known) == sorted(zip(memory, answers, strict=True))


IN_TIME = (True, 0.01)
OF_FOUR = ((True, 0.0), (True, 0.03), (False, 0.01), IN_TIME)
"""If it fits, and its step time: not simulated, late, too large, and an answer."""


OUTCOMES = st.builds(
    SettingOutcome,
    step_time_s=st.sampled_from((0.01, 0.02)),
    memory_bytes=st.sampled_from((2**30, 2**31, 4095 * 2**20)),
    usable_bytes=st.just(2**32),
    fits=st.booleans(),
)
SETTINGS = st.builds(
    TriedSetting,
    group=st.just(0),
    changes=st.sampled_from(({"a": 1}, {"a": 2})),
    gpus=st.just(4),
    outcome=OUTCOMES,
    value=st.sampled_from((None, 1.0, 2.0)),
    is_late=st.booleans(),
)


@given(SETTINGS, SETTINGS)
def test_answers_stand_before_others_sure_ones_before_unsure_and_roomy_ones_before_tight(
    one: TriedSetting, other: TriedSetting
) -> None:
    for differs in (
        lambda each: each.is_answer,
        lambda each: each.outcome.is_sure,
        lambda each: not each.outcome.is_tight,
        lambda each: -(inf if each.value is None else each.value),
        lambda each: -each.outcome.memory_bytes,
    ):
        if differs(one) != differs(other):
            assert (one.order < other.order) is (differs(one) > differs(other))
            return
    assert (one.order == other.order) is (one.changes == other.changes)
