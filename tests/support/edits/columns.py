"""Right schedules that edits are made of: zsim's own stages, every runtime, pipelines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from emulated_strategies import EMULATED
from emulated_strategies import strategy as emulating
from fitting import fitting

from edits.court import Court
from zsim.model.architecture import GPT, Llama, LoRA
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.runtimes.nanotron.options import Nanotron, TensorMode
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.strategy import Checkpointing, Keep, LossScale, Precision, Strategy

SHAPE = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)
CALLED_AGAIN = "blocks called again"
"""The column of models with one block that is called twice."""
DROPOUT = "dropout"
"""The column of models that draw random numbers."""
DEEP = Llama(layers=4, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
ADAM = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1)
NO_DECAY = (ParameterGroup(parameters=("*.ln*",), rule=replace(ADAM, weight_decay=0.0)),)
GIVEN = replace(ADAM, learning_rate=LEARNING_RATE)
MOMENTUM = SGD(learning_rate=LEARNING_RATE, momentum=0.875, weight_decay=0.125, nesterov=True)
SCALE = LossScale(interval=2)
FROZEN = "frozen, "
"""How names of columns begin whose models have frozen parameters."""


@dataclass(frozen=True)
class Case:
    """A right schedule, and who judges its edits."""

    label: str
    model: Model
    schedule: Schedule
    court: Court


def of_stage(stage: int) -> list[Strategy]:
    """A ZeRO stage of zsim's own with several knobs."""
    base = Strategy(
        stage=stage, data=2, gradient_accumulation_steps=2, optimizer=ADAM, loss_scale=SCALE
    )
    full = replace(base, checkpointing=Checkpointing.FULL, bucket_elements=40)
    return [
        replace(base, precision=Precision.FP16, clip_norm=1.0, bucket_elements=40, groups=NO_DECAY),
        replace(
            base,
            tensor=2,
            precision=Precision.FP16,
            clip_norm=1.0,
            bucket_elements=25,
            optimizer=MOMENTUM,
        ),
        replace(full, tensor=2, optimizer=SGD(), partition_checkpoints=True, clip_norm=1.0),
        replace(
            base,
            data=3,
            precision=Precision.BF16,
            reduce_once=True,
            bucket_elements=70,
            prefetch_units=0,
            keep_after_forward=Keep.EVERYTHING,
            host_ahead_units=2,
        ),
        replace(base, replicate=2, clip_norm=1.0, bucket_elements=30, reductions_in_flight=0),
        replace(full, precision=Precision.BF16, offload_checkpoints=True, contiguous=stage > 1),
    ]


def of_runtimes() -> dict[str, list[Strategy]]:
    """Every runtime that is emulated, with every option."""
    found: dict[str, list[Strategy]] = {}
    for name, named in EMULATED.items():
        made = [
            emulating(
                named,
                data=2,
                micro_batches=2,
                precision=Precision.FP16,
                clip_norm=1.0,
                optimizer=ADAM,
            ),
            emulating(named, data=2, replicate=2, micro_batches=2, optimizer=GIVEN),
            emulating(
                named,
                data=4,
                micro_batches=2,
                precision=Precision.BF16,
                clip_norm=1.0,
                optimizer=GIVEN,
            ),
        ]
        kept = [replace(each, loss_scale=SCALE) for each in made if each is not None]
        found[name] = [replace(kept[0], groups=NO_DECAY), *kept[1:2]]
    return found


def of_pipelines() -> list[Strategy]:
    """Stages of a pipeline, alone, with a data axis, with a tensor axis that cuts tokens."""
    cut = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
    base = Strategy(
        stage=1,
        pipeline=2,
        gradient_accumulation_steps=2,
        optimizer=ADAM,
        loss_scale=SCALE,
        clip_norm=1.0,
        emulate=Nanotron(),
    )
    return [
        replace(base, data=2, precision=Precision.BF16),
        replace(base, data=2, tensor=2, emulate=cut, optimizer=GIVEN),
        replace(base, stage=0, precision=Precision.FP16),
        replace(base, stage=0, pipeline=4, clip_norm=None),
        replace(base, pipeline=1, tensor=2, data=2, emulate=cut, precision=Precision.BF16),
    ]


def of_frozen() -> dict[str, list[Strategy]]:
    """Strategies of models with frozen parameters."""
    stages = {f"{FROZEN}stage {stage}": of_stage(stage) for stage in range(4)}
    names = ("fsdp2", "deepspeed 1", "deepspeed 2", "deepspeed 3")
    runtimes = {f"{FROZEN}{name}": found for name, found in of_runtimes().items() if name in names}
    return {**stages, **runtimes}


def strategies() -> dict[str, list[Strategy]]:
    """What edits are made of, by column of the table."""
    found = {f"stage {stage}": of_stage(stage) for stage in range(4)}
    called = [of_stage(stage)[place] for stage, place in ((0, 0), (1, 2), (2, 3), (3, 0), (3, 5))]
    return {
        **found,
        **of_runtimes(),
        "pipelines": of_pipelines(),
        CALLED_AGAIN: called,
        DROPOUT: of_dropout(),
        **of_frozen(),
    }


def frozen_model(strategy: Strategy) -> Model:
    """A small model of which little is trained: adapters, or where ranks share the work, norms."""
    shape = replace(SHAPE, layers=2, lora=LoRA(rank=1), frozen=("block0.*",))
    if strategy.tensor > 1:
        shape = replace(SHAPE, frozen=("embedding*", "*.weight"))
    return gpt(shape, micro_batch_size=1, tensor=strategy.tensor, precision=strategy.precision)


def of_dropout() -> list[Strategy]:
    """Strategies of a model that draws random numbers: run again, on parts and on copies."""
    base = Strategy(stage=2, data=2, gradient_accumulation_steps=2, optimizer=ADAM)
    cut = replace(base, tensor=2, clip_norm=1.0, checkpointing=Checkpointing.FULL)
    return [
        replace(base, checkpointing=Checkpointing.FULL, precision=Precision.FP16, loss_scale=SCALE),
        replace(cut, stage=3, partition_checkpoints=True),
        replace(base, stage=0, data=1, tensor=2),
        replace(cut, stage=0, emulate=Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)),
    ]


def model_of(strategy: Strategy, column: str = "") -> Model:
    """A small model that a strategy can train."""
    shape = SHAPE
    if column == CALLED_AGAIN:
        shape = replace(SHAPE, layers=2, hidden_groups=1)
    elif column == DROPOUT:
        shape = replace(SHAPE, dropout=0.5)
    if not isinstance(strategy.emulate, Nanotron):
        return gpt(shape, micro_batch_size=1, tensor=strategy.tensor, precision=strategy.precision)
    deep = strategy.pipeline > 1 or strategy.cuts_tokens
    made = fitting(replace(DEEP, layers=4 if deep else 1, dropout=shape.dropout), strategy)
    return in_blocks(made) if strategy.pipeline > 1 else made


def cases(column: str) -> Iterator[Case]:
    """The schedules of one column."""
    for strategy in strategies()[column]:
        frozen = column.startswith(FROZEN)
        model = frozen_model(strategy) if frozen else model_of(strategy, column)
        made = make_schedule(model, strategy)
        yield Case(column, model, made, Court(made, model, strategy))
