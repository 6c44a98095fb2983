"""A search depends on its question and on counted work: not on clocks, load or workers."""

import json
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api import best_search
from zsim.api.best_question import Question, question_of
from zsim.api.best_result import BestResult
from zsim.api.best_search import best_of
from zsim.api.counted_work import counted_work
from zsim.api.forecast import forecast
from zsim.api.setting_trial import SettingOutcome
from zsim.api.tried_setting import TriedSetting
from zsim.mistake import MistakeError

SMALL = ("model.layers=2", "model.sequence_length=256", "model.vocab_size=1000")


def question(*more: str, among: tuple[str, ...] = ("fsdp2",), gpus: str = "4xh100") -> Question:
    return question_of("llama3.2-1b", gpus, (*SMALL, *more), batch_tokens=256 * 8, among=among)


def printed(found: BestResult) -> str:
    """Return everything that an answer prints."""
    return found.text() + json.dumps(found.to_dict())


@contextmanager
def disordered(workers: int, delay_s: Callable[[int], float]) -> Generator[Executor]:
    """Yield threads of which each call is delayed, so that results come in another order."""

    class Disordered(Executor):
        def __init__(self) -> None:
            self.count = 0
            self.pool = ThreadPoolExecutor(workers)

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.count += 1
            return self.pool.submit(self.delayed, delay_s(self.count), fn, *args, **kwargs)

        def delayed(self, seconds: float, fn: Callable[..., Any], *args: Any, **given: Any) -> Any:
            time.sleep(seconds)
            return fn(*args, **given)

    executor = Disordered()
    with executor.pool:
        yield executor


def drawn_outcome(tables: dict[str, Any], *, times_tight: bool = True) -> SettingOutcome:
    """Return an outcome that follows from the setting alone, sooner than a simulation has one."""
    del times_tight
    digest = sha256(json.dumps(tables, sort_keys=True).encode()).digest()
    fits, offloads = digest[0] < 200, "offload" in json.dumps(tables["zero"])
    return SettingOutcome(
        step_time_s=0.001 + digest[1] / 10_000 + offloads,
        memory_bytes=(digest[2] + 1) * 2**27,
        usable_bytes=80 * 2**30,
        fits=fits,
        trust="drawn",
        operations=1_000 + 100 * digest[3],
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_search, "tried", drawn_outcome)


def slow_clock(step_s: float) -> Callable[[], float]:
    """Return a clock on which so much time passes between two looks."""
    now = iter(range(10**9))
    return lambda: step_s * next(now)


def test_a_slow_machine_and_two_workers_print_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = question("parallel.tensor=1", "parallel.pipeline=1")
    usual = printed(best_of(asked, workers=1, operations=30_000))
    quick = best_search.tried

    def slow(tables: dict[str, Any], *, times_tight: bool = True) -> SettingOutcome:
        time.sleep(0.02 * (tables["activations"]["checkpointing"] == "none"))
        return quick(tables, times_tight=times_tight)

    monkeypatch.setattr(best_search, "tried", slow)
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(best_search, name, slow_clock(40.0))
    assert printed(best_of(asked, workers=2, operations=30_000)) == usual


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_in_which_simulations_end_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    asked = question("parallel.tensor=1", among=("fsdp1", "fsdp2", "megatron"))
    usual = best_of(asked, workers=1)
    assert usual.best is not None

    def delay_s(number: int) -> float:
        return sha256(bytes([seed, number % 256])).digest()[0] / 50_000

    monkeypatch.setattr(best_search, "processes", lambda count: disordered(count, delay_s))
    for workers in (2, 5):
        assert printed(best_of(asked, workers=workers)) == printed(usual)


@pytest.mark.usefixtures("drawn")
def test_more_operations_simulate_all_that_fewer_do() -> None:
    asked = question("parallel.tensor=1", among=("fsdp1", "fsdp2", "megatron"))
    before: set[str] = set()
    least = float("inf")
    for operations in (1, 40_000, 120_000, 600_000, 10**9):
        found = best_of(asked, workers=1, operations=operations)
        names = {each.name() for each in found.tried}
        assert before <= names
        assert found.operations >= sum(each.outcome.operations for each in found.tried)
        before = names
        if found.best is not None and found.best.value is not None:
            assert found.best.value <= least
            least = found.best.value
        says = found.text().startswith("search unfinished: ")
        assert says is (found.open_settings > 0 and found.gap > 0.05)
        assert (found.to_dict()["unfinished"] is not None) is says
    assert found.open_settings == 0


@pytest.mark.usefixtures("drawn")
def test_a_search_that_stops_for_its_time_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question("parallel.tensor=1")
    monkeypatch.setattr(best_search, "process_time", slow_clock(100.0))
    found = best_of(asked, workers=1, stop_s=250.0)
    first, second = found.text().splitlines()[:2]
    assert first.startswith("search unfinished: ")
    assert first.endswith("it stopped for the processor time that it took")
    assert second == found.title
    assert found.best is not None
    assert found.unfinished in found._repr_html_()


def test_plain_fsdp2_is_simulated_first_and_shown() -> None:
    found = best_of(question(among=("fsdp2", "megatron")), workers=1, operations=1)
    plain = [each for each in found.tried if each.is_plain]
    assert {each.changes["activations.checkpointing"] for each in plain} == {"none", "full"}
    for each in plain:
        assert each.changes["zero.emulate"] == "fsdp2"
        assert {each.changes[f"parallel.{axis}"] for axis in ("tensor", "pipeline")} == {1}
        assert each.changes["train.micro_batch_size"] == 1
    assert any(each.group in {other.group for other in plain} for each in found.ten)
    runtimes = {each.changes["zero.emulate"] for each in found.tried}
    assert runtimes == {"fsdp2", "megatron"}


def offloads(each: TriedSetting) -> bool:
    return any("offload" in key for key in each.changes)


@pytest.mark.usefixtures("drawn")
def test_ten_rows_hold_plain_fsdp2_however_many_settings_are_faster() -> None:
    found = best_of(question(among=("fsdp1", "fsdp2", "megatron")), workers=1)
    groups = list(dict.fromkeys(each.group for each in found.answers))
    plain = {each.group for each in found.answers if each.is_plain}
    assert plain
    assert plain & {each.group for each in found.ten}
    assert len(found.ten) == min(10, len(groups))


def test_no_setting_with_offload_is_simulated_where_one_fits_without() -> None:
    asked = question("parallel.tensor=1", among=("deepspeed", "fsdp2"))
    found = best_of(asked, workers=1, operations=60_000)
    assert found.best is not None
    assert not any(map(offloads, found.tried))
    assert found.left_out > 0
    lost = sum(each.count for each in found.losses)
    best = [each for each in found.answers if each.value == found.answers[0].value]
    assert lost + len(best) == found.settings
    assert f"{found.left_out:,} with offload left out" in dict(found.facts())["search"]


def test_settings_with_offload_are_simulated_where_none_fits_without() -> None:
    asked = question("cluster.gpu_memory=2500 MB", "parallel.pipeline=1", gpus="1xh100")
    found = best_of(asked, workers=1, operations=60_000)
    assert found.left_out == 0
    assert found.best is not None
    assert offloads(found.best)


def test_work_is_counted_alike_with_and_without_what_a_process_kept() -> None:
    tables = question().space()
    group = next(each for each in tables.groups() if hasattr(each, "knobs"))
    asked = question().scenario(group.setting(0))  # type: ignore[union-attr]
    counts: list[int] = []
    for _ in range(2):
        with counted_work() as work:
            forecast(asked)
        counts.append(work.operations)
    assert counts[0] == counts[1] > 0


def test_a_limit_in_seconds_is_refused() -> None:
    old: dict[str, Any] = {"search_s": 5.0}
    with pytest.raises(TypeError, match=r"'search_s'; a search is limited by operations$"):
        best_search.best("llama3.2-1b", "4xh100", **old)
