"""Code that a checkpoint names is never run, and what is no code comes back."""

import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_net import batch, in_fp64, net

from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer


def trainer(option: Option | None = None) -> Trainer:
    return Trainer(net(), in_fp64(), batch=batch(0), option=option)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class Kept:
    """A state that a checkpoint holds."""

    def __init__(self, state: object) -> None:
        self.state: Any = state

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_code_that_metadata_names_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with trainer() as one:
        one.save(tmp_path / "saved")
        metadata = tmp_path / "saved" / ".metadata"
        whole = metadata.read_bytes()
        names = (os.mkdir, eval, getattr, torch.load, os.path.join, Kept)
        texts = [pickle.dumps(each, number % 5) for number, each in enumerate(names)]
        for text in (pickle.dumps(Runs(ran)), *texts, pickle.dumps({}), whole[:-2], b""):
            metadata.write_bytes(text)
            for read in (
                lambda: one.load(tmp_path / "saved"),
                lambda: trainer(option=Option(initial=tmp_path / "saved")),
            ):
                with pytest.raises(CheckpointError, match="cannot be read: ") as caught:
                    read()
                assert "\n" not in str(caught.value)
        assert not ran.exists()
        metadata.write_bytes(pickle.dumps(Runs(ran)))
        with pytest.raises(CheckpointError, match=r"\.metadata has a posix\.mkdir, which may run"):
            one.load(tmp_path / "saved")


@pytest.mark.parametrize("path", ["/etc/hostname", "../other/__0_0.distcp", 5])
def test_files_outside_the_folder_are_never_read(tmp_path: Path, path: object) -> None:
    with trainer() as one:
        one.save(tmp_path)
        metadata = checkpoint_folder.metadata_of(tmp_path)
        for each in metadata.storage_data.values():
            each.relative_path = path
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"\.metadata is no metadata of torch\.distri"):
            one.load(tmp_path)


def test_code_that_a_value_names_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with trainer() as one:
        one.save(tmp_path / "beside", {"loader": Kept({"state": Runs(ran)})})
        state = one.state_dict()
        state["trainer"]["steps_done"] = Runs(ran)
        checkpoint_folder.write(tmp_path / "trainer", state)
        before = one.full_parameters()
        loader = Kept(None)
        with pytest.raises(CheckpointError) as caught:
            one.load(tmp_path / "beside", {"loader": loader})
        assert str(caught.value) == (
            f"checkpoint {tmp_path}/beside: loader has a posix.mkdir, which may run code; if you "
            "trust the file, allow it with torch.serialization.add_safe_globals"
        )
        with pytest.raises(CheckpointError, match=r"trainer\.steps_done has a posix\.mkdir, which"):
            one.load(tmp_path / "trainer")
        assert not ran.exists()
        assert loader.state is None
        for name, value in one.full_parameters().items():
            assert torch.equal(value, before[name])
        with torch.serialization.safe_globals([Kept]):
            one.save(tmp_path / "allowed", {"loader": Kept({"state": Kept({"at": 3})})})
            allowed = Kept(None)
            one.load(tmp_path / "allowed", {"loader": allowed})
        assert allowed.state_dict()["state"].state == {"at": 3}


def test_numbers_and_arrays_of_numpy_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    generator = np.random.RandomState(3)
    state = {
        "random": generator.get_state(),
        "rate": np.float64(0.5),
        "mask": np.array([True, False]),
        "counter": Counter({30: 1}),
        "at": OrderedDict(epoch=3),
    }
    loader = Kept(None)
    with trainer() as one:
        assert one.optimizer is not None
        one.optimizer.param_groups[0]["lr"] = np.float64(0.25)
        one.save(tmp_path, {"loader": Kept(state)})
        one.load(tmp_path, {"loader": loader})
        assert one.optimizer.param_groups[0]["lr"] == 0.25
    found = loader.state_dict()
    again = np.random.RandomState(4)
    again.set_state(found.pop("random"))
    assert again.randint(1000, size=9).tolist() == generator.randint(1000, size=9).tolist()
    assert found.pop("mask").tolist() == [True, False]
    assert found == {key: state[key] for key in ("rate", "counter", "at")}
