"""How blocks are executed: what is kept, run again, fused, narrower, and shared between ranks."""

from dataclasses import replace
from itertools import accumulate

import pytest

from zsim.dtype import DType
from zsim.model.architecture import GPT, Attention, Llama
from zsim.model.architecture_error import ArchitectureError
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model, Segment
from zsim.model.narrow_products import format_of
from zsim.model.transformer import transformer
from zsim.strategy.execution import (
    ContextExchange,
    Execution,
    ExecutionError,
    Float4,
    Float8,
    Loss,
    Norms,
    Recipe,
)
from zsim.strategy.precision import Precision

LLAMA = Llama(
    layers=2,
    hidden_size=64,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=96,
    sequence_length=32,
    vocab_size=100,
)
TOKENS = 2 * 32


def made(execution: Execution, shape: Llama | GPT = LLAMA) -> Model:
    return transformer(
        replace(shape, execution=execution), micro_batch_size=2, precision=Precision.BF16
    )


def block(model: Model) -> Segment:
    (segment,) = model.units[1].segments
    return segment


def products(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.kind is KernelKind.MATMUL]


def test_selective_by_operations_keeps_attention_and_every_second_product() -> None:
    plain, chosen = block(made(Execution())), block(made(Execution(operations=True)))
    # In the order q, k, v, output, gate, up, down the products of 64, 32, 64, 96 and 64 columns: q,
    # v, gate and down are kept, and of attention its result and one fp32 sum for each head.
    assert chosen.saved_bytes == TOKENS * (2 * (64 + 32 + 96 + 64) + 2 * 64 + 4 * 4)
    assert chosen.saved_bytes < plain.saved_bytes
    again = chosen.backward[: len(chosen.backward) - len(plain.backward)]
    # Keys, the output and up are multiplied again; down is not, since nothing reads its result.
    assert [kernel.shape[2] for kernel in products(again)] == [32, 64, 96]
    assert KernelKind.ATTENTION not in [kernel.kind for kernel in again]
    assert chosen.forward == plain.forward


def most(segment: Segment) -> int:
    """The most that backward holds at once, of what is saved, its workspace and gradients."""
    levels = accumulate(size for _, _, size in segment.backward_course)
    return segment.saved_bytes + max(levels)


def test_what_is_made_again_is_there_while_backward_runs() -> None:
    plain, chosen = block(made(Execution())), block(made(Execution(operations=True)))
    # Both then hold what backward reads; without the one that keeps all there are also keys and
    # what the rotary turns, which nothing reads any more.
    assert plain.saved_bytes <= most(plain) <= most(chosen)


GPT2 = GPT(layers=2, hidden_size=64, attention_heads=4, sequence_length=32, vocab_size=100)


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt"])
def test_a_block_that_stops_early_leaves_out_its_last_product(shape: Llama | GPT) -> None:
    whole, early = block(made(Execution(), shape)), block(made(Execution(early_stop=True), shape))
    assert early.forward_kernels(again=False) == whole.forward
    assert whole.forward_kernels(again=True) == whole.forward
    again = early.forward_kernels(again=True)
    assert again == whole.forward[: len(again)]
    assert len(products(again)) == len(products(whole.forward)) - 1


def test_norms_that_are_composed_move_what_pytorch_does_operator_by_operator() -> None:
    """Bytes of an element, as `torch.nn.functional.rms_norm` of bf16 is dispatched on the CPU.

    Six kernels of forward move 40, thirteen of backward 104; fused they are 4 and 10.
    """
    moved: dict[Norms, list[int]] = {}
    for norms in Norms:
        one = block(made(Execution(norms=norms)))
        moved[norms] = [sum(each.bytes for each in way) for way in (one.forward, one.backward)]
    elements = TOKENS * LLAMA.hidden_size
    more = [(b - a) / (2 * elements) for a, b in zip(*moved.values(), strict=True)]
    assert more == [40 - 4, 104 - 10]


def test_compiled_norms_are_one_kernel_however_they_are_written() -> None:
    fused, composed = (made(Execution(norms=each, compiled=True)) for each in Norms)
    assert block(fused).forward == block(composed).forward


def test_a_narrow_loss_keeps_half_of_what_one_in_fp32_does() -> None:
    heads = [
        made(Execution(loss=loss)).units[-1].segments[-1] for loss in (Loss.TORCH, Loss.NARROW)
    ]
    logits = TOKENS * LLAMA.vocab_size
    assert heads[0].saved_bytes - heads[1].saved_bytes == 2 * logits


def test_compiled_blocks_move_and_keep_less_and_multiply_the_same() -> None:
    eager, compiled = block(made(Execution())), block(made(Execution(compiled=True)))
    for way in ("forward", "backward"):
        laid = products(getattr(eager, way))
        # The compiler pads, so how operands lie does not matter.
        assert products(getattr(compiled, way)) == [replace(each, layout=None) for each in laid]
    for way in ("forward", "backward"):
        moved = [sum(each.bytes for each in getattr(one, way)) for one in (compiled, eager)]
        assert moved[0] < moved[1]
    assert eager.saved_bytes - compiled.saved_bytes == TOKENS * 96 * 2  # what the curve gives


@pytest.mark.parametrize("kind", [*Float8, *Float4])
def test_narrow_formats_are_for_the_linear_layers_of_blocks_alone(kind: Recipe) -> None:
    model = made(Execution(recipe=kind))
    for way in (block(model).forward, block(model).backward):
        assert {kernel.dtype for kernel in products(way)} == {format_of(kind)}
    (head,) = model.units[-1].segments
    assert {kernel.dtype for kernel in products(head.forward)} == {DType.BF16}
    assert model.forward_flops == made(Execution()).forward_flops


def test_ranks_that_share_a_sequence_have_its_tokens_and_all_its_keys() -> None:
    alone, shared = made(Execution()), made(Execution(context=4))
    assert shared.tokens == alone.tokens // 4
    assert shared.forward_flops * 4 == alone.forward_flops
    assert shapes_of_attention(shared) == [(8, 32)]


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt"])
@pytest.mark.parametrize("exchange", ContextExchange)
def test_attention_that_is_merged_is_to_the_keys_of_one_rank_after_the_other(
    exchange: ContextExchange, shape: Llama | GPT
) -> None:
    alone = made(Execution(), shape)
    merged = made(Execution(context=4, exchange=exchange, merges=True), shape)
    assert shapes_of_attention(merged) == 4 * [(8, 8)]
    assert merged.forward_flops * 4 == alone.forward_flops
    assert merged.masked_flops * 4 == alone.masked_flops
    early = made(Execution(context=4, exchange=exchange, early_stop=True), shape)
    first, *_, last = early.units[1].segments
    assert first.again == first.forward  # queries and keys are needed
    assert len(products(last.again)) == len(products(last.forward)) - 1


def shapes_of_attention(model: Model) -> list[tuple[int, ...]]:
    """Queries and keys of each kernel of attention of a block."""
    kernels = [kernel for part in model.units[1].segments for kernel in part.forward]
    return [each.shape[3:5] for each in kernels if each.kind is KernelKind.ATTENTION]


def test_a_context_that_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(ExecutionError, match=r"^context: 0 must be at least 1$"):
        Execution(context=0)
    with pytest.raises(ArchitectureError, match="32 must be a multiple of twice the context 5"):
        replace(LLAMA, execution=Execution(context=5))
    with pytest.raises(ArchitectureError, match="plain is not modelled"):
        replace(LLAMA, attention=Attention.PLAIN, execution=Execution(context=2))
