"""Watch a rank that torchrun started, and report the operation that it waits for.

A thread of the rank publishes the rank's progress in torchrun's store. If the rank makes no
progress for too long, the thread reads the progress of the others, reports who waits for which
operation and who is missing, and ends the process. If torchrun ends the rank because another one
died (SIGTERM), the thread reports where the rank was. Meanwhile the rank itself may hang in a
collective, where it handles no signals.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryFile
from typing import Final

from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not exported
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from zsim_torch.supervise.diagnosis import Seen, account, blamed, story
from zsim_torch.supervise.diagnosis import waiting as who_waits
from zsim_torch.supervise.process_group import Placement
from zsim_torch.supervise.progress_record import LastProgress, ProgressRecord, note_to
from zsim_torch.supervise.rank_failure import Cause, Failure, RankFailedError

EXIT_FAILED: Final = 3
_FAREWELL: Final = b"\0"
_LOOKS: Final = 10
"""Number of checks and reports within the timeout."""

_STORE_S: Final = 5.0
_QUIET_LOOKS: Final = 3
"""A rank that does not report for this many checks is stopped or gone."""


class Watchdog:
    """Watches this process, the rank at `placement`, until `end`."""

    def __init__(self, placement: Placement, timeout_s: float) -> None:
        self._rank = placement.rank
        self._ranks = placement.ranks
        self._timeout_s = timeout_s
        self._pause_s = timeout_s / _LOOKS
        self._whereabouts = ProgressRecord()
        note_to(self._whereabouts)
        self._store: TCPStore | None = None
        self._words = 0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Return a context in which SIGTERM is reported, if this is the main thread.

        A handler that is already installed stays in place.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        ears, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.signal(signal.SIGTERM, _heard)
        before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(ears,), name="watchdog ears")
        listener.start()
        try:
            yield
        finally:
            self.end()
            os.write(mouth, _FAREWELL)
            listener.join()
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(ears)
            os.close(mouth)

    def meet(self) -> None:
        """Connect to the store after the process group is joined, so that ranks can report."""
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=_STORE_S),
        )
        self._report(self._whereabouts.read())

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def where(self) -> str:
        """Return the last line of this rank, and the operation that it waits for."""
        one = Seen(rank=self._rank, note=self._whereabouts.read())
        wait = one.note.wait
        return f"last seen: {one.where}" + (f", waits for {wait.operation}" if wait else "")

    def _watch(self) -> None:
        told, since = LastProgress(count=-1, text=""), time.monotonic()
        while not self._ended.wait(self._pause_s):
            note = self._whereabouts.read()
            if note.count != told.count:
                told, since = note, time.monotonic()
            self._report(note)
            if time.monotonic() - since >= self._timeout_s and not self._ended.is_set():
                self._give_up()

    def _report(self, note: LastProgress) -> None:
        self._words += 1
        if self._store is not None:
            try:
                self._store.set(_key(self._rank), f"{self._words} {note.to_json()}")
            except RuntimeError:  # the store is gone because torchrun ends
                self._store = None

    def _heard(self) -> dict[int, tuple[str, LastProgress]]:
        """Return the last report of every other rank: its count and its progress."""
        found: dict[int, tuple[str, LastProgress]] = {}
        for rank in range(self._ranks):
            try:
                if rank != self._rank and self._store and self._store.check([_key(rank)]):
                    words, _, text = self._store.get(_key(rank)).decode().partition(" ")
                    found[rank] = (words, LastProgress.from_json(text))
            except RuntimeError:
                self._store = None
        return found

    def _seen(self) -> list[Seen]:
        """Return the last reported state of every rank; ranks that stopped reporting are gone."""
        before = self._heard()
        for _ in range(_QUIET_LOOKS):
            time.sleep(self._pause_s)
            self._report(self._whereabouts.read())
        after = self._heard()
        own = Seen(rank=self._rank, note=self._whereabouts.read())
        silent = ("", LastProgress(count=0, text=""))
        others = [
            Seen(rank=rank, note=note, gone=before.get(rank, silent)[0] == words)
            for rank in range(self._ranks)
            if rank != self._rank
            for words, note in (after.get(rank, silent),)
        ]
        return sorted([own, *others], key=lambda one: one.rank)

    def _give_up(self) -> None:
        seen = self._seen()
        first = next((one for one in seen if one.gone), None) or blamed(seen)
        how = f"no progress for {self._timeout_s:.3g} s, last seen: {first.where}"
        gone = "it tells no more, " if first.gone else account(first, seen)
        waits = who_waits(seen, without=first.rank)
        failure = Failure(
            rank=first.rank,
            cause=Cause.HUNG,
            message=f"{gone}{how}" + (f"; {waits}" if waits else ""),
        )
        report = [f"told by rank {self._rank}", *(story(one, seen) for one in seen), _stacks()]
        self._leave(str(RankFailedError(failure, report)))

    def _listen(self, ears: int) -> None:
        heard = b""
        while not {*heard} & {signal.SIGTERM, *_FAREWELL}:
            heard = os.read(ears, 64)
        if not self._ended.is_set():
            self._leave(f"rank {self._rank}: ended by SIGTERM, {self.where()}")

    def _leave(self, line: str) -> None:
        sys.stderr.write(f"zsim: {line}\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)


def _heard(number: int, frame: object) -> None:
    """Do nothing: Python needs a handler, but the listening thread acts."""


def _key(rank: int) -> str:
    return f"zsim/watchdog/{rank}"


def _stacks() -> str:
    with TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
