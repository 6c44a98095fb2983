"""The process of one search: `python -m zsim_plan.page.search_child`.

It reads a request as a line of JSON from standard input, and writes its progress and then its
answer as lines of JSON to standard output. It ends, with its workers, when standard input closes:
the server keeps that open as long as somebody waits for the answer.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from threading import Thread
from time import monotonic  # noqa: TID251  (how often the progress is reported)
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zsim.api.run_result import RunResult

Line = dict[str, Any]
"""A line of the answer: an object with one key, `done`, `found`, `points` or `refused`."""

TELL_S: Final = 0.1
"""Minimum interval in seconds between two lines on the progress."""


def main() -> None:
    """Answer the request, within its limits."""
    request: Line = json.loads(sys.stdin.buffer.readline())
    Thread(target=_end_with_input, daemon=True).start()  # before slow imports
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing but the answer is written to the pipe
    out.write(f"{json.dumps(answer(request, _teller(out.write, out.flush)))}\n")
    out.flush()


def answer(request: Line, progress: Callable[[float, float], None]) -> Line:
    """Return the answer to a request: the best setting, or a curve."""
    from zsim.backend.backend import NoRouteError
    from zsim.limits import TimeLimitError
    from zsim.mistake import MistakeError
    from zsim.units import format_bytes
    from zsim.workers.limited_run import limited

    memory_bytes, time_s = request["memory_bytes"], request["time_s"]
    try:
        with limited(memory_bytes=memory_bytes, time_s=time_s):
            if request["kind"] == "search":
                return {"found": found_setting(request, progress)}
            return {"points": curve_points(request, progress)}
    except (MistakeError, NoRouteError) as mistake:
        return {"refused": str(mistake)}
    except TimeLimitError:
        return {"refused": f"time: took longer than {time_s:g} s; choose fewer GPUs or runtimes"}
    except MemoryError:
        return {
            "refused": f"memory: needs more than {format_bytes(memory_bytes)}; choose fewer GPUs"
        }


def found_setting(request: Line, progress: Callable[[float, float], None]) -> Line:
    """Return the best setting, and the facts that `zsim best` prints."""
    from zsim.api.scenario import scenario_text
    from zsim_plan.answer.best_search import best

    options = request["options"]
    result = best(
        request["model"],
        request["gpus"],
        request["changes"],
        workers=request["workers"],
        progress=progress,
        **options,
    )
    found: Line = {"title": result.title, "facts": result.facts()}
    if result.best is not None:
        found["gpus"] = result.best.gpus
        found["changes"] = dict(result.best.changes)
        found["scenario"] = scenario_text(result.scenario(result.best))
    return found


def curve_points(request: Line, progress: Callable[[float, float], None]) -> list[Line]:
    """Return the result of the setting at each number of GPUs."""
    points: list[Line] = []
    for done, point in enumerate(request["points"]):
        progress(done, len(request["points"]))
        points.append(_point(point, request))
    return points


def _point(point: Line, request: Line) -> Line:
    from zsim.api.launch import NoRouteError, run
    from zsim.api.scenario import load
    from zsim.mistake import MistakeError

    gpus = point["gpus"]
    if "refused" in point:
        return point
    try:
        result = run(load(point["tables"]), check=False)
    except (MistakeError, NoRouteError) as mistake:
        return {"gpus": gpus, "refused": str(mistake).removeprefix("scenario: ")}
    return {"gpus": gpus, **figures(result.of_tokens(request["tokens"], price=request["price"]))}


def figures(result: "RunResult") -> Mapping[str, object]:
    """Return the figures of a run that the curve shows."""
    error, budget = result.recorded.error, result.training
    return {
        "fits": result.fits,
        "step_time_s": result.step_time_s,
        "tokens_per_s": result.tokens_per_s,
        "mfu": result.summary.mfu_text,
        "error": None if error is None else error.half_width,
        "days": None if budget is None else budget.days,
        "cost": None if budget is None else budget.cost,
    }


def _teller(write: Callable[[str], object], flush: Callable[[], object]) -> Callable[..., None]:
    """Return a callback that writes the progress, not too often."""
    told_s = -TELL_S

    def tell(done: float, total: float) -> None:
        nonlocal told_s
        now_s = monotonic()
        if now_s - told_s < TELL_S:
            return
        told_s = now_s
        write(f"{json.dumps({'done': [done, total]})}\n")
        flush()

    return tell


def _end_with_input() -> None:
    """End this process and its workers when standard input closes."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
