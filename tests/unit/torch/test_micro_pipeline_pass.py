"""What a schedule says is fused with collectives of tokens is what the installed PyTorch fuses."""

from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
from fitting import fitting

from zsim.model.architecture import Llama
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, CollectiveOperation
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2

RANKS, WIDTH, HEADS, TOKENS = 4, 64, 8, 8


def fused_by_schedule(sequences: int) -> list[Counter[tuple[str, bool]]]:
    """The same of a block of a schedule."""
    strategy = Strategy(
        parallel=Parallel(tensor=RANKS),
        zero=Zero(stage=3, emulate=FSDP2(enable_async_tensor_parallel=True)),
        train=Train(compile=True),
    )
    shape = Llama(
        layers=1, hidden_size=WIDTH, attention_heads=HEADS, sequence_length=TOKENS, vocab_size=32
    )
    model = fitting(replace(shape, execution=strategy.execution), strategy, sequences=sequences)
    step = make_schedule(model, strategy).programs[0].step
    tokens = [
        each
        for each in step
        if isinstance(each, CollectiveOperation) and each.group == "tensor"
        if "/mb0/block0/" in each.id and ("/gather/" in each.id or "/scatter" in each.id)
    ]
    return [
        Counter(
            ("gather" if isinstance(each, AllGather) else "scatter", each.in_parts)
            for each in tokens
            if f"/{way}/" in each.id
        )
        for way in ("forward", "backward")
    ]


@pytest.mark.matrix(24)
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_schedule_fuses_what_the_compiler_fuses(sequences: int) -> None:
    torch_side = import_module("fused_by_torch")  # imports the compiler, which takes seconds
    sizes = (torch_side.RANKS, torch_side.WIDTH, torch_side.HEADS, torch_side.TOKENS)
    assert sizes == (RANKS, WIDTH, HEADS, TOKENS)
    with torch_side.pretended_ranks():
        assert fused_by_schedule(sequences) == torch_side.fused_by_torch(sequences)
