"""Blocks whose linear layers multiply in 8 or 4 bits: kernels, and what backward needs."""

import pytest

from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model, ModelError, Segment
from zsim.model.narrow_products import NarrowProducts, format_of
from zsim.model.transformer import transformer
from zsim.schedule.replace import replace
from zsim.strategy.execution import PLAIN, RECIPES, Execution, Float4, Float8, Quantizer, Recipe
from zsim.strategy.precision import Precision

TE, AO = Quantizer.TRANSFORMER_ENGINE, Quantizer.TORCHAO
LLAMA = Llama(layers=4, hidden_size=256, attention_heads=2, sequence_length=128, vocab_size=512)
TOKENS, WIDTH, WIDE = 2 * 128, 256, LLAMA.wide


def made(execution: Execution = PLAIN, *, tensor: int = 1, sequence: bool = False) -> Model:
    return transformer(
        replace(LLAMA, execution=execution),
        micro_batch_size=2,
        tensor=tensor,
        precision=Precision.BF16,
        sequence=sequence,
    )


def block(model: Model, number: int = 0) -> Segment:
    (segment,) = model.units[1 + number].segments
    return segment


def engine(recipe: Recipe, **options: bool) -> Execution:
    return Execution(recipe=recipe, quantizer=TE, **options)  # type: ignore[arg-type]  # by name


def products(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [each for each in kernels if each.kind is KernelKind.MATMUL]


def moved(kernels: tuple[Kernel, ...]) -> int:
    return sum(each.bytes for each in kernels if each.kind is not KernelKind.MATMUL)


@pytest.mark.parametrize("recipe", RECIPES[TE])
def test_transformer_engine_keeps_cast_inputs_instead_of_those_in_16_bits(recipe: Recipe) -> None:
    """The norm's output, which q, k and v share and gate and up share, and the MLP's product.

    Queries, keys and values, and gate and up, are saved as before. The last layer of attention
    keeps its input, which attention saved anyway, unless scaling is delayed.
    """
    plain, narrow = block(made()), block(made(engine(recipe)))
    casts = NarrowProducts(recipe=recipe, quantizer=TE)
    inputs = 2 * WIDTH + WIDE
    stored = 2 * casts.stored_bytes(TOKENS, WIDTH) + casts.stored_bytes(TOKENS, WIDE)
    difference = 2 * TOKENS * inputs - stored
    if recipe is Float8.DELAYED:
        difference -= casts.stored_bytes(TOKENS, WIDTH)
    assert plain.saved_bytes - narrow.saved_bytes == difference


@pytest.mark.parametrize("recipe", RECIPES[AO])
def test_torchao_keeps_inputs_in_16_bits(recipe: Recipe) -> None:
    assert block(made(Execution(recipe=recipe))).saved_bytes == block(made()).saved_bytes


@pytest.mark.parametrize(("quantizer", "recipe"), [(AO, Float8.MXFP8), (TE, Float8.MXFP8)])
def test_casts_of_mxfp8_move_each_operand_as_often_as_the_library_does(
    quantizer: Quantizer, recipe: Recipe
) -> None:
    """torchao casts each operand for each of its two GEMMs; Transformer Engine once for both."""
    plain = block(made())
    narrow = block(made(Execution(recipe=recipe, quantizer=quantizer)))
    one = NarrowProducts(recipe=recipe, quantizer=quantizer)
    layers = [(WIDTH, WIDTH)] * 4 + [(WIDE, WIDTH)] * 2 + [(WIDTH, WIDE)]
    both = {False: 0, True: 0}

    def cast(rows: int, columns: int, copies: int = 1) -> int:
        return 2 * rows * columns + one.stored_bytes(rows, columns, copies=copies)

    if quantizer is AO:
        for rows, columns in layers:
            both[False] += cast(TOKENS, columns) + cast(rows, columns)
            both[True] += 2 * cast(TOKENS, rows) + cast(rows, columns) + cast(TOKENS, columns)
    else:  # weights once a step, elsewhere; the input of three and of two layers once
        both[False] = 2 * cast(TOKENS, WIDTH, 2) + cast(TOKENS, WIDTH) + cast(TOKENS, WIDE, 2)
        both[True] = sum(cast(TOKENS, rows, 2) for rows, _ in layers) + cast(TOKENS, WIDTH)
    assert moved(narrow.forward) - moved(plain.forward) == both[False]
    assert moved(narrow.backward) - moved(plain.backward) == both[True]


@pytest.mark.parametrize("recipe", [Float8.TENSORWISE, Float8.DELAYED])
def test_gpus_that_multiply_any_layout_write_one_copy(recipe: Recipe) -> None:
    two, one = (block(made(engine(recipe, any_layout=it))) for it in (False, True))
    elements = TOKENS * (2 * WIDTH + WIDE)
    spared = elements if recipe is Float8.TENSORWISE else 2 * 2 * TOKENS * WIDTH + TOKENS * WIDE
    if recipe is Float8.DELAYED:
        spared += TOKENS * WIDTH  # the last layer of attention casts once for both
    assert moved(two.forward) - moved(one.forward) == spared
    gradients = TOKENS * (4 * WIDTH + 2 * WIDE + WIDTH)
    assert moved(two.backward) - moved(one.backward) == gradients


@pytest.mark.parametrize("recipe", [Float8.MXFP8, Float4.NVFP4])
def test_first_and_last_layers_may_multiply_in_16_bits(recipe: Recipe) -> None:
    model = made(replace(engine(recipe), wide_layers=(1, 2)))
    formats = [{each.dtype for each in products(block(model, n).forward)} for n in range(4)]
    assert formats == [{DType.BF16}, {format_of(recipe)}, {DType.BF16}, {DType.BF16}]
    assert {each.name.partition(".")[0] for each in model.parameters if each.float8} == {"block1"}
    assert block(model) == block(made())


def test_there_are_no_more_layers_in_16_bits_than_layers() -> None:
    why = "train.num_layers_at_end_in_bf16: 3 must be at most 2, the other layers of the model"
    with pytest.raises(ModelError, match=why):
        made(replace(engine(Float8.MXFP8), wide_layers=(2, 3)))


@pytest.mark.parametrize("recipe", RECIPES[TE])
def test_tensor_ranks_cast_the_tokens_that_they_gather_once(recipe: Recipe) -> None:
    """With sequence parallelism, no cast of gathered tokens is of more than a rank's own."""
    model = made(engine(recipe), tensor=2, sequence=True)
    plain = made(tensor=2, sequence=True)
    more = [
        moved(mine.forward) - moved(other.forward)
        for mine, other in zip(model.units[1].segments, plain.units[1].segments, strict=True)
    ]
    one = NarrowProducts(recipe=recipe, quantizer=TE)
    own = TOKENS // 2

    def cast(rows: int, columns: int, copies: int, *, is_measured: bool = False) -> int:
        kernels = one.cast(rows, columns, copies=copies, is_measured=is_measured)
        return sum(each.bytes for each in kernels)

    first = cast(own, WIDTH, 2, is_measured=recipe is Float8.TENSORWISE)
    if recipe is Float8.DELAYED:
        first = sum(each.bytes for each in one.transposed(own, WIDTH))
    kept = 2 if recipe is Float8.DELAYED else 1
    attention = first + cast(TOKENS, WIDTH // 2, kept)
    mlp = first + cast(TOKENS, WIDE // 2, 2)
    assert [each for each in more if each] == [attention, mlp]
