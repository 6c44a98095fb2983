"""CPU time in which pipelines of many micro-batches are made, proved and simulated.

    python -m benchmarks.pipeline

Llama of 80 layers (the shape of Llama 2 70B, sequences of 1,024 tokens) as nanotron trains it, two
steps, recorded. Values and order are proved. In processor time of one process, after import.
"""

import time

import zsim
from zsim.proof import check

CASES = ((4, 32), (32, 64))
"""Stages and micro-batches."""
TARGET_S = 5.0


def main() -> None:
    """Print a line for each case."""
    zsim.run(_tables(2, 2))  # imports
    for stages, micro_batches in CASES:
        begin = time.process_time()
        job = zsim.load(_tables(stages, micro_batches)).job
        made = time.process_time()
        found = check(job.schedule, job.model)
        proved = time.process_time()
        zsim.run(job, check=False)
        end = time.process_time()
        count = sum(len(program.by_id) for program in job.schedule.programs)
        print(
            f"{stages} stages, {micro_batches} micro-batches, {count:,} operations: "
            f"made in {made - begin:.2f} s, proved in {proved - made:.2f} s, "
            f"simulated in {end - proved:.2f} s, {end - begin:.2f} s in all, "
            f"target {TARGET_S:g} s, {len(found)} findings"
        )


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
