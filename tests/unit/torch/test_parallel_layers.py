"""Collectives and copies of an MLP whose layers PyTorch parallelizes one by one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import parallel_layers
import pytest

from zsim.model.architecture import Llama
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.transformer import transformer
from zsim.strategy.execution import Execution
from zsim.strategy.precision import Precision


@pytest.fixture(scope="module")
def issued() -> dict[str, dict[str, int]]:
    """What PyTorch issues and compiles, in a process of its own."""
    script = Path(parallel_layers.__file__)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_perceptron(*, compiled: bool) -> tuple[Counter[str], Counter[str]]:
    """Return what the MLP of a block gathers, scatters and copies, forward and backward."""
    shape = Llama(
        layers=1,
        hidden_size=parallel_layers.WIDTH,
        attention_heads=parallel_layers.RANKS,
        sequence_length=parallel_layers.TOKENS,
        vocab_size=8,
        intermediate_size=parallel_layers.INNER,
        execution=Execution(gathers_each=True, rearranges=True, compiled=compiled),
    )
    model = transformer(
        shape,
        micro_batch_size=parallel_layers.SEQUENCES,
        tensor=parallel_layers.RANKS,
        precision=Precision.BF16,
        sequence=True,
        keeps_gathered=True,
    )
    segments = model.units[1].segments
    first = next(place for place, each in enumerate(segments) if each.inputs[0].endswith("ln2"))
    forward, backward, is_left = Counter[str](), Counter[str](), False
    for each in segments[first:-1]:
        forward += _counted(each.reads_gathered and not is_left, each.ends is not None)
        backward += _counted(each.ends is not None, each.reads_gathered)
        forward["copies"] += _copies(each.forward)
        backward["copies"] += _copies(each.backward)
        is_left = each.leaves_gathered
    return forward, backward


def _counted(gathers: bool, scatters: bool) -> Counter[str]:
    return Counter(gathers=int(gathers), scatters=int(scatters))


def _copies(kernels: tuple[Kernel, ...]) -> int:
    """Count kernels that copy the hidden states of all tokens."""
    shape = (parallel_layers.SEQUENCES * parallel_layers.TOKENS, parallel_layers.WIDTH)
    return sum(each.kind is KernelKind.ELEMENTWISE and each.shape == shape for each in kernels)


@pytest.mark.one_commit_in(24)
def test_each_layer_gathers_and_scatters_as_in_eager_pytorch(
    issued: dict[str, dict[str, int]],
) -> None:
    forward, backward = of_perceptron(compiled=False)
    for kind in ("gathers", "scatters"):
        assert forward[kind] + backward[kind] == issued["eager"][kind]


@pytest.mark.one_commit_in(8)
def test_compiled_layers_gather_scatter_and_copy_as_graphs_of_pytorch_do(
    issued: dict[str, dict[str, int]],
) -> None:
    forward, backward = of_perceptron(compiled=True)
    assert forward == issued["forward"]
    assert backward == issued["backward"]
