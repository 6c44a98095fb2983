"""ZeRO-3 of the example, with gradients reduced by an all-to-all and a sum of the received blocks.

A rank sends block i of its gradient to rank i and adds the blocks that it receives, as DeepSpeed's
quantized reduction does (`all_to_all_quant_reduce`), here without quantization.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from zsim.schedule.builder import COMMUNICATION, BufferHandle
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule

EXAMPLE = Path(__file__).parents[2] / "examples" / "zero3_by_hand.py"


def example() -> ModuleType:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location("zero3_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def exchanged(ranks: int = 4) -> Schedule:
    """Return the schedule on `ranks` ranks."""
    hand: Any = example()
    elements = hand.ELEMENTS
    shard = -(-elements // ranks)
    hand.RANKS, hand.SHARD, hand.PADDED = ranks, shard, shard * ranks
    made = hand.Zero3()
    came: dict[str, BufferHandle] = {
        layer.name: made.build.buffer(
            f"{layer.name}/came", hand.PADDED, kind=Kind.COMMUNICATION, home=COMMUNICATION
        )
        for layer in made.layers
    }
    step = made.build.step
    made.setup()
    made.load()
    for layer in made.layers:
        made.forward(layer)
    made.seed(made.layers[-1])
    for layer in reversed(made.layers):
        made.backward(layer)
        step.allocate(layer.staging)
        step.copy(
            f"{layer.name}/stage", layer.gradient.all, layer.staging[:elements], divisor=ranks
        )
        padded = ""
        if elements < hand.PADDED:
            padded = step.fill(f"{layer.name}/pad", layer.staging[elements:], 0.0)
        step.free(layer.gradient)
        step.allocate(came[layer.name])
        moved = step.all_to_all(
            f"{layer.name}/exchange",
            made.data,
            layer.staging.all,
            came[layer.name].all,
            after=[padded or f"step/{layer.name}/stage"],
        )
        step.free(layer.staging, uses=[moved])
        step.allocate(layer.own)
        for place in range(ranks):
            step.copy(
                f"{layer.name}/{'reduce' if place == ranks - 1 else f'add{place}'}",
                came[layer.name][place * shard : (place + 1) * shard],
                layer.own.all,
                accumulate=place > 0,
                stream=COMMUNICATION,
            )
        step.free(came[layer.name])
    for layer in made.layers:
        made.update(layer)
    parameters = tuple(
        LogicalParameter(name=f"{name}.weight", elements=elements) for name in hand.LAYERS
    )
    schedule = made.build.schedule(Contract(parameters=parameters, loss_divisor=ranks))
    assert isinstance(schedule, Schedule)
    return schedule
