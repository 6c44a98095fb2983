"""Bytes that autograd keeps of a module."""

import torch
from torch.autograd.graph import saved_tensors_hooks


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
