"""Right schedules to plant faults in: zsim's own stages, every runtime, pipelines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from emulated_strategies import CHECKPOINTED, EMULATED
from emulated_strategies import strategy as emulating
from fitting import fitting

from faults.ground_truth import GroundTruth, Truth
from faults.pipelines import (
    of_fsdp2_pipelines,
    of_megatron_pipelines,
    of_pipelines,
    of_unlike_stages,
)
from faults.variants import (
    ADAM,
    BF16,
    CLIPPED,
    FP16,
    GIVEN,
    GROUPED,
    MOMENTUM,
    RECOMPUTED,
    SCALE,
    SCALED,
    accumulating,
    by,
    over,
    zero,
)
from zsim.model.architecture import GPT, Llama, LoRA
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron, TensorMode

SHAPE = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)
CALLED_AGAIN = "blocks called again"
"""The column of models with one block that is called twice."""
TIED = "megatron pipelines"
"""The column of models whose first and last stage have one embedding."""
UNLIKE = "megatron unlike stages"
"""The column of stages with unlike numbers of layers."""
FLOAT8 = "fsdp2 float8"
"""The column of models whose weights are gathered in 8-bit floats."""
IN_PARTS = "fsdp2 in parts"
"""The column of models whose products are fused with collectives of their tokens."""
BESIDE = "megatron in parts"
"""The column of models whose products run beside collectives of their tokens."""
DROPOUT = "dropout"
"""The column of models that draw random numbers."""
MOVED = "checkpoints on the host"
"""The column of models with so many blocks that a stream of copies keeps some and moves others."""
DEEP = Llama(layers=4, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=3)
FROZEN = "frozen, "
"""Prefixes of names of columns whose models have frozen parameters."""


@dataclass(frozen=True)
class Case:
    """A right schedule to plant faults in: a job of the judge."""

    label: str
    model: Model
    strategy: Strategy

    @cached_property
    def _made(self) -> Schedule:
        return make_schedule(self.model, self.strategy)

    @property
    def subject(self) -> Schedule:
        """The right schedule."""
        return self._made

    @cached_property
    def ground_truth(self) -> GroundTruth:
        """The court that runs its changes."""
        return GroundTruth(self.subject, self.model, self.strategy)

    @property
    def instead(self) -> frozenset[str]:
        """Families that may find a fault of values first: values need an order of operations."""
        return frozenset({"lifetime", "races", "matching", "progress", "host_order", "volume"})

    def findings(self, made: Schedule) -> dict[str, list[str]]:
        """Return findings of the proof by family."""
        found: dict[str, list[str]] = {}
        for each in check(made, self.model):
            text = "\n".join((each.operation, each.why, *each.witness))
            found.setdefault(each.invariant, []).append(text)
        return found

    def truth(self, made: Schedule, rng: np.random.Generator) -> Truth:
        """Return the truth about a change."""
        return self.ground_truth.judge(made, rng)


def of_stage(stage: int) -> list[Strategy]:
    """Return a ZeRO stage of zsim's own with several knobs."""
    base = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage),
        train=Train(gradient_accumulation_steps=2, optimizer=ADAM, loss_scale=SCALE),
    )
    full = base.but(RECOMPUTED | zero(bucket_elements=40))
    once = zero(
        reduce_once=True,
        bucket_elements=70,
        prefetch_units=0,
        keep_after_forward=Keep.EVERYTHING,
        host_ahead_units=2,
    )
    parts = {"activations.partition": True} | zero(reductions_in_flight=2)
    on_host = {"offload.checkpoints": "host"} | zero(contiguous=stage > 1)
    few = zero(bucket_elements=25, gathered_elements=0)
    return [
        base.but(FP16 | CLIPPED | GROUPED | zero(bucket_elements=40)),
        base.but(over(tensor=2) | FP16 | CLIPPED | by(MOMENTUM) | few),
        full.but(over(tensor=2) | CLIPPED | by(SGD()) | parts),
        base.but(over(data=3) | BF16 | once),
        base.but(over(replicate=2) | CLIPPED | zero(bucket_elements=30, reductions_in_flight=0)),
        full.but(BF16 | on_host),
    ]


def of_runtimes() -> dict[str, list[Strategy]]:
    """Return every runtime that is emulated, with every option."""
    found: dict[str, list[Strategy]] = {}
    for name, named in EMULATED.items():
        made = [
            emulating(named, data=2, precision=Precision.FP16, clip_norm=1.0, optimizer=ADAM),
            emulating(named, data=2, replicate=2, optimizer=GIVEN),
            emulating(named, data=4, precision=Precision.BF16, clip_norm=1.0, optimizer=GIVEN),
        ]
        kept = [each.but(SCALED | accumulating(2)) for each in made if each is not None]
        found[name] = [kept[0].but(GROUPED), *kept[1:2]]
    return found


def of_checkpoints() -> list[Strategy]:
    """Return runtimes that keep checkpoints on the host: copied whole, in parts, on a stream."""
    found: list[Strategy] = []
    for number, named in enumerate(CHECKPOINTED.values()):
        made = emulating(
            named,
            data=2,
            micro_batches=2,
            precision=(Precision.FP16, Precision.BF16)[number % 2],
            clip_norm=1.0,
            optimizer=ADAM,
            checkpointing=Checkpointing.FULL,
        )
        assert made is not None
        found.append(made.but(SCALED))
        if named[0] == 1:
            cut = over(data=1, tensor=2) | {"activations.partition": True}
            found.append(found[-1].but(cut))
    return found


def of_float8() -> list[Strategy]:
    """Return strategies whose weights are cast before they are gathered."""
    train = Train(gradient_accumulation_steps=2, optimizer=ADAM, loss_scale=SCALE)
    base = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, emulate=FSDP2(enable_fsdp_float8_all_gather=True)),
        train=train.but(precision=Precision.BF16, float8=Float8.TENSORWISE),
    )
    return [
        base,
        base.but({"parallel.replicate": 2, "train.precision": Precision.FP16}),
        base.but({"parallel.tensor": 2, "train.clip_norm": 1.0}),
        base.but({"parallel.pipeline": 2}),
    ]


def of_fused_tokens() -> list[Strategy]:
    """Return strategies of FSDP2 whose tensor ranks copy tokens in parts: once, and run again."""
    base = Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=3, emulate=FSDP2(enable_async_tensor_parallel=True)),
        train=Train(gradient_accumulation_steps=2, optimizer=ADAM, compile=True),
    )
    again = {"activations.checkpointing": Checkpointing.OPERATIONS, "parallel.data": 1}
    return [base, base.but(again)]


def of_overlapped_tokens() -> list[Strategy]:
    """Return strategies of Megatron-LM whose products overlap with collectives of tokens.

    In userbuffers or by NCCL, of tokens that are cut or not.
    """
    overlapped = Megatron(sequence_parallel=True, tp_comm_overlap=True)
    base = Strategy(
        parallel=Parallel(data=2, tensor=2),
        zero=Zero(stage=1, emulate=overlapped.but(gradient_accumulation_fusion=True)),
        train=Train(gradient_accumulation_steps=2, optimizer=ADAM),
    )
    alone = Megatron(sequence_parallel=True, async_tensor_model_parallel_allreduce=True)
    others = (overlapped, alone, alone.but(sequence_parallel=False))
    few: dict[str, object] = {"parallel.data": 1, "zero.stage": 0}
    return [base, *(base.but(few | {"zero.emulate": each}) for each in others)]


def of_frozen() -> dict[str, list[Strategy]]:
    """Return strategies of models with frozen parameters."""
    stages = {f"{FROZEN}stage {stage}": of_stage(stage) for stage in range(4)}
    names = ("fsdp2", "deepspeed 1", "deepspeed 2", "deepspeed 3")
    runtimes = {f"{FROZEN}{name}": found for name, found in of_runtimes().items() if name in names}
    return {**stages, **runtimes}


def strategies() -> dict[str, list[Strategy]]:
    """Return strategies by column of the table."""
    found = {f"stage {stage}": of_stage(stage) for stage in range(4)}
    called = [of_stage(stage)[place] for stage, place in ((0, 0), (1, 2), (2, 3), (3, 0), (3, 5))]
    return {
        **found,
        **of_runtimes(),
        "pipelines": of_pipelines(),
        TIED: of_megatron_pipelines(),
        UNLIKE: of_unlike_stages(),
        "fsdp2 pipelines": of_fsdp2_pipelines(),
        MOVED: of_checkpoints(),
        FLOAT8: of_float8(),
        IN_PARTS: of_fused_tokens(),
        BESIDE: of_overlapped_tokens(),
        CALLED_AGAIN: called,
        DROPOUT: of_dropout(),
        **of_frozen(),
    }


def frozen_model(strategy: Strategy) -> Model:
    """Return a small model of which adapters alone are trained, or norms on tensor ranks."""
    shape = replace(SHAPE, layers=2, lora=LoRA(rank=1), frozen=("block0.*",))
    if strategy.parallel.tensor > 1:
        shape = replace(SHAPE, frozen=("embedding*", "*.weight"))
    return gpt(
        shape,
        micro_batch_size=1,
        tensor=strategy.parallel.tensor,
        precision=strategy.train.precision,
    )


def of_dropout() -> list[Strategy]:
    """Return strategies of a model that draws random numbers: run again, on parts, on copies."""
    base = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=2),
        train=Train(gradient_accumulation_steps=2, optimizer=ADAM),
    )
    cut = base.but(over(tensor=2) | CLIPPED | RECOMPUTED)
    parts = zero(emulate=Nanotron(tp_mode=TensorMode.REDUCE_SCATTER))
    return [
        base.but(RECOMPUTED | FP16 | SCALED),
        cut.but(zero(stage=3) | {"activations.partition": True}),
        base.but(zero(stage=0) | over(data=1, tensor=2)),
        cut.but(zero(stage=0) | parts),
    ]


def model_of(strategy: Strategy, column: str = "") -> Model:
    """Return a small model that a strategy can train."""
    shape = SHAPE
    if column == FLOAT8:
        layers = strategy.parallel.pipeline
        return in_blocks(
            fitting(replace(DEEP, layers=layers, execution=strategy.execution), strategy)
        )
    if column in {IN_PARTS, BESIDE}:
        cut = replace(DEEP, layers=1, execution=strategy.execution)
        return fitting(cut, strategy, sequences=2)
    if column == CALLED_AGAIN:
        shape = replace(SHAPE, layers=2, hidden_groups=1)
    elif column == DROPOUT:
        shape = replace(SHAPE, dropout=0.5)
    elif column == MOVED:
        shape = replace(SHAPE, layers=3)
    if not isinstance(strategy.zero.emulate, Nanotron) and strategy.parallel.pipeline == 1:
        return gpt(
            shape,
            micro_batch_size=1,
            tensor=strategy.parallel.tensor,
            precision=strategy.train.precision,
        )
    deep = strategy.parallel.pipeline > 1 or strategy.cuts_tokens
    made = fitting(
        replace(
            DEEP,
            layers=4 if deep else 1,
            dropout=shape.dropout,
            tied_embeddings=column in {TIED, UNLIKE},
        ),
        strategy,
    )
    return in_blocks(made) if strategy.parallel.pipeline > 1 else made


def cases(column: str) -> Iterator[Case]:
    """Yield the schedules of one column."""
    for strategy in strategies()[column]:
        frozen = column.startswith(FROZEN)
        model = frozen_model(strategy) if frozen else model_of(strategy, column)
        yield Case(column, model, strategy)
