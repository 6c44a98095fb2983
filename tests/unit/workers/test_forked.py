"""Answers of a fork are those of this process, whatever becomes of the fork."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable

import pytest
from forks import are_gone, noted_forks

from zsim.limits import TimeLimitError
from zsim.workers.forked import ForkedAnswer, may_fork
from zsim.workers.limited_run import limited
from zsim.workers.memory_bound import used_bytes

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only forks on Linux"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of a fork where threads are
]


@pytest.fixture(autouse=True)
def alone_with_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be two cores, and no threads but this one, whatever a test runs on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the forks of a test."""
    return noted_forks(monkeypatch)


def test_an_answer_comes_from_a_fork_that_is_gone_afterwards(forks: list[int]) -> None:
    with ForkedAnswer(lambda: (os.getpid(), "x" * 10**6)) as forked:
        process, text = forked.result()
    assert process != os.getpid()
    assert len(text) == 10**6  # more than a pipe holds
    assert are_gone(forks)


def test_what_a_fork_fails_at_is_done_here_and_raises_here(forks: list[int]) -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            raise KeyError
        return here

    with ForkedAnswer(work) as forked:
        assert forked.result() == here

    def fails() -> int:
        raise LookupError("no answer")

    with ForkedAnswer(fails) as forked, pytest.raises(LookupError, match="no answer"):
        forked.result()
    assert are_gone(forks)


@pytest.mark.parametrize(
    "end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0), sys.exit]
)
def test_a_fork_that_ends_without_an_answer_is_replaced(end: Callable[[], object]) -> None:
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            end()
        return "answer"

    with ForkedAnswer(work) as forked:
        assert forked.result() == "answer"


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError, MemoryError])
def test_a_fork_ends_with_what_it_ran_beside(error: type[BaseException], forks: list[int]) -> None:
    with pytest.raises(error), ForkedAnswer(signal.pause):
        raise error
    assert are_gone(forks)


def test_a_signal_that_comes_as_a_fork_starts_leaves_none(
    forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = signal.pthread_sigmask

    def interrupted(how: int, signals: Iterable[int]) -> set[int]:
        found = mask(how, signals)
        if how == signal.SIG_SETMASK:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt), ForkedAnswer(signal.pause):
        pass
    assert are_gone(forks)


def test_a_limit_on_time_holds_while_a_fork_is_waited_for(forks: list[int]) -> None:
    with (
        pytest.raises(TimeLimitError),
        limited(time_s=0.2, memory_bytes=None),
        ForkedAnswer(signal.pause) as forked,
    ):
        forked.result()
    assert are_gone(forks)


@pytest.mark.one_commit_in(24)
def test_a_fork_has_a_share_of_the_memory_and_none_left_is_told_here() -> None:
    here, most = os.getpid(), used_bytes() * 8 + 2**30

    def fill() -> int:
        if os.getpid() == here:
            return 0
        kept: list[bytearray] = []
        while len(kept) << 24 < most:
            kept.append(bytearray(1 << 24))
        return len(kept)

    with limited(memory_bytes=most), ForkedAnswer(fill) as forked:
        assert forked.result() == 0


def test_a_fork_writes_nothing_that_this_process_has_in_its_buffers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sys.stdout.write("once")
    with ForkedAnswer(lambda: sys.stdout) as forked:
        assert forked.result() is None
    sys.stdout.flush()
    assert capfd.readouterr().out == "once"


def test_there_is_no_fork_on_one_core_with_other_threads_or_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert may_fork()
    with limited(memory_bytes=used_bytes() * 3):
        assert not may_fork()
    with monkeypatch.context() as changed:
        changed.setattr(os, "sched_getaffinity", lambda _: {0})
        assert not may_fork()
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(may_fork()))
    other.start()
    other.join()
    assert found == [False]
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), other])
    assert not may_fork()
    with ForkedAnswer(os.getpid) as forked:
        assert forked.result() == os.getpid()
