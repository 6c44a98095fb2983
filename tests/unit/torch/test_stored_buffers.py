"""Stored values of a module that has its buffers in memory, and stored values that it lacks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meta_training import Tied, batch_of, on_meta, strategy_of, write_safetensors
from saved_tensors import damage

from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.module.initializer import Initializer
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], value) for name, value in other.items())


def in_a_file(folder: Path) -> Path:
    write_safetensors(folder / "all.safetensors", dict(Tied().state_dict()))
    return folder / "all.safetensors"


def in_a_checkpoint(folder: Path) -> Path:
    checkpoint_folder.write(folder, dict(Tied().state_dict()))
    return folder


@pytest.mark.matrix(9)
@pytest.mark.parametrize("keep", [in_a_file, in_a_checkpoint])
def test_stored_buffers_take_the_place_of_those_in_memory(
    tmp_path: Path, keep: Callable[[Path], Path]
) -> None:
    wanted = dict(Tied().named_buffers())
    for how in (keep(tmp_path), Initializer(stored=keep(tmp_path))):
        module = Tied()
        for each in module.buffers():
            each.fill_(7)
        option = Option(initial=how)
        Trainer(module, strategy_of(3), batch=batch_of(0), option=option).finish()
        assert equal(dict(module.named_buffers()), wanted)


def test_buffers_are_as_they_were_after_a_start_that_fails(tmp_path: Path) -> None:
    module = Tied()
    for each in module.buffers():
        each.fill_(7)
    before = {name: each.clone() for name, each in module.named_buffers()}
    damage(in_a_checkpoint(tmp_path), "layers.1.fall.weight")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trainer(module, strategy_of(3), batch=batch_of(0), option=Option(initial=tmp_path))
    assert equal(dict(module.named_buffers()), before)


@pytest.mark.one_commit_in(6)
def test_stored_tensors_that_the_module_lacks_are_refused_unless_they_are_ignored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, dict(Tied(layers=4).state_dict()))
    for module in (on_meta(Tied), Tied()):
        with pytest.raises(CheckpointError) as caught:
            Trainer(module, strategy_of(3), batch=batch_of(0), option=Option(initial=path))
        assert str(caught.value) == (
            f"checkpoint {path}: it is of another model: it has layers.3.fall.bias, the module has "
            "not; leave it out with initial=Initializer(stored=..., ignore=('layers.3.fall.bias',))"
        )
        option = Option(initial=Initializer(stored=path, ignore=("layers.3.*",)))
        Trainer(module, strategy_of(3), batch=batch_of(0), option=option).finish()


def test_a_file_that_is_not_of_safetensors_is_refused_with_what_may_be_given(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.pt"
    torch.save(Tied().state_dict(), path)
    with pytest.raises(CheckpointError, match=r"model\.pt: no file of safetensors; give one, a"):
        Trainer(Tied(), strategy_of(3), batch=batch_of(0), option=Option(initial=path))
