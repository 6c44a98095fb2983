"""Tensors of a segment come and go; an allocator serves them where a schedule has whole buffers."""

from collections import Counter
from dataclasses import replace

import pytest

from zsim.dtype import DType
from zsim.memory import memory_ledger
from zsim.memory.caching import CachingAllocator
from zsim.memory.memory_block import BlockState
from zsim.memory.service import Service
from zsim.model.architecture import GPT, Architecture, Attention, Llama
from zsim.model.model import BATCH
from zsim.model.tensor_lifetime import AllocationEvent, AllocationTrace, LifetimeError
from zsim.model.transformer import transformer
from zsim.model.transformer.ends import HEAD_TOKENS
from zsim.schedule.operation import Allocate, Free
from zsim.schedule.schedule import Buffer, Kind, Program, ScheduleError
from zsim.strategy.execution import Execution, Loss
from zsim.strategy.precision import Precision

MIB = 1 << 20
PLAIN_GPT = GPT(layers=1, hidden_size=64, attention_heads=4, sequence_length=32, vocab_size=96)
LLAMA = Llama(
    layers=1,
    hidden_size=64,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=96,
    sequence_length=32,
    vocab_size=96,
)
SHAPES: dict[str, Architecture] = {
    "gpt": PLAIN_GPT,
    "gpt, plain": replace(PLAIN_GPT, attention=Attention.PLAIN),
    "gpt, side by side": replace(PLAIN_GPT, parallel_residual=True),
    "llama": LLAMA,
    "llama, operations": replace(LLAMA, execution=Execution(operations=True)),
    "llama, logits held": replace(LLAMA, execution=Execution(holds_logits=True)),
    **{f"llama, {loss} loss": replace(LLAMA, execution=Execution(loss=loss)) for loss in Loss},
}


def left(turns: tuple[AllocationEvent, ...]) -> Counter[int]:
    """Bytes of each buffer that are there when all turns were taken."""
    found = Counter[int]()
    for number, _, size in turns:
        found[number] += size
    return found


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_forward_leaves_what_is_saved_and_backward_gradients_alone(name: str, tensor: int) -> None:
    model = transformer(SHAPES[name], micro_batch_size=2, tensor=tensor, precision=Precision.BF16)
    sizes = {each.name: 2 * each.elements for each in model.parameters}
    for unit in model.units:
        for segment in unit.segments:
            ahead, back = left(segment.forward_course), left(segment.backward_course)
            assert (ahead[0], ahead[1]) == (0, segment.saved_bytes)
            assert (back[0], back[1]) == (0, -segment.saved_bytes)
            made = sum(size for number, size in back.items() if number > 1)
            read = [model.values[each].size_bytes for each in segment.inputs if each != BATCH]
            assert made == sum(sizes[each] for each in segment.parameters) + sum(read)


@pytest.mark.parametrize(
    ("loss", "forward", "backward"),
    [
        # The cast and the logarithm of the softmax; it, its gradient, that of the cast.
        (Loss.TORCH, 4 + 4, 4 + 4 + 4),
        # Logits and the softmax; it and the gradient of the logits.
        (Loss.IN_PLACE, 2 + 4, 4 + 2),
        # Logits; these and their gradient.
        (Loss.FUSED, 2, 2 + 2),
        # Logits, all logarithms, an eighth of the cast; logarithms, two eighths, the gradient.
        (Loss.CHUNKED, 2 + 4 + 4 / 8, 4 + 2 * 4 / 8 + 2),
        # All logarithms, a quarter of the cast; all logarithms, a quarter of two gradients.
        (Loss.CAST_CHUNKED, 4 + 4 / 4, 4 + (4 + 4) / 4),
        # Of an eighth: logits, the logarithm, its gradient, that of the cast; that of the logits.
        (Loss.CHUNKED_HEAD, (2 + 4 + 4 + 4) / 8, 2 / 8),
    ],
)
def test_the_head_holds_so_many_bytes_for_each_logit(
    loss: Loss, forward: float, backward: float
) -> None:
    """With logits by far the largest tensors, counted from what the trainers' code allocates."""
    length = 4 * HEAD_TOKENS if loss is Loss.CAST_CHUNKED else LLAMA.sequence_length
    execution = Execution(loss=loss)
    wide = replace(LLAMA, vocab_size=2**20, sequence_length=length, execution=execution)
    model = transformer(wide, micro_batch_size=1, precision=Precision.BF16)
    (segment,) = model.units[-1].segments
    logits = wide.sequence_length * wide.vocab_size
    # Gradients of parameters are other buffers, and no business of the loss.
    ahead, back = most(segment.forward_course, {0, 1}), most(segment.backward_course, {0, 1})
    found = ahead / logits, (back + segment.saved_bytes) / logits
    assert found == pytest.approx((forward, backward), abs=0.01)


def most(turns: tuple[AllocationEvent, ...], buffers: set[int]) -> int:
    """Return the most that turns hold of these buffers at once."""
    level = found = 0
    for number, _, size in turns:
        level += size if number in buffers else 0
        found = max(found, level)
    return found


def buffer(name: str, mib: int, course: AllocationTrace | None = None) -> Buffer:
    return Buffer(
        name=name,
        pool="device",
        elements=mib * MIB,
        dtype=DType.INT8,
        kind=Kind.WORKSPACE,
        home="compute",
        course=course,
    )


def served(order: str, *buffers: Buffer) -> CachingAllocator:
    """After a step that allocates buffers (small letters) and frees them (capitals)."""
    step = tuple(
        Allocate(id=f"{number}", buffer=each)
        if each.islower()
        else Free(id=f"{number}", buffer=each.lower())
        for number, each in enumerate(order)
    )
    program = Program(role="all", buffers=buffers, persistent=(), setup=(), step=step)
    allocator = CachingAllocator()
    lines = list(Service(allocator, program, "device").course(memory_ledger(program, 1)))
    assert len(lines) == len(order)
    assert all(piece.state is BlockState.FREE for piece in allocator.pieces())
    return allocator


def peak(allocator: CachingAllocator) -> int:
    return allocator.figures()["requested_bytes.all.peak"] // MIB


def test_what_backward_drops_makes_room_for_its_gradients() -> None:
    # Forward saves 30 and 40 MiB and holds 20 more at first; backward drops the 40 before it makes
    # 50 of gradients, for which it needs 10 more, and the 30 at the end.
    ahead = AllocationTrace(
        buffers=("s",),
        turns=((0, 1, 20 * MIB), (1, 0, 30 * MIB), (0, 1, -20 * MIB), (1, 1, 40 * MIB)),
    )
    back = AllocationTrace(
        buffers=("s", "g"),
        turns=(
            (1, 1, -40 * MIB),
            (0, 1, 10 * MIB),
            (2, 0, 50 * MIB),
            (0, 1, -10 * MIB),
            (1, 0, -30 * MIB),
        ),
    )
    saved, slopes = buffer("s", 70), buffer("g", 50)
    plain = served("sfFgbBSG", saved, slopes, buffer("f", 20), buffer("b", 10))
    course = served("sfFgbBSG", saved, slopes, buffer("f", 20, ahead), buffer("b", 10, back))
    assert peak(plain) == 70 + 50 + 10
    assert peak(course) == 30 + 50 + 10  # 90 forward has not: 30 + 40, and 50 before it


def test_a_forward_that_keeps_nothing_gives_back_what_it_would_save() -> None:
    # The 30 MiB go when they were read, before 40 more come; nothing is saved, "s" is not alive.
    course = AllocationTrace(
        buffers=("s",), turns=((1, 0, 30 * MIB), (1, 0, 0), (1, 1, 40 * MIB), (1, 1, 0))
    )
    assert peak(served("fF", buffer("s", 70), buffer("f", 1, course))) == 40
    assert peak(served("sfFS", buffer("s", 70), buffer("f", 1, course))) == 70


def test_what_is_beside_the_tensors_of_a_course_is_a_request_where_the_book_has_it() -> None:
    course = AllocationTrace(buffers=("s",), turns=((1, 0, 30 * MIB),))
    assert peak(served("sfFS", buffer("s", 70), buffer("f", 1, course))) == 70
    assert peak(served("sS", buffer("s", 70), buffer("f", 1, course))) == 40


def test_a_course_that_cannot_be_is_refused() -> None:
    with pytest.raises(LifetimeError, match="a turn must be of one of 1 buffers, or 0"):
        AllocationTrace(buffers=("s",), turns=((2, 0, 1),))
    with pytest.raises(LifetimeError, match="tensor 3 of buffer 0 gives back 2 bytes where 1 were"):
        AllocationTrace(buffers=(), turns=((0, 3, 1), (0, 3, -2)))
    with pytest.raises(LifetimeError, match="tensor 3 of buffer 0 gives back 2 bytes where 0 were"):
        AllocationTrace(buffers=(), turns=((0, 3, -2),))
    with pytest.raises(LifetimeError, match="tensor 0 of buffer 1 is taken twice"):
        AllocationTrace(buffers=("s",), turns=((1, 0, 5), (1, 0, 5)))
    with pytest.raises(ScheduleError, match="buffer f: course: s must be a buffer of its pool"):
        served("fF", buffer("f", 1, AllocationTrace(buffers=("s",), turns=())))
