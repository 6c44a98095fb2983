"""Schedules are written in time linear in the layers of the model."""

import pytest
from emulated_strategies import DEEPSPEED_OFFLOADED, EMULATED, strategy
from executed_lines import lines_run
from fitting import fitting

from zsim.model.architecture import GPT
from zsim.runtimes.registry import make_schedule

LAYERS = 12


def work(name: str, layers: int) -> int:
    """Return the lines that making the schedule of a model of so many layers takes."""
    emulates = strategy((EMULATED | DEEPSPEED_OFFLOADED)[name], data=4)
    assert emulates is not None
    shape = GPT(layers=layers, hidden_size=4, attention_heads=1, sequence_length=2, vocab_size=5)
    model = fitting(shape, emulates)
    return lines_run(lambda: make_schedule(model, emulates))


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    "name",
    [
        "fsdp1",
        "fsdp1 prefetch after",
        "fsdp2",
        "deepspeed 1",
        "deepspeed 1 with its optimizer on the cpu",
        "deepspeed 3",
        "deepspeed 3, all small",
        "megatron",
        "megatron overlapped",
        "nanotron 1",
    ],
)
def test_each_further_layer_costs_as_much_as_the_one_before(name: str) -> None:
    work(name, 2)  # what is made once for all schedules
    once, twice, four_times = (work(name, times * LAYERS) for times in (1, 2, 4))
    first, second = twice - once, four_times - twice
    assert second <= 2.04 * first
