"""Memory of the loss over parts of a vocabulary that PyTorch computes operator by operator."""

import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import composed_loss
import pytest

from zsim.model.architecture import Llama
from zsim.model.model import Segment
from zsim.model.transformer import transformer
from zsim.strategy.execution import Execution
from zsim.strategy.precision import Precision


def of_loss(*, composes: bool) -> Segment:
    """Return the part of the head that has the loss, on one of the ranks."""
    shape = Llama(
        layers=1,
        hidden_size=8,
        attention_heads=composed_loss.RANKS,
        sequence_length=composed_loss.TOKENS,
        vocab_size=composed_loss.VOCABULARY,
        execution=Execution(composes_loss=composes),
    )
    model = transformer(
        shape,
        micro_batch_size=1,
        tensor=composed_loss.RANKS,
        precision=Precision.BF16,
        sequence=True,
        keeps_gathered=True,
    )
    return max(model.units[-1].segments, key=lambda each: each.saved_bytes)


def peak(events: Iterable[tuple[int, int, int]], held: int = 0) -> int:
    return max(accumulate((size for _, _, size in events), initial=held))


@pytest.mark.one_commit_in(24)
def test_forward_and_backward_hold_what_torch_s_loss_parallel_holds() -> None:
    done = subprocess.run(
        [sys.executable, composed_loss.__file__],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=Path(composed_loss.__file__).parent,
    )
    torch_s = json.loads(done.stdout.splitlines()[-1])
    found = of_loss(composes=True)
    # A number for each token, such as its sum, is a four-hundredth of the logits of one rank.
    assert peak(found.forward_course) == pytest.approx(torch_s["forward"], rel=0.02)
    held = found.saved_bytes
    assert peak(found.backward_course, held) == pytest.approx(torch_s["backward"], rel=0.02)


def test_a_kernel_for_all_holds_a_tensor_less_each_way() -> None:
    composed, whole = of_loss(composes=True), of_loss(composes=False)
    logits = composed_loss.TOKENS * composed_loss.VOCABULARY // composed_loss.RANKS * 4
    assert peak(composed.forward_course) - peak(whole.forward_course) == logits
    assert peak(composed.backward_course) - peak(whole.backward_course) == logits
