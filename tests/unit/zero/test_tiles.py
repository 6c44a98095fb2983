"""Memory-centric tiling: what a layer in tiles holds at once, moves and computes."""

from dataclasses import replace

import pytest
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from zsim.closed_form.offload_formulas import TransformerSize, working_state_bytes
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT, Llama, LoRA, NormPlacement, Transformer
from zsim.model.model import Model, ModelError, Segment
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Allocate, Free
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep

FAMILIES = (GPT, Llama)


def shape(kind: type[GPT | Llama] = Llama, hidden: int = 32) -> GPT | Llama:
    """Matrices that are much larger than what flows between them."""
    return kind(
        layers=2,
        hidden_size=hidden,
        attention_heads=2,
        intermediate_size=4 * hidden,
        sequence_length=2,
        vocab_size=3,
    )


def strategy(tiles: int, **zero: object) -> Strategy:
    """Stage 3 in 16 bits on two ranks, which gathers nothing ahead."""
    return Strategy(
        parallel=Parallel(data=2),
        zero=Zero.model_validate({"stage": 3, "tiles": tiles, "prefetch_units": 0, **zero}),
        train=Train(precision=Precision.BF16),
    )


def model_of(one: Strategy, of: GPT | Llama | None = None) -> Model:
    """The model that a strategy trains."""
    made = replace(of or shape(), execution=one.execution)
    return transformer(made, micro_batch_size=1, precision=one.train.precision)


def most_at_once(schedule: Schedule, *ends: str) -> int:
    """Bytes of the step's buffers whose names end so, where most are there at once."""
    (program,) = schedule.programs
    held: dict[str, int] = {}
    most = 0
    for operation in program.step:
        if isinstance(operation, Allocate) and operation.buffer.endswith(ends):
            held[operation.buffer] = program.by_name[operation.buffer].size_bytes
            most = max(most, sum(held.values()))
        elif isinstance(operation, Free):
            held.pop(operation.buffer, None)
    return most


@pytest.mark.one_commit_in(21)
@given(st.sampled_from((2, 4, 8, 16)), st.sampled_from(Checkpointing))
def test_gathered_parameters_and_their_gradient_are_those_of_one_tile(
    tiles: int, checkpointing: Checkpointing
) -> None:
    if checkpointing is Checkpointing.OPERATIONS:
        checkpointing = Checkpointing.FULL
    one = strategy(tiles).but({"activations.checkpointing": checkpointing})
    made = make_schedule(model_of(one), one)
    size = TransformerSize(layers=2, hidden=32, heads=2)
    gathered = most_at_once(made, "/gathered", "/gathered_again", "/gathered_to_recompute")
    gradients = most_at_once(made, "/gradient0")
    assert gathered + gradients == working_state_bytes(size, tiles=tiles)


def test_whole_blocks_hold_all_their_layers_at_once() -> None:
    one = strategy(1)
    made = make_schedule(model_of(one), one)
    block = sum(each.elements for each in model_of(one).units[1].parameters)
    assert most_at_once(made, "/gathered", "/gathered_again") == 2 * block


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("parallel", [False, True])
def test_tiles_have_the_parameters_products_and_activations_of_the_layer(
    kind: type[GPT | Llama], parallel: bool
) -> None:
    of = replace(shape(kind), parallel_residual=parallel)
    whole, cut = model_of(strategy(1), of), model_of(strategy(5), of)
    assert cut.parameter_count == whole.parameter_count
    assert (cut.forward_flops, cut.backward_flops) == (whole.forward_flops, whole.backward_flops)
    assert [unit.name for unit in cut.units[2:7]] == [
        f"block0.{'qkv' if kind is GPT else 'q'}.{number}" for number in range(5)
    ]
    assert max(len(unit.parameters) for unit in cut.units[1:-1]) <= 2


def wire(one: Strategy) -> dict[str, int]:
    """Bytes by collective over the data axis, as the contract has them."""
    found = make_schedule(model_of(one), one).contract.wire_bytes
    assert found is not None
    return {line.collective: line.bytes for line in found if line.group == "data"}


def test_tiles_move_what_the_layer_moves_and_run_again_once_more() -> None:
    """Rows of 32 and 128 divide by 4 tiles and 2 ranks: no padding differs."""
    assert wire(strategy(4)) == wire(strategy(1))
    again = {"activations.checkpointing": Checkpointing.FULL}
    plain, tiled = wire(strategy(1).but(again)), wire(strategy(4).but(again))
    assert tiled["reduce_scatter"] == plain["reduce_scatter"]
    blocks = sum(each.elements for each in model_of(strategy(4)).parameters if "block" in each.name)
    # Forward, to run again, backward: the paper's three loads (section 4.1); a block has two.
    assert tiled["all_gather"] - plain["all_gather"] == blocks // 2 * 2


@pytest.mark.one_commit_in(6)
@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 4),
    st.sampled_from(MemoryTier),
    st.sampled_from(MemoryTier),
    st.sampled_from(Keep),
    st.sampled_from((None, 2)),
    st.integers(1, 2),
    st.booleans(),
)
@examples(20)
def test_tiles_are_proved_with_offload_checkpointing_and_accumulation(
    kind: type[GPT | Llama],
    tiles: int,
    states: MemoryTier,
    checkpoints: MemoryTier,
    keep: Keep,
    secondary: int | None,
    micro_batches: int,
    full: bool,
) -> None:
    kept = checkpoints if full else MemoryTier.DEVICE
    one = strategy(
        tiles, keep_after_forward=keep, prefetch_units=2, secondary=secondary
    ).model_copy(
        update={
            "offload": Offload(optimizer=states, parameters=states, checkpoints=kept),
            "activations": Activations(
                checkpointing=Checkpointing.FULL if full else Checkpointing.NONE
            ),
            "train": Train(
                precision=Precision.FP16,
                gradient_accumulation_steps=micro_batches,
                clip_norm=1.0,
            ),
        }
    )
    model = model_of(one, shape(kind, hidden=4))
    assert not check(make_schedule(model, one), model)


def test_a_block_that_is_run_again_is_checkpointed_once() -> None:
    """Of each of two blocks only the input goes out, which its first norm and its sum read."""
    one = strategy(2).but(
        {"activations.checkpointing": Checkpointing.FULL, "offload.checkpoints": MemoryTier.HOST}
    )
    model = model_of(one)
    moved = make_schedule(model, one).contract.host_bytes
    assert moved is not None
    assert moved[0].to_host == 2 * model.values["block0/output"].size_bytes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"zero.stage": 2}, "zero.tiles: 4 is for stage 3, not 2"),
        ({"parallel.context": 2}, "zero.tiles: 4 is not modelled for context = 2"),
        (
            {"activations.checkpointing": "operations"},
            "zero.tiles: 4 is not modelled for checkpointing = operations",
        ),
    ],
)
def test_what_cannot_be_tiled_is_told(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        strategy(4).but(changes)


@pytest.mark.parametrize(
    ("changes", "tiles", "told"),
    [
        ({"lora": LoRA(rank=1)}, 2, "model.lora: not modelled with zero.tiles, allowed is 1"),
        ({"hidden_groups": 1}, 2, "model.hidden_groups: not modelled with zero.tiles"),
        ({"norm_placement": NormPlacement.AFTER}, 2, "model.norm_placement: not modelled with"),
        ({}, 33, "zero.tiles: 33 must be at most the 32 rows of block0.q"),
    ],
)
def test_models_that_cannot_be_tiled_are_told(
    changes: dict[str, object], tiles: int, told: str
) -> None:
    of: Transformer = shape()
    with pytest.raises(ModelError, match=told):
        model_of(strategy(tiles), replace(of, **changes))  # type: ignore[arg-type]


def test_a_model_that_was_not_cut_is_told() -> None:
    told = "zero.tiles: 2 is for models that zsim builds of their shape; .* are not cut"
    with pytest.raises(ModelError, match=told):
        make_schedule(model_of(strategy(1)), strategy(2))


TENSOR = 2


def on_tensor_ranks(
    kind: type[GPT | Llama], tiles: int, checkpointing: Checkpointing
) -> tuple[Model, Schedule]:
    """Return a model on two data and two tensor ranks, and its schedule of two micro-batches."""
    one = Strategy(
        parallel=Parallel(data=2, tensor=TENSOR),
        zero=Zero(stage=3, tiles=tiles),
        activations=Activations(checkpointing=checkpointing),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2),
    )
    made = replace(shape(kind), vocab_size=4, execution=one.execution)
    model = transformer(made, micro_batch_size=1, precision=one.train.precision, tensor=TENSOR)
    return model, make_schedule(model, one)


@pytest.mark.one_commit_in(6)
@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 5),
    st.sampled_from((Checkpointing.NONE, Checkpointing.FULL)),
)
@examples(6)
def test_tiles_of_tensor_ranks_are_proved(
    kind: type[GPT | Llama], tiles: int, checkpointing: Checkpointing
) -> None:
    model, schedule = on_tensor_ranks(kind, tiles, checkpointing)
    assert not check(schedule, model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tile_of_tensor_ranks_sums_the_input_gradient_or_the_output(
    kind: type[GPT | Llama],
) -> None:
    """Each tile of a column-parallel layer sums all columns of its input; outputs are in parts."""
    whole, _ = on_tensor_ranks(kind, 1, Checkpointing.NONE)
    cut, schedule = on_tensor_ranks(kind, 4, Checkpointing.NONE)
    assert cut.parameter_count == whole.parameter_count
    assert (cut.forward_flops, cut.backward_flops) == (whole.forward_flops, whole.backward_flops)
    of_block = [unit for unit in cut.units if unit.block == "block0"]
    sums_output = [unit.name for unit in of_block if unit.segments[0].ends is not None]
    sums_gradient = [unit.name for unit in of_block if unit.segments[0].begins is not None]
    assert sums_output == [
        f"block0.{part}.{tile}" for part in ("proj", "down") for tile in range(4)
    ]
    layers = ("qkv", "up") if kind is GPT else ("q", "k", "v", "gate", "up")
    assert sums_gradient == [f"block0.{part}.{tile}" for part in layers for tile in range(4)]
    sent = {
        line.collective: line.bytes
        for line in schedule.contract.wire_bytes or ()
        if line.group == "tensor"
    }
    hidden = 2 * 32 * 2  # tokens, width, bytes of bf16
    ring = 2 * (TENSOR - 1) / TENSOR
    of_blocks = 2 * hidden * (2 + 4 * len(layers))  # micro-batches; two outputs, tiles' gradients
    assert sent["all_reduce"] >= 2 * of_blocks * ring


@pytest.mark.parametrize("lost", ["begins", "ends"])
def test_a_tile_that_sums_nothing_is_found(lost: str) -> None:
    """The specification is made of the whole model, the schedule of one with a lost sum."""
    model, _ = on_tensor_ranks(GPT, 2, Checkpointing.NONE)
    part = "up" if lost == "begins" else "down"

    def losing(segment: Segment) -> Segment:
        if lost == "begins":
            return replace(segment, reduces_input_gradient=False)
        return replace(segment, reduces_output=False)

    units = tuple(
        replace(unit, segments=tuple(map(losing, unit.segments)))
        if unit.name == f"block0.{part}.0"
        else unit
        for unit in model.units
    )
    one = Strategy(
        parallel=Parallel(data=2, tensor=TENSOR),
        zero=Zero(stage=3, tiles=2),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2),
    )
    wrong = make_schedule(replace(model, units=units), one)
    assert check(wrong, model)


def test_tiles_refuse_tokens_that_tensor_ranks_share() -> None:
    one = strategy(2)
    made = replace(shape(), vocab_size=4, execution=one.execution)
    with pytest.raises(ModelError, match=r"zero\.tiles: 2 is not modelled with sequence_parallel"):
        transformer(made, micro_batch_size=1, precision=Precision.BF16, tensor=2, sequence=True)
