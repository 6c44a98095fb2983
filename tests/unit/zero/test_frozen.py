"""Frozen parameters: who takes them, what is held of them, and how much adapters save."""

from dataclasses import replace

import pytest

from zsim.analysis.schedule_plan import plan
from zsim.model.architecture import GPT, LoRA
from zsim.model.architecture_error import ArchitectureError
from zsim.model.model import BATCH, Model, ModelError, Parameter, Segment, Unit, Value
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

RANKS = 4
SHAPE = GPT(layers=3, hidden_size=16, attention_heads=4, sequence_length=8, vocab_size=32)
ADAPTED = replace(SHAPE, joined_qkv=False, lora=LoRA(rank=4))
EVERY: dict[str, tuple[int, RuntimeOptions | None]] = {
    **{f"stage {stage}": (stage, None) for stage in range(4)},
    **{f"deepspeed {stage}": (stage, DeepSpeed(reduce_bucket_size=500)) for stage in (1, 2, 3)},
    "fsdp2": (3, FSDP2()),
}


def model_of(shape: GPT, precision: Precision = Precision.BF16) -> Model:
    return transformer(shape, micro_batch_size=1, precision=precision)


def made(
    stage: int, emulate: RuntimeOptions | None, precision: Precision = Precision.BF16
) -> Schedule:
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=stage, emulate=emulate),
        train=Train(precision=precision),
    )
    return make_schedule(model_of(ADAPTED, precision), strategy)


def persistent(schedule: Schedule, kind: Kind) -> int:
    (program,) = schedule.programs
    kept = [program.by_name[name] for name in program.persistent]
    return sum(each.size_bytes for each in kept if each.kind is kind)


@pytest.mark.parametrize("name", EVERY)
def test_states_of_the_optimizer_are_of_trained_parameters_alone(name: str) -> None:
    """Two matrices for queries and two for values: 2 x 2 x 4 x 16 elements in each of 3 layers."""
    stage, emulate = EVERY[name]
    trained = 3 * 2 * 2 * 4 * 16
    assert model_of(ADAPTED).trained_count == trained
    own = trained if stage == 0 else trained // RANKS
    found = made(stage, emulate)
    assert persistent(found, Kind.MOMENT) == 2 * 4 * own
    has_master = not isinstance(emulate, FSDP2)  # there parameters are in fp32 themselves
    assert persistent(found, Kind.MASTER) == (4 * own if has_master else 0)


@pytest.mark.parametrize("name", EVERY)
def test_frozen_parameters_are_held_in_16_bits_whole_or_cut(name: str) -> None:
    stage, emulate = EVERY[name]
    model = model_of(ADAPTED)
    frozen = model.parameter_count - model.trained_count
    trained = model.trained_count * (4 if isinstance(emulate, FSDP2) else 2)
    parts = RANKS if stage == 3 else 1
    assert frozen % (2 * RANKS) == 0
    assert persistent(made(stage, emulate), Kind.PARAMETER) == (2 * frozen + trained) // parts


@pytest.mark.parametrize("emulate", [FSDP1(), Megatron(), Nanotron()])
def test_a_runtime_that_trains_all_refuses_frozen_parameters_by_name(
    emulate: RuntimeOptions,
) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3 if isinstance(emulate, FSDP1) else 1, emulate=emulate),
    )
    why = (
        r"^model\.frozen: block0\.down\.bias: frozen parameters are not modelled for "
        rf"{type(emulate).__name__}; use zero\.emulate = ddp or deepspeed or fsdp2"
    )
    with pytest.raises(ModelError, match=why):
        make_schedule(model_of(ADAPTED, Precision.FP32), strategy)


def test_plan_tells_trained_parameters_apart() -> None:
    model = model_of(ADAPTED)
    found = plan(made(3, None), model)
    assert found.parameters == model.parameter_count
    assert found.trained_parameters == 768


@pytest.mark.one_commit_in(6)
def test_adapters_of_gpt3_are_as_many_as_the_paper_says_and_states_take_2_bytes_each() -> None:
    """Hu et al. 2021, section 4.2: 350 GB, where full training takes 16 bytes for each."""
    gpt3 = GPT(
        layers=96,
        hidden_size=12288,
        attention_heads=96,
        sequence_length=2048,
        vocab_size=50257,
        joined_qkv=False,
        lora=LoRA(rank=4, targets=("q", "v")),
    )
    model = transformer(gpt3, micro_batch_size=1, precision=Precision.FP16)
    assert model.trained_count == 96 * 2 * 2 * 4 * 12288 == 18_874_368
    strategy = Strategy(
        parallel=Parallel(data=96), zero=Zero(stage=3), train=Train(precision=Precision.FP16)
    )
    found = plan(make_schedule(model, strategy), model).model_state_bytes * strategy.parallel.data
    assert found == pytest.approx(2 * 175.2e9, rel=0.01)


def test_backward_with_adapters_computes_no_gradients_of_frozen_matrices() -> None:
    """Of 2 products for each weight one is left; the first block's norm is not passed."""
    plain = replace(SHAPE, joined_qkv=False)
    whole, part = model_of(plain), model_of(replace(plain, lora=LoRA(rank=1)))
    assert whole.backward_flops == 2 * whole.forward_flops
    assert part.backward_flops < 1.25 * part.forward_flops


def test_a_model_that_saves_for_a_backward_that_it_has_not_is_refused() -> None:
    output = Value(name="output", elements=1, dtype=model_of(SHAPE).loss.dtype)
    frozen = Parameter(name="weight", shape=(2,), frozen=True)
    quiet = replace(output, requires_gradient=False)
    segment = Segment(inputs=(BATCH,), outputs=(quiet,), parameters=("weight",), saved_bytes=8)
    unit = Unit(name="unit", parameters=(frozen,), segments=(segment,))
    with pytest.raises(ModelError, match=r"^unit unit: saves 8 bytes for a backward that it does"):
        Model(name="frozen", units=(unit,), batch=model_of(SHAPE).batch)


def test_a_block_that_is_called_again_has_the_adapters_of_its_first_call() -> None:
    """Before the first call nothing has a gradient, before the second its input has."""
    model = model_of(replace(ADAPTED, hidden_groups=1))
    first, again = model.units[1:3]
    assert again.module == first.name
    assert again.parameters == first.parameters
    assert len(again.segments[0].backward) > len(first.segments[0].backward)
    strategy = Strategy(
        parallel=Parallel(data=2), zero=Zero(stage=3), train=Train(precision=Precision.BF16)
    )
    assert check(make_schedule(model, strategy), model) == ()


WRONG = {
    "rank": (LoRA(rank=0), r"^model\.lora\.rank: 0 must be at least 1$"),
    "target": (
        LoRA(rank=1, targets=("gate",)),
        r"^model\.lora\.targets: 'gate' must be one of q, k, v, qkv, proj, up, down, head$",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_adapters_that_cannot_be_are_refused_by_their_field(name: str) -> None:
    lora, why = WRONG[name]
    with pytest.raises(ArchitectureError, match=why):
        replace(SHAPE, lora=lora)


def test_patterns_that_freeze_nothing_or_all_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^model\.frozen: 'blok\*' is the name of no parameter"):
        model_of(replace(SHAPE, frozen=("block0.*", "blok*")))
    with pytest.raises(ModelError, match=r"^model\.frozen: '\*' leave nothing to train$"):
        model_of(replace(SHAPE, frozen=("*",)))
    with pytest.raises(
        ModelError, match=r"^model\.lora: not modelled with tensor 2, allowed is 1$"
    ):
        transformer(ADAPTED, micro_batch_size=1, tensor=2)
