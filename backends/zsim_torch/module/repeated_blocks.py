"""Find the repeated blocks of a module, which are the units if the user chooses none."""

from collections.abc import Mapping

from torch import nn


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the members of module lists, or of sequences of equal modules, by path.

    A module without any has its children as blocks. Lists inside other lists are skipped, and
    members without parameters are omitted.
    """
    found: dict[str, nn.Module] = {}
    for path, each in module.named_modules():
        if any(path.startswith(f"{known}.") for known in found):
            continue
        members = dict(each.named_children())
        repeated = isinstance(each, nn.Sequential) and len(members) > 1
        repeated = repeated and len({type(member) for member in members.values()}) == 1
        if path and (isinstance(each, nn.ModuleList) or repeated):
            found |= {f"{path}.{key}": member for key, member in members.items()}
    found = found or dict(module.named_children())
    return {path: each for path, each in found.items() if any(True for _ in each.parameters())}


def outside(module: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules that are in none of the blocks."""
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    return [part for part in module.modules() if id(part) not in inside]


def names_outside(module: nn.Module, blocks: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the parameters of modules outside the blocks."""
    names = {id(each): name for name, each in module.named_parameters()}
    parts = outside(module, blocks)
    return {names[id(each)] for part in parts for each in part.parameters(recurse=False)}
