"""What the model says is kept for backward is what autograd keeps, unit by unit, to the byte."""

import torch
from drawn_shapes import architectures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from zsim.architecture import Architecture, Norm
from zsim.strategy import Precision
from zsim.transformer import transformer as described
from zsim_torch.torch_dtype import TORCH_DTYPE
from zsim_torch.transformer import transformer


def kept_by_autograd(module: torch.nn.Module, inputs: list[torch.Tensor]) -> tuple[int, bool]:
    """Bytes of storages that `module` keeps beside parameters and inputs; does it keep an input?"""

    def pointers(tensors: list[torch.Tensor]) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    saved: dict[int, torch.UntypedStorage] = {}  # kept alive, so that none takes another's place

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    known = pointers(list(module.parameters()))
    given = pointers(inputs)
    kept = sum(each.nbytes() for at, each in saved.items() if at not in known | given)
    return kept, bool(given & set(saved))


def statistics_on_cpu(shape: Architecture, precision: Precision, size: int, norms: int) -> int:
    """Bytes that torch's layer norm saves by on a CPU: its statistics are in the input's format."""
    if shape.norm is Norm.RMS:
        return 0
    saved = precision.optimizer.size_bytes - precision.compute.size_bytes
    return 2 * norms * size * shape.sequence_length * saved


@given(architectures(), st.integers(1, 3), st.sampled_from(Precision))
@settings(deadline=None, max_examples=80)
def test_the_model_says_what_autograd_keeps_to_the_byte(
    shape: Architecture, size: int, precision: Precision
) -> None:
    model = described(shape, micro_batch_size=size, precision=precision)
    module = transformer(shape, dtype=TORCH_DTYPE[precision.compute])
    batch = torch.zeros(size, shape.sequence_length + 1, dtype=torch.int64)
    given = [batch]
    for unit in model.units:
        if unit is model.units[-1]:
            given.append(batch)
        part = module.get_submodule(unit.name)
        kept, keeps_input = kept_by_autograd(part, given)
        (segment,) = unit.segments
        norms = sum(name.startswith("ln") for name, _ in part.named_children())
        expected = segment.saved_bytes - statistics_on_cpu(shape, precision, size, norms)
        assert (kept, keeps_input) == (expected, segment.saves_input), unit.name
        flow: torch.Tensor = part(*given)
        assert flow.numel() == segment.outputs[-1].elements
        given = [flow.detach().requires_grad_()]
