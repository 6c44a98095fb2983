"""Norms of each head of queries and keys, on tensor ranks that have different heads."""

from dataclasses import replace
from itertools import cycle

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from token_ranks import LLAMA

from zsim.model.architecture import Architecture, Norm, QKNorm
from zsim.model.model import ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce, Operation, Together
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron

NORMED = replace(LLAMA, joined_qkv=False, qk_norm=QKNorm.HEAD)
OF_LAYER = replace(NORMED, norm=Norm.LAYER)
BASE = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=3),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)


def emulating(runtime: RuntimeOptions) -> Strategy:
    """Return the strategy with the order of a runtime."""
    return BASE.but({"zero": Zero(stage=runtime.stages[-1], emulate=runtime)})


WHOLE = {
    "stage 0": BASE.but({"zero.stage": 0}),
    "stage 2": BASE.but({"zero.stage": 2}),
    "stage 3": BASE,
    "FSDP2": emulating(FSDP2(enable_sequence_parallel=False)),
    "Megatron-LM": emulating(Megatron()),
    "nanotron": emulating(Nanotron()),
}
"""Strategies whose tensor ranks hold whole hidden states."""
CUT = {
    "stage 3, tokens cut": BASE.but({"zero.sequence_parallel": True}),
    "FSDP2, tokens cut": emulating(FSDP2()),
    "Megatron-LM, tokens cut": emulating(Megatron(sequence_parallel=True)),
}


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("name", "shape"), list(zip([*WHOLE, *CUT], cycle([NORMED, OF_LAYER]), strict=False))
)
def test_norms_of_heads_train_on_tensor_ranks_what_one_process_does(
    name: str, shape: Architecture
) -> None:
    strategy = (WHOLE | CUT)[name]
    model = fitting(shape, strategy)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)
    assert check(made) == ()  # also where the model is read from the schedule


def _sums(operation: Operation) -> bool:
    """Tell whether an operation sums gradients of parameters over the tensor axis."""
    members = operation.members if isinstance(operation, Together) else (operation,)
    reduced = [each for each in members if isinstance(each, AllReduce) and each.group == "tensor"]
    return any("gradient" in each.source.buffer for each in reduced) and "sum" in operation.id


@pytest.mark.parametrize("name", ["stage 2", "FSDP2", "Megatron-LM"])
def test_the_proof_finds_a_gradient_of_a_norm_of_heads_that_is_not_summed(name: str) -> None:
    strategy = WHOLE[name].but({"parallel.data": 1})
    model = fitting(NORMED, strategy)
    made = make_schedule(model, strategy)
    (program,) = made.programs
    sums = [each.id for each in program.step if _sums(each)]
    for left_out in (sums[0], sums[-1]):
        step = tuple(each for each in program.step if each.id != left_out)
        broken = replace(made, programs=(replace(program, step=step),))
        for known in (model, None):
            found = check(broken, known)
            assert any(each.invariant == "values" for each in found), left_out


@pytest.mark.parametrize("tokens_cut", [False, True])
def test_other_norms_are_summed_over_tensor_ranks_only_if_tokens_are_cut(tokens_cut: bool) -> None:
    model = transformer(
        NORMED, micro_batch_size=1, tensor=2, sequence=tokens_cut, precision=Precision.BF16
    )
    of_heads = {f"block{layer}.ln_{part}.weight" for layer in range(2) for part in "qk"}
    others = {f"block{layer}.{part}.weight" for layer in range(2) for part in ("ln1", "ln2")}
    assert model.summed_copies == of_heads | (others | {"head.ln.weight"} if tokens_cut else set())
    one = transformer(NORMED, micro_batch_size=1)
    assert model.parameter_count == one.parameter_count  # copies count once


@pytest.mark.parametrize("runtime", [FSDP1(), DeepSpeed()])
def test_a_runtime_that_does_not_sum_these_gradients_is_refused(runtime: RuntimeOptions) -> None:
    strategy = emulating(runtime)
    with pytest.raises(ModelError) as raised:
        make_schedule(fitting(NORMED, strategy), strategy)
    name = type(runtime).__name__
    assert str(raised.value) == (
        f"model.qk_norm: {name} does not sum gradients of block0.ln_k.weight over 2 tensor "
        "ranks; use parallel.tensor = 1, zero.emulate = fsdp2 or megatron or nanotron, or zsim's "
        "own stages"
    )
    alone = strategy.but({"parallel.tensor": 1})
    assert make_schedule(fitting(NORMED, alone), alone).mesh.size == 2


def test_norms_over_all_heads_are_refused_on_tensor_ranks() -> None:
    with pytest.raises(ModelError) as raised:
        transformer(replace(NORMED, qk_norm=QKNorm.WIDTH), micro_batch_size=1, tensor=2)
    assert str(raised.value) == (
        "model.qk_norm: width is not modelled with tensor 2, whose ranks hold a part of each row; "
        "say head, or parallel.tensor 1"
    )
