"""Time and memory of `zsim best` for 70B on 128 H100, and the gap that it leaves.

    python -m benchmarks.best

All runtimes, the default batch and operations, one process for each core. The answer is the same on
every machine. The wall time counts where nothing else runs; CPU seconds are of all processes, and
their memory the most that this one and the largest worker held.
"""

import resource
import sys

import zsim
from zsim_plan.answer.best_search import OPERATIONS

MODEL, GPUS = "llama3.1-70b", "128xh100"
CHANGES: dict[str, object] = {}
SEARCH_OPERATIONS = OPERATIONS
WORKERS = None
"""One for each core."""

SETTINGS, WALL_S, GAP = 5_000, 60.0, 0.10
MIB = 1024  # ru_maxrss is in KiB


def main() -> int:
    """Print what the search came to, beside targets; 1 where one is missed."""
    found = zsim.best(MODEL, GPUS, CHANGES, operations=SEARCH_OPERATIONS, workers=WORKERS)
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    largest = " + ".join(f"{each.ru_maxrss / MIB:,.0f}" for each in used)
    print(
        f"{MODEL} on {GPUS}: {found.settings:,} settings, {len(found.tried)} simulated, "
        f"{found.operations:,} operations, {found.open_settings} not reached, "
        f"gap {found.gap:.1%}, {found.wall_time_s:.1f} s, "
        f"{cpu_s:.1f} s of CPU, {largest} MiB"
    )
    met = found.settings >= SETTINGS and found.wall_time_s <= WALL_S and found.gap <= GAP
    print(f"at least {SETTINGS:,} settings in {WALL_S:.0f} s, gap at most {GAP:.0%}: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
