"""Runs of a study that end their workers: each step count has a file that says what it does."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.study.proved import Proved
from zsim_study.workers.worker import Maker


@dataclass(frozen=True)
class Unruly:
    """Makes the schedule of runs that do what the files in `folder` say."""

    folder: Path

    def __call__(self, resolved: ResolvedScenario) -> "Proved | StudyOutcome":
        return UnrulySchedule(self.folder)  # type: ignore[return-value]  # all that a worker asks

    def maker(self) -> Maker:
        return self


@dataclass(frozen=True)
class UnrulySchedule:
    """A schedule whose runs end as a file says; `once` is the first time alone."""

    folder: Path

    def tried(self, resolved: ResolvedScenario) -> StudyOutcome:
        path = self.folder / str(resolved.steps)
        words = path.read_text("utf-8").split() if path.exists() else []
        if "once" in words:
            path.unlink()
        match words:
            case ["kill", *_]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["exit", *_]:
                os._exit(7)
            case ["stop", *_]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["sleep", *_]:
                time.sleep(1000)
            case ["hang", *_]:  # deaf to the alarm as well
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
                time.sleep(1000)
            case ["work", *_]:
                begin = time.process_time()
                while time.process_time() - begin < 2:
                    pass
            case ["memory", *_]:
                bytearray(10**12)
            case _:
                pass
        return StudyOutcome(status=Status.NOT_MODELLED, reason=f"{resolved.steps} steps")
