"""Time to make, prove and simulate a step of a trillion parameters with states on NVMe.

    python -m benchmarks.trillion

`infinity_1t`, which ships, on 512 GPUs instead of 16. Made is what follows from the model and the
strategy; the proof is that of `zsim check`; simulated are setup and a step. Processor time of one
process, the fastest of several rounds after a first one, each with a schedule of its own.
"""

import time

import zsim
from zsim.backend.backend import Job
from zsim.proof import prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import walk
from zsim_des import SimBackend

ROUNDS = 7
CHANGES: dict[str, object] = {"cluster.nodes": 32}
TARGET_S = 1.0


def main() -> None:
    """Print the three times, and their sum."""
    scenario = zsim.load("infinity_1t", CHANGES)
    model, strategy, cluster = scenario.model, scenario.strategy, scenario.cluster
    fastest: dict[str, float] = {}
    count = 0
    for _ in range(ROUNDS + 1):
        begin = time.process_time()
        schedule = make_schedule(model, strategy)
        made = time.process_time()
        proof = prove(schedule, model)
        proved = time.process_time()
        SimBackend().run(Job(schedule=schedule, model=model, cluster=cluster), seed=0)
        end = time.process_time()
        assert not proof.findings, proof.findings[0]
        (program,) = schedule.programs
        count = sum(1 for part in (program.setup, program.step) for _ in walk(part))
        parts = {"made": made - begin, "proved": proved - made, "simulated": end - proved}
        for name, seconds in {**parts, "together": end - begin}.items():
            fastest[name] = min(seconds, fastest.get(name, seconds))
    print(f"{model.parameter_count:,} parameters of a rank of {cluster.ranks}, {count} operations")
    for name, seconds in fastest.items():
        print(f"{name:<10} {seconds:.3f} s{f', target {TARGET_S}' * (name == 'together')}")


if __name__ == "__main__":
    main()
