"""How long a proof takes: GPTs of 96 and of 1,000 layers, stage 3, and what each family costs.

Of DeepSpeed's stage 3, whose schedules cost most, also how long it takes to make one.

    python benchmarks/check.py

Each block has twelve parameters; there are 512 ranks, through which a proof does not go one by one:
for 8 and for 4,096 it takes as long. Last, values with each of 64 ranks run by itself. The fastest
of a few repetitions in one process, in processor time, after import.
"""

import time

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check, values
from zsim.proof.context import Context
from zsim.proof.families import families as installed
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed

REPETITIONS = 7
LAYERS = {96: (12288, 96), 1000: (1024, 16)}
"""Width and heads by number of layers."""
CASES = (
    (96, 1, 512, 1.0),
    (96, 4, 8, 1.0),
    (96, 4, 512, 1.0),
    (96, 4, 4096, 1.0),
    (1000, 1, 512, 2.0),
    (1000, 4, 512, 2.0),
)
"""Layers, accumulation steps, ranks, and seconds that a proof may take."""


DEEPSPEED = (96, 1, 512, 1.0)
"""The same of a step of DeepSpeed's stage 3, emulated."""

UNFOLDED = (96, 4, 64, 10.0)
"""The same of values alone, with every rank run."""


def main() -> None:
    """Print a line for each case, and the share of each family in it."""
    for case in CASES:
        prove(*case, emulate=None)
    prove(*DEEPSPEED, emulate=DeepSpeed())
    layers, steps, ranks, target_s = UNFOLDED
    made, model = make(layers, steps, ranks, emulate=None)
    begin = time.process_time()
    found = values.shown(Context.of(made, model), unfolded=True)
    taken_s = time.process_time() - begin
    print(
        f"{layers} layers, accumulation {steps}, {found.classes} ranks in full: values in "
        f"{taken_s:.3f} s, target {target_s} s, {len(found.findings)} findings"
    )


def make(
    layers: int, steps: int, ranks: int, *, emulate: DeepSpeed | None
) -> tuple[Schedule, Model]:
    """Make a schedule, and the model that it trains."""
    width, heads = LAYERS[layers]
    shape = GPT(
        layers=layers,
        hidden_size=width,
        attention_heads=heads,
        sequence_length=2048,
        vocab_size=50257,
    )
    strategy = Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=3, emulate=emulate),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=steps),
    )
    model = gpt(shape, micro_batch_size=1, precision=strategy.train.precision)
    return make_schedule(model, strategy), model


def prove(
    layers: int, steps: int, ranks: int, target_s: float, *, emulate: DeepSpeed | None
) -> None:
    """Prove a schedule, as often as it takes."""
    begin = time.process_time()
    made, model = make(layers, steps, ranks, emulate=emulate)
    making_s = time.process_time() - begin
    taken_s: list[float] = []
    families: dict[str, float] = {}
    findings = check(made, model)
    for _ in range(REPETITIONS):
        begin = time.process_time()
        check(made, model)
        taken_s.append(time.process_time() - begin)
        context = Context.of(made, model)
        for name, family in installed().items():
            begin = time.process_time()
            family.examine(context)
            seconds = time.process_time() - begin
            families[name] = min(seconds, families.get(name, seconds))
    print(
        f"{layers} layers, accumulation {steps}, {ranks} ranks{', DeepSpeed' if emulate else ''}: "
        f"{len(made.programs[0].step)} operations, made in {making_s:.3f} s, proved in "
        f"{min(taken_s):.3f} s, target {target_s} s, {len(findings)} findings"
    )
    slowest = sorted(families.items(), key=lambda item: -item[1])[:5]
    print("    " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in slowest))


if __name__ == "__main__":
    main()
