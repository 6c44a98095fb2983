"""How long pipelines of many micro-batches take to be made, proved and simulated.

    python -m benchmarks.pipeline

Llama of 80 layers (the shape of Llama 2 70B, sequences of 1,024 tokens) as nanotron trains it, two
steps, recorded. Values and order are proved. In processor time of one process, after import.
"""

import time
from collections.abc import Callable
from typing import Any

import zsim
from zsim.proof import check

CASES = ((4, 32), (32, 64))
"""Stages and micro-batches."""
TARGET_S = 5.0


def main() -> None:
    """Print a line for each case."""
    zsim.run(_tables(2, 2))  # imports
    for stages, micro_batches in CASES:
        tables = _tables(stages, micro_batches)
        job, made_s = _timed(lambda tables=tables: zsim.load(tables).job)
        found, proved_s = _timed(lambda job=job: check(job.schedule, job.model))
        _, run_s = _timed(lambda job=job: zsim.run(job, check=False).step_time_s)
        count = sum(len(program.by_id) for program in job.schedule.programs)
        print(
            f"{stages} stages, {micro_batches} micro-batches, {count:,} operations: "
            f"made in {made_s:.2f} s, proved in {proved_s:.2f} s, simulated in {run_s:.2f} s, "
            f"{made_s + proved_s + run_s:.2f} s in all, target {TARGET_S:g} s, "
            f"{len(found)} findings"
        )


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    found = act()
    return found, time.process_time() - begin


def _tables(stages: int, micro_batches: int) -> dict[str, object]:
    return {
        "title": f"{stages} stages",
        "model": {
            "architecture": "llama",
            "layers": 80,
            "hidden_size": 8192,
            "attention_heads": 64,
            "key_value_heads": 8,
            "intermediate_size": 28672,
            "sequence_length": 1024,
            "vocab_size": 32000,
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": max(1, stages // 8)},
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
        "zero": {"stage": 1, "emulate": "nanotron"},
        "parallel": {"pipeline": stages},
        "train": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": micro_batches,
            "precision": "bf16",
            "optimizer": "adam",
        },
    }


if __name__ == "__main__":
    main()
