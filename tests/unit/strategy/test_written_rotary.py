"""Bytes that rotary positions and copies of keys move, as PyTorch dispatches them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zsim.model.architecture import Llama, QKNorm
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.transformer import transformer
from zsim.strategy.execution import PLAIN, Execution
from zsim.strategy.precision import Precision
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

SEQUENCES, HEADS, SHARED, LENGTH, SIZE = 4, 4, 2, 8, 16
LLAMA = Llama(
    layers=1,
    hidden_size=HEADS * SIZE,
    attention_heads=HEADS,
    key_value_heads=SHARED,
    sequence_length=LENGTH,
    vocab_size=11,
    joined_qkv=False,
)
QWEN3 = replace(LLAMA, qk_norm=QKNorm.HEAD)


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Sums the bytes that kernels read and write in tensors of at least half of `elements`."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.least, self.bytes = elements // 2, 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (torch's own)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        )
        if not is_view and func is not torch.ops.aten._unsafe_view.default:
            read = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            self.bytes += sum(self._size(each) for each in (*read, made))
            if func is torch.ops.aten.slice_backward.default:  # the slice is put into zeros
                self.bytes += self._size(args[0])
        return made

    def _size(self, tensor: object) -> int:
        if not isinstance(tensor, Tensor):
            return 0
        own = tensor.untyped_storage().nbytes() // tensor.element_size()  # as if not expanded
        pairs = 2 if tensor.is_complex() else 1
        elements = min(tensor.numel(), own)
        return elements * tensor.element_size() if elements * pairs >= self.least else 0


@contextmanager
def counting(elements: int) -> Generator[Moved]:
    with Moved(elements) as found:
        yield found


def in_complex_numbers(heads: Tensor) -> Tensor:
    """Turn pairs of elements as torchtitan's Llama does."""
    turns = torch.polar(torch.ones(LENGTH, SIZE // 2), torch.rand(LENGTH, SIZE // 2))
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(heads)


def in_halves(heads: Tensor) -> Tensor:
    """Turn halves of heads as torchtitan's Qwen 3 does."""
    cosine, sine = torch.rand(2, 1, LENGTH, 1, SIZE).to(heads.dtype)
    half = SIZE // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    made: Tensor = heads * cosine + turned * sine
    return made


def repeated(heads: Tensor) -> Tensor:
    """Copy each head of keys for the query heads that share it."""
    sequences, length, shared, size = heads.shape
    wide = heads[:, :, :, None].expand(sequences, length, shared, HEADS // SHARED, size)
    return wide.reshape(sequences, length, HEADS, size)


def moved_by(function: Callable[[Tensor], Tensor], heads: int) -> tuple[int, int]:
    """Bytes that forward and backward of `function` move, on so many heads in bf16."""
    given = torch.randn(SEQUENCES, LENGTH, heads, SIZE).bfloat16().requires_grad_()
    with counting(given.numel()) as forward:
        made = function(given)
    incoming = torch.randn_like(made)
    with counting(given.numel()) as backward:
        torch.autograd.grad(made, [given], incoming)
    return forward.bytes, backward.bytes


def kernels(shape: Llama, execution: Execution) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    model = transformer(
        replace(shape, execution=execution), micro_batch_size=SEQUENCES, precision=Precision.BF16
    )
    (segment,) = model.units[1].segments
    return segment.forward, segment.backward


def more(shape: Llama, execution: Execution, plain: Execution = PLAIN) -> list[int]:
    """Bytes that kernels move beyond those of `plain`, its rotary positions left out."""
    with_it, without = kernels(shape, execution), kernels(shape, plain)
    return [
        sum(each.bytes for each in own)
        - sum(each.bytes for each in other if each.kind is not KernelKind.ROTARY)
        for own, other in zip(with_it, without, strict=True)
    ]


@pytest.mark.parametrize(
    ("shape", "function"), [(LLAMA, in_complex_numbers), (QWEN3, in_halves)], ids=["llama", "qwen3"]
)
def test_rotary_positions_move_what_operators_of_torchtitan_do(
    shape: Llama, function: Callable[[Tensor], Tensor]
) -> None:
    dispatched = [moved_by(function, heads) for heads in (HEADS, SHARED)]
    expected = [sum(of_heads[way] for of_heads in dispatched) for way in (0, 1)]
    assert more(shape, Execution(writes_rotary=True)) == expected


def test_keys_and_values_that_are_repeated_move_what_expand_and_its_sum_do() -> None:
    written = Execution(writes_rotary=True)
    found = [
        a - b
        for a, b in zip(
            more(LLAMA, replace(written, repeats_keys=True)), more(LLAMA, written), strict=True
        )
    ]
    assert found == [2 * each for each in moved_by(repeated, SHARED)]


def test_compiled_rotary_positions_are_one_kernel_whoever_writes_them() -> None:
    written, other = (Execution(writes_rotary=each, compiled=True) for each in (True, False))
    assert kernels(LLAMA, written) == kernels(LLAMA, other)


def test_heads_that_share_no_keys_are_not_repeated() -> None:
    alone = replace(LLAMA, key_value_heads=HEADS)
    assert kernels(alone, Execution(repeats_keys=True)) == kernels(alone, Execution())


def test_fsdp2_runs_the_operators_of_torchtitan_and_repeats_keys_if_asked() -> None:
    assert FSDP2().writes_rotary
    assert not Megatron().writes_rotary
    assert [FSDP2(repeat_kv=each).repeats_keys for each in (False, True)] == [False, True]
