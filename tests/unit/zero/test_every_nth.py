"""Checkpoints of every n-th block alone."""

from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from fitting import fitting

from zsim.analysis.schedule_plan import plan
from zsim.config_error import ConfigError
from zsim.model.architecture import Llama
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

SHAPE = Llama(layers=5, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
EVERY_SECOND = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=2),
    activations=Activations(checkpointing=Checkpointing.FULL, every_nth=2),
    train=Train(precision=Precision.BF16),
)
WAYS = {
    "cut over the tensor axis": EVERY_SECOND.but({"activations.partition": True}),
    "on the host": EVERY_SECOND.but({"zero.stage": 3, "offload.checkpoints": "host"}),
    "in a row": EVERY_SECOND.but({"zero.contiguous": True}),
    "FSDP1": EVERY_SECOND.but({"zero": Zero(stage=3, emulate=FSDP1())}),
    "FSDP2": EVERY_SECOND.but({"zero": Zero(stage=3, emulate=FSDP2())}),
}


def run_again(made: Schedule) -> set[str]:
    (program,) = made.programs
    return {
        each.unit
        for each in program.step
        if isinstance(each, Compute) and each.action is Action.RECOMPUTE
    }


@pytest.mark.matrix(15)
@pytest.mark.parametrize("name", WAYS)
def test_every_second_block_is_run_again_and_the_step_is_proved(name: str) -> None:
    strategy = WAYS[name]
    model = fitting(SHAPE, strategy)
    made = make_schedule(model, strategy)
    assert run_again(made) == {"block1", "block3"}
    proves_and_trains(made, model, strategy)


def test_the_fewer_blocks_are_checkpointed_the_more_memory_a_step_takes() -> None:
    shape = replace(SHAPE, layers=6, sequence_length=256)

    def peak(nth: int) -> int:
        strategy = EVERY_SECOND.but({"activations.every_nth": nth})
        model = fitting(shape, strategy)
        return plan(make_schedule(model, strategy), model).peak.bytes

    peaks = [peak(nth) for nth in (1, 2, 3, 6)]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize("runtime", [DeepSpeed(), Megatron(), Nanotron()])
def test_runtimes_that_have_no_such_option_refuse_it(runtime: RuntimeOptions) -> None:
    name = type(runtime).__name__
    with pytest.raises(ConfigError, match=rf"every_nth: 2 is not in {name}, allowed is 1"):
        EVERY_SECOND.but({"zero": Zero(stage=1, emulate=runtime)})


def test_it_is_for_full_checkpoints() -> None:
    with pytest.raises(ConfigError, match="every_nth: 2 needs checkpointing = full"):
        EVERY_SECOND.but({"activations.checkpointing": Checkpointing.NONE})
