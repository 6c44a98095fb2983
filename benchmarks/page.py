"""How long the page of a study of 10,000 runs takes to make, how large it is, how fast it opens.

    python -m benchmarks.page

The study is that of benchmarks/study.py; one of its runs is simulated, the others are a little
longer each. A page is open when Chromium has run its scripts and drawn its figures: the time of a
headless Chromium on the page, less that on an empty one.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.study import proved_step, study
from zsim.files.html_page import render
from zsim_study.page.study_page import study_page
from zsim_study.study.outcome import StudyOutcome
from zsim_study.study.proved import Proved
from zsim_study.study.result import StudyResult, result_of
from zsim_study.study.study_plan import StudyPlan

TARGET_S = 3
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--dump-dom",
)
REPEATS = 3
"""Of which the fastest counts."""


def result(plan: StudyPlan) -> StudyResult:
    """Return a result of all runs of `plan`, each a little longer than the one before."""
    first = plan.runs[0].resolved
    assert first is not None
    proved = proved_step(first)
    assert isinstance(proved, Proved)
    outcome = proved.tried(first)
    assert outcome.summary is not None
    outcomes: dict[str, StudyOutcome] = {}
    for at, run in enumerate(plan.runs):
        longer = outcome.summary.step_time_s * (1 + at / len(plan.runs))
        outcomes[run.name] = replace(outcome, summary=replace(outcome.summary, step_time_s=longer))
    return result_of(plan, outcomes)


def opened_s(browser: str, path: Path) -> float:
    """Seconds of a headless browser on a page, from its start to its end."""
    found: list[float] = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as profile:
            begin = time.monotonic()
            words = [browser, *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
            subprocess.run(words, capture_output=True, check=True, timeout=120)
            found.append(time.monotonic() - begin)
    return min(found)


def main(runs: int) -> None:
    """Print the table."""
    plan = study(-(-runs // 36))
    found = result(plan)
    begin = time.process_time()
    text = render(study_page(found))
    print(f"the page of {len(plan.runs):,} runs is made in  {time.process_time() - begin:>12.1f} s")
    print(f"its size                           {len(text.encode()) / 2**20:>12.1f} MiB")
    browser = shutil.which("chromium")
    if browser is None:
        print("how fast it opens: no chromium here")
        return
    with tempfile.TemporaryDirectory() as folder:
        page, empty = Path(folder) / "page.html", Path(folder) / "empty.html"
        page.write_text(text, "utf-8")
        empty.write_text("<!doctype html><title>empty</title>", "utf-8")
        taken_s = opened_s(browser, page) - opened_s(browser, empty)
    print(f"it opens in                        {taken_s:>12.1f} s   target {TARGET_S}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
