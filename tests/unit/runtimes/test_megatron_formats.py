"""Number formats in Megatron-LM: cast weights, their gathers, tokens, and optimizer states."""

import pytest
from exact_training import proves_and_trains
from faults.schedules import everywhere
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.model import Model, Parameter
from zsim.model.narrow_products import NarrowProducts
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, Compute, Copy, Operation, Role, Together
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.execution import RECIPES, Float4, Float8, Quantizer, Recipe
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

LLAMA = Llama(layers=2, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=6)
PLAIN = Strategy(
    parallel=Parallel(data=2),
    zero=Zero(stage=1, emulate=Megatron()),
    train=Train(gradient_accumulation_steps=3, precision=Precision.BF16, clip_norm=1.0),
)
EVERY = RECIPES[Quantizer.TRANSFORMER_ENGINE]
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100}
SEQUENCE = {"sequence_parallel": True, "async_tensor_model_parallel_allreduce": True}
STAGES = {"parallel.pipeline": 2, "train.gradient_accumulation_steps": 4}


def with_recipe(recipe: Recipe, **options: object) -> Strategy:
    key = "float8" if isinstance(recipe, Float8) else "float4"
    changes = {f"train.{key}": recipe, "zero.emulate": Megatron.model_validate(options)}
    tensor = {"parallel.tensor": 2} if "sequence_parallel" in options else {}
    return PLAIN.but({**changes, **tensor})


def model_of(strategy: Strategy, *, any_layout: bool = False) -> Model:
    execution = replace(strategy.execution, any_layout=any_layout)
    return fitting(replace(LLAMA, execution=execution), strategy)


def made_of(strategy: Strategy, *, any_layout: bool = False) -> Schedule:
    return make_schedule(model_of(strategy, any_layout=any_layout), strategy)


def persistent(made: Schedule) -> dict[Kind, int]:
    (program,) = made.programs
    found: dict[Kind, int] = {}
    for name in program.persistent:
        buffer = program.by_name[name]
        found[buffer.kind] = found.get(buffer.kind, 0) + buffer.elements * buffer.dtype.size_bytes
    return found


def weights(model: Model) -> list[Parameter]:
    return [each for each in model.parameters if len(each.shape) == 2 and "block" in each.name]


@pytest.mark.matrix(10)
@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        (OVERLAPS, {}),
        (SEQUENCE, {"parallel.tensor": 2}),
        ({"sequence_parallel": True, "tp_comm_overlap": True}, {"parallel.tensor": 2}),
        ({}, STAGES),
        ({**OVERLAPS, "num_virtual_stages_per_pipeline_rank": 2}, STAGES),
        ({"gradient_accumulation_fusion": True}, {"zero.stage": 0, "parallel.data": 4}),
    ],
)
def test_a_recipe_trains_what_plain_data_parallelism_does(
    options: dict[str, object], changes: dict[str, object], recipe: Recipe
) -> None:
    strategy = with_recipe(recipe, **options).but(changes)
    if strategy.parallel.pipeline > 1 and "num_virtual_stages_per_pipeline_rank" in options:
        shape = replace(LLAMA, layers=4, execution=strategy.execution)
        model = fitting(shape, strategy)
    else:
        model = model_of(strategy)
    proves_and_trains(make_schedule(model, strategy), model, strategy)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("recipe", [each for each in EVERY if isinstance(each, Float8)])
@pytest.mark.parametrize("options", [{}, OVERLAPS])
@pytest.mark.parametrize("changes", [{}, STAGES, {"parallel.tensor": 2}])
def test_weights_that_are_kept_in_8_bits_train_the_same(
    changes: dict[str, object], options: dict[str, object], recipe: Recipe
) -> None:
    strategy = with_recipe(recipe, fp8_param_gather=True, **options).but(changes)
    model = model_of(strategy)
    proves_and_trains(make_schedule(model, strategy), model, strategy)


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("any_layout", [False, True])
def test_cast_weights_take_the_bytes_of_their_copies_and_scales(
    recipe: Recipe, any_layout: bool
) -> None:
    strategy = with_recipe(recipe)
    narrow = NarrowProducts(
        recipe=recipe, quantizer=Quantizer.TRANSFORMER_ENGINE, any_layout=any_layout
    )
    stored = sum(
        narrow.stored_bytes(*each.shape, copies=narrow.copies, weight=True)
        for each in weights(model_of(strategy))
    )
    states = persistent(made_of(strategy, any_layout=any_layout))
    assert states.pop(Kind.WORKSPACE) == stored
    assert states == persistent(made_of(PLAIN))


def reads_parameters(each: Operation) -> set[str]:
    assert isinstance(each, Compute)
    return {one.view.buffer for one in each.operands if one.role is Role.PARAMETER}


def test_weights_are_cast_once_a_step_and_read_by_every_micro_batch() -> None:
    (program,) = made_of(with_recipe(Float8.DELAYED)).programs
    casts = [
        each
        for each in program.step
        if isinstance(each, Copy) and program.by_name[each.target.buffer].dtype is DType.FP8
    ]
    assert len(casts) == 1
    assert casts[0].launches == 2 * 7
    blocks = [
        each
        for each in program.step
        if isinstance(each, Compute) and (each.unit or "").startswith("block")
    ]
    assert len({each.micro_batch for each in blocks}) == 3
    assert {casts[0].target.buffer in reads_parameters(each) for each in blocks} == {True}


def is_cast(each: Operation) -> bool:
    return isinstance(each, Copy) and "narrow/" in each.id


def later(program: Program) -> Program:
    """Cast the weights only after the first unit that reads them."""
    cast = next(each for each in program.step if is_cast(each))
    rest = [each for each in program.step if each is not cast]
    place = next(
        number
        for number, each in enumerate(rest)
        if isinstance(each, Compute) and each.unit == "block0"
    )
    return replace(program, step=(*rest[: place + 1], cast, *rest[place + 1 :]))


def test_a_cast_after_the_first_read_is_found() -> None:
    strategy = with_recipe(Float8.DELAYED)
    model = model_of(strategy)
    assert not check(make_schedule(model, strategy), model)
    assert check(everywhere(make_schedule(model, strategy), later), model)


def gathered_bytes(strategy: Strategy) -> int:
    wire = made_of(strategy).contract.wire_bytes
    assert wire is not None
    return sum(
        each.bytes for each in wire if (each.group, each.collective) == ("data", "all_gather")
    )


def padded(elements: int) -> int:
    return -(-elements // 128) * 128


def bucket(parameters: list[Parameter]) -> int:
    """Elements of a bucket: each parameter starts at a multiple of 64."""
    end = 0
    for each in reversed(parameters):
        end = -(-end // 64) * 64 + each.elements
    return padded(end)


@pytest.mark.parametrize(
    ("recipe", "width"), [(Float8.TENSORWISE, 1), (Float8.BLOCKWISE, 1), (Float8.MXFP8, 2)]
)
def test_weights_are_gathered_in_8_bits_but_for_mxfp8(recipe: Recipe, width: int) -> None:
    strategy = with_recipe(recipe, fp8_param_gather=True)
    model = model_of(strategy)
    narrow = weights(model)
    wide = [each for each in model.parameters if each not in narrow]
    assert gathered_bytes(strategy) == (width * bucket(narrow) + 2 * bucket(wide)) // 2


def test_weights_in_8_bits_have_no_copy_in_16() -> None:
    """As `fp8_param_gather` promises: one byte in buckets, another for the other axis."""
    model = model_of(PLAIN)
    narrow = weights(model)
    rest = 2 * bucket([each for each in model.parameters if each not in narrow])
    kept = persistent(made_of(with_recipe(Float8.TENSORWISE, fp8_param_gather=True)))
    assert kept[Kind.PARAMETER] == bucket(narrow) + rest
    assert kept[Kind.WORKSPACE] == bucket(narrow)
    cut = persistent(made_of(with_recipe(Float8.MXFP8, fp8_param_gather=True)))
    assert cut[Kind.PARAMETER] == 2 * bucket(narrow) // 2 + rest  # shards of two ranks


STATES = [
    ({}, (2, 4, 4)),
    ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, (2, 2, 2)),
    ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, (2, 1, 2)),
    ({"main_grads_dtype": "bf16"}, (2, 4, 4)),
]


@pytest.mark.parametrize(("options", "widths"), STATES)
def test_states_of_the_precision_aware_optimizer_have_their_own_bytes(
    options: dict[str, object], widths: tuple[int, int, int]
) -> None:
    aware = Megatron.model_validate({"use_precision_aware_optimizer": True, **options})
    strategy = PLAIN.but({"zero.emulate": aware})
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)
    shard = bucket(list(model.parameters)) // 2
    kept, plain = persistent(made), persistent(made_of(PLAIN))
    assert (kept[Kind.MASTER], kept[Kind.MOMENT]) == (widths[0] * shard, sum(widths[1:]) * shard)
    assert kept[Kind.PARAMETER] == plain[Kind.PARAMETER]
    assert peak_bytes_of(made) < peak_bytes_of(made_of(PLAIN))


def peak_bytes_of(made: Schedule) -> int:
    return max(each for _, _, each in made.contract.peak_bytes)


@pytest.mark.parametrize(
    ("recipe", "master"), [(None, 2), (Float8.DELAYED, 2), (Float8.TENSORWISE, 4)]
)
def test_only_the_lower_half_of_masters_is_kept_unless_casts_read_them(
    recipe: Float8 | None, master: int
) -> None:
    aware = Megatron(use_precision_aware_optimizer=True)
    strategy = PLAIN.but({"zero.emulate": aware, "train.float8": recipe})
    shard = bucket(list(model_of(strategy).parameters)) // 2
    assert persistent(made_of(strategy))[Kind.MASTER] == master * shard


def test_a_moment_that_is_narrower_than_the_option_is_found() -> None:
    aware = Megatron.model_validate(
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    )
    strategy = PLAIN.but({"zero.emulate": aware})
    model = model_of(strategy)

    def narrower(program: Program) -> Program:
        buffers = tuple(
            replace(each, dtype=DType.FP8) if each.kind is Kind.MOMENT else each
            for each in program.buffers
        )
        return replace(program, buffers=buffers)

    found = {
        each.why for each in check(everywhere(make_schedule(model, strategy), narrower), model)
    }
    assert "updates with moment in fp8, and not in bf16" in found


TOKENS: list[tuple[Recipe, set[DType]]] = [
    (Float8.DELAYED, {DType.FP8, DType.BF16}),  # bf16: of the head
    (Float8.TENSORWISE, {DType.FP8, DType.BF16}),
    (Float4.NVFP4, {DType.FP8, DType.BF16}),
    (Float8.MXFP8, {DType.BF16}),
    (Float8.BLOCKWISE, {DType.BF16}),
]


@pytest.mark.parametrize(("recipe", "wires"), TOKENS)
def test_tokens_are_gathered_in_8_bits_if_one_copy_serves_both_axes(
    recipe: Recipe, wires: set[DType]
) -> None:
    strategy = with_recipe(recipe, **SEQUENCE).but({"parallel.tensor": 2})
    (program,) = made_of(strategy).programs
    gathers = [
        each
        for one in program.step
        for each in (one.members if isinstance(one, Together) else (one,))
        if isinstance(each, AllGather) and each.group == "tensor"
    ]
    assert {each.wire for each in gathers} == wires


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train.float8": Float8.ROWWISE}, "train.float8: 'rowwise' is not in Transformer Engine"),
        (
            {"train.float8": Float8.MXFP8, "train.float4": Float4.NVFP4},
            "train.float4: 'nvfp4' contradicts float8 = mxfp8",
        ),
        (
            {"train.num_layers_at_end_in_bf16": 1},
            "train.num_layers_at_end_in_bf16: 1 needs train.float8 or train.float4",
        ),
        (
            {"train.float8": Float8.DELAYED, "train.num_layers_at_start_in_bf16": 1},
            "1 does not go with train.float8 = delayed",
        ),
        (
            {"zero.emulate": Megatron(fp8_param_gather=True)},
            "zero.megatron.fp8_param_gather: true needs train.float8",
        ),
        (
            {
                "zero.emulate": Megatron(fp8_param_gather=True),
                "zero.stage": 0,
                "train.float8": Float8.TENSORWISE,
            },
            "zero.megatron.fp8_param_gather: true needs stage = 1",
        ),
    ],
)
def test_what_contradicts_is_one_line(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PLAIN.but(changes)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exp_avg_dtype": "fp8"}, "exp_avg_dtype: 'fp8' needs use_precision_aware_optimizer"),
        ({"exp_avg_sq_dtype": "fp64"}, "exp_avg_sq_dtype: 'fp64' must be 'fp32', 'fp16', 'bf16'"),
        (
            {
                "use_precision_aware_optimizer": True,
                "main_grads_dtype": "bf16",
                "grad_reduce_in_fp32": True,
            },
            "main_grads_dtype: 'bf16' needs grad_reduce_in_fp32 = false",
        ),
    ],
)
def test_formats_of_states_need_their_optimizer(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Megatron(**options)  # type: ignore[arg-type]  # by name
