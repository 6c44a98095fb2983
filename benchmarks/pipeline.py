"""Time in which pipelines of many micro-batches are made, proved and simulated.

    python -m benchmarks.pipeline

Llama of 80 layers (the shape of Llama 2 70B, sequences of 1,024 tokens) as nanotron trains it, and
of 64 as Megatron-LM does too, whose stages have as many layers; two steps, recorded. Values and
order are proved. Each case in a process of its own, as a command is, after import: each part in
processor time; then from the scenario to the result by the clock on all cores that there are,
proved beside the simulation: with values, as of a schedule in a file, and without, as
`zsim run SCENARIO` does.
"""

import multiprocessing
import os
import time
from dataclasses import dataclass, field

import zsim
from zsim.proof import check


@dataclass(frozen=True)
class Case:
    """A runtime with its options, and how large a pipeline."""

    runtime: str
    stages: int
    micro_batches: int
    layers: int = 80
    options: dict[str, int] = field(default_factory=dict[str, int])

    def __str__(self) -> str:
        """Return it in words."""
        interleaved = ", interleaved" if self.options else ""
        return (
            f"{self.runtime}, {self.layers} layers, {self.stages} stages{interleaved}, "
            f"{self.micro_batches} micro-batches"
        )


CASES = (
    Case("nanotron", 4, 32),
    Case("nanotron", 32, 64),
    Case("nanotron", 32, 64, 64),
    Case("megatron", 32, 64, 64),
    Case("megatron", 32, 64, 64, {"num_layers_per_virtual_pipeline_stage": 1}),
)
TARGET_S = 5.0


def main() -> None:
    """Print lines for each case."""
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        for work in (_print_parts, _print_clocked):
            process = context.Process(target=work, args=(case,))
            process.start()
            process.join()


def _print_parts(case: Case) -> None:
    """Print the processor time that each part takes."""
    _import_all()
    begin = time.process_time()
    job = zsim.load(_tables(case)).job
    made = time.process_time()
    found = check(job.schedule, job.model)
    proved = time.process_time()
    zsim.run(job, check=False)
    end = time.process_time()
    count = sum(len(program.by_id) for program in job.schedule.programs)
    print(
        f"{case}, {count:,} operations: "
        f"made in {made - begin:.2f} s, proved in {proved - made:.2f} s, "
        f"simulated in {end - proved:.2f} s, {end - begin:.2f} s in all, "
        f"target {TARGET_S:g} s, {len(found)} findings"
    )


def _print_clocked(case: Case) -> None:
    """Print what it takes on all cores, with values proved and without."""
    _import_all()
    begin = time.perf_counter()
    zsim.run(zsim.load(_tables(case)).job, forks=True)
    proved = time.perf_counter()
    zsim.run(_tables(case), forks=True)
    end = time.perf_counter()
    print(
        f"  by the clock, on {len(os.sched_getaffinity(0))} cores: {proved - begin:.2f} s, "
        f"{end - proved:.2f} s as zsim run, which proves no values"
    )


def _import_all() -> None:
    zsim.run(_tables(Case("megatron", 2, 2)))


def _tables(case: Case) -> dict[str, object]:
    return {
        "title": str(case),
        "model": {
            "architecture": "llama",
            "layers": case.layers,
            "hidden_size": 8192,
            "attention_heads": 64,
            "key_value_heads": 8,
            "intermediate_size": 28672,
            "sequence_length": 1024,
            "vocab_size": 32000,
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": max(1, case.stages // 8)},
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
        "zero": {"stage": 1, "emulate": case.runtime, case.runtime: case.options},
        "parallel": {"pipeline": case.stages},
        "train": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": case.micro_batches,
            "precision": "bf16",
            "optimizer": "adam",
        },
    }


if __name__ == "__main__":
    main()
