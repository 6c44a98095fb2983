"""Processor time of a process and of all its descendants, as Linux counts it."""

import os
from collections import defaultdict
from pathlib import Path
from time import process_time

LOOP_SECONDS = 0.21
"""What `loop_seconds` returned on the idle machine on which the limits of files were set."""


def tree_seconds(root: int) -> float:
    """Return the user and system seconds of process `root` and its descendants.

    Children that were waited for count: the kernel adds their time to their parent's.
    """
    seconds: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    tick = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text("utf-8", errors="replace")
        except OSError:  # ended since the folder was listed
            continue
        fields = stat.rpartition(")")[2].split()
        pid = int(folder.name)
        children[int(fields[1])].append(pid)
        seconds[pid] = sum(map(int, fields[11:15])) / tick
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += seconds.get(pid, 0.0)
        waiting += children[pid]
    return total


def loop_seconds() -> float:
    """Return the processor time of a fixed loop, to compare machines and their load."""
    began = process_time()
    total = 0
    for number in range(4_000_000):
        total += number & 3
    return process_time() - began
