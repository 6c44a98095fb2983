"""A module on "meta": its values are loaded or made piece by piece, and no rank holds all of it."""

import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live_storages import LiveStorages
from meta_training import (
    Begun,
    Layer,
    Start,
    Tied,
    batch_of,
    begin,
    begin_all,
    bytes_at_start,
    on_meta,
    strategy_of,
    write_safetensors,
)
from shared_ranks import SharedPools
from torch import nn

from zsim.backend.backend import RefusedError
from zsim_torch.checkpoint import checkpoint_folder
from zsim_torch.checkpoint.checkpoint_folder import CheckpointError
from zsim_torch.checkpoint.stored_values import StoredValues
from zsim_torch.initial_values import InitialValues
from zsim_torch.module.description import describe
from zsim_torch.module.initializer import Initializer
from zsim_torch.run_option import Option
from zsim_torch.supervise.ranks import RankPool
from zsim_torch.trainer import Trainer

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def pool(pool_of: SharedPools) -> RankPool:
    return pool_of(2)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], value) for name, value in other.items())


def in_safetensors(folder: Path) -> Path:
    """Two files, of which none has the second name of the tied weight."""
    values = {name: each for name, each in Tied().state_dict().items() if name != "head.weight"}
    names = sorted(values)
    write_safetensors(folder / "model-1.safetensors", {name: values[name] for name in names[::2]})
    write_safetensors(folder / "model-2.safetensors", {name: values[name] for name in names[1::2]})
    return folder


def in_one_file(folder: Path) -> Path:
    write_safetensors(folder / "all.safetensors", dict(Tied().state_dict()))
    return folder / "all.safetensors"


def saved(module: nn.Module, folder: Path) -> Path:
    """Save its state by its own names, as `torch.distributed.checkpoint.save` does."""
    checkpoint_folder.write(folder, dict(module.state_dict()))
    return folder


def in_a_checkpoint_of_torch(folder: Path) -> Path:
    return saved(Tied(), folder)


def in_a_checkpoint_of_ours(folder: Path) -> Path:
    with Trainer(Tied(), strategy_of(1), batch=batch_of(0)) as trainer:
        trainer.save(folder)
    return folder


STORES = (in_safetensors, in_one_file, in_a_checkpoint_of_torch, in_a_checkpoint_of_ours)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("stage", STAGES)
def test_values_that_are_loaded_train_as_those_of_a_module_bit_for_bit(
    stage: int, tmp_path: Path, pool: RankPool
) -> None:
    folder = STORES[stage](tmp_path)
    starts = [Start(stage, None), Start(stage, folder)]
    for (own, loaded), rank in zip(pool.run(begin_all, starts), range(2), strict=True):
        assert equal(own.first, loaded.first), rank
        assert equal(own.last, loaded.last)
        assert own.losses == loaded.losses
        assert equal(own.buffers, loaded.buffers)


def reset(module: nn.Module) -> None:
    again: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
    again()


def made_by_hand(seed: int) -> Tied:
    """Each layer, and each module outside of them, filled from a generator of its own."""
    module = Tied()
    parts = [name for name, _ in module.named_modules() if name.count(".") == 1]
    for path in [*parts, "table", "spread"]:
        torch.manual_seed(zlib.crc32(f"{seed} {path}".encode()))
        module.get_submodule(path).apply(reset)
    return module


@pytest.mark.one_commit_in(9)
def test_values_that_modules_make_depend_on_the_seed_alone(pool: RankPool) -> None:
    alone = begin(Start(3, Initializer(seed=3)))
    starts = [Start(stage, Initializer(seed=3)) for stage in STAGES]
    by_hand = {name: each.detach() for name, each in made_by_hand(3).named_parameters()}
    assert equal(alone.first, by_hand)
    for found in pool.run(begin_all, starts):
        assert all(equal(each.first, by_hand) for each in found)
    other = begin(Start(3, Initializer(seed=4)))
    assert not torch.equal(other.first["table.weight"], by_hand["table.weight"])


def test_statistics_are_made_and_learn() -> None:
    found: Begun = begin(Start(2, Initializer(), steps=1))
    assert found.buffers["spread.num_batches_tracked"] == 1
    assert not torch.equal(found.buffers["spread.running_mean"], torch.zeros(8))


def test_a_function_of_the_module_fills_it_inner_ones_first() -> None:
    called: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        called.append(module)
        for each in [*module.parameters(), *module.buffers()]:
            each.fill_(len(called) if each.dim() > 1 else 1)

    module = on_meta(Tied)
    state = torch.get_rng_state()
    with Trainer(
        module, strategy_of(3), batch=batch_of(0), option=Option(initial=Initializer(fill))
    ) as trainer:
        found = trainer.full_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    layer = module.get_submodule("layers.1")
    place = called.index(layer)
    assert {*called[place - 3 : place]} == {*layer.children()}
    assert found["layers.1.rise.weight"].eq(place + 1).all()


WIDTH, LAYERS = 64, 12


@pytest.mark.matrix(9)
@pytest.mark.parametrize("how", ["made", "checkpoint", "safetensors"])
def test_a_rank_begins_with_its_part_and_one_unit(
    pool_of: SharedPools, how: str, tmp_path: Path
) -> None:
    initial: InitialValues = Initializer()
    if how == "checkpoint":
        initial = saved(Tied(WIDTH, LAYERS), tmp_path)
    elif how == "safetensors":
        write_safetensors(tmp_path / "a.safetensors", dict(Tied(WIDTH, LAYERS).state_dict()))
        initial = tmp_path
    ranks = pool_of(4)
    for held in ranks.run(bytes_at_start, WIDTH, LAYERS, 3, initial):
        room = held.largest_unit // 4  # activations, buffers, and rows of probes
        assert held.state < held.whole / 3
        assert held.peak <= held.state + held.largest_unit + room
        assert held.state + held.largest_unit + room < held.whole / 2


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_with_values_is_there_once_beside_the_state(stage: int) -> None:
    module = Tied(WIDTH, LAYERS)
    whole = sum(each.numel() * each.element_size() for each in module.parameters())
    unit = sum(each.numel() * each.element_size() for each in module.layers[0].parameters())
    with LiveStorages() as live:
        for each in module.parameters():
            live.see(each)
        trainer = Trainer(module, strategy_of(stage), batch=batch_of(0))
        assert live.peak <= whole + 3 * whole + 2 * unit
        for _ in range(2):
            trainer.step(batch_of(0))
        live.peak = 0
        trainer.step(batch_of(0))
        assert live.peak < 4 * whole + 8 * unit  # gradients of two layers, no second module
        live.peak = 0
        trainer.finish()
        # Moments are gone before the module has its parameters.
        assert live.peak <= max(3 * whole, whole + whole + 2 * unit)
    assert not any(each.isnan().any() for each in module.parameters())


def test_units_are_described_without_values_as_with_them() -> None:
    assert describe(on_meta_but_buffers(), None, batch_of(0)) == describe(Tied(), None, batch_of(0))
    names = ["table", *(f"layers.{number}" for number in range(3)), "spread", "head"]
    reads = {"head": ["spread"]}
    chosen = describe(in_loss(on_meta_but_buffers()), names, batch_of(0), reads=reads)
    assert chosen == describe(in_loss(Tied()), names, batch_of(0), reads=reads)


def in_loss(module: nn.Module) -> nn.Module:
    """The head as a unit that returns one number."""
    module.get_submodule("head").register_forward_hook(lambda *found: found[2].square().mean())
    return module


def on_meta_but_buffers() -> nn.Module:
    """As `init_empty_weights` of accelerate leaves a module."""
    module = on_meta(Tied)
    for path, each in Tied().named_buffers():
        owner, _, name = path.rpartition(".")
        module.get_submodule(owner).register_buffer(name, each)
    return module


@pytest.mark.one_commit_in(6)
def test_a_module_on_meta_stays_there_and_can_be_saved(tmp_path: Path) -> None:
    module = on_meta(Tied)
    option = Option(initial=Initializer())
    with Trainer(module, strategy_of(2), batch=batch_of(0), option=option) as trainer:
        trainer.step(batch_of(0))
        trained = trainer.full_parameters()
        trainer.save(tmp_path)
    assert all(each.is_meta for each in module.parameters())
    again = on_meta(Tied)
    with Trainer(
        again, strategy_of(3), batch=batch_of(0), option=Option(initial=tmp_path)
    ) as trainer:
        assert equal(trainer.full_parameters(), trained)


class NoReset(nn.Module):
    """Has a parameter and nothing that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.scale * batch).sum()


class Forgets(NoReset):
    """Makes half of a parameter."""

    def reset_parameters(self) -> None:
        self.scale[:2] = 1.0


class Fails(NoReset):
    """Makes a parameter of one that another module has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        self.scale.copy_(self.inner.bias)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(batch))


class Spoils(Fails):
    """Makes what another module has, past the view of autograd."""

    def reset_parameters(self) -> None:
        self.scale.data.fill_(1.0)
        self.inner.weight.data.zero_()


class Computed(NoReset):
    """Has a buffer that its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(4).float(), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch * self.table)


class Resets(Computed):
    """Makes its parameter, and not its buffer."""

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)


@pytest.mark.parametrize(
    ("make", "initial", "line"),
    [
        (NoReset, None, "module: its parameters have no values, and `initial` is not given: say"),
        (
            NoReset,
            Initializer(),
            "parameter scale: it has no values, and NoReset has no reset_parameters; say initial="
            "Initializer(call), which is called with each module",
        ),
        (
            Forgets,
            Initializer(),
            "parameter scale: what initializes it leaves it without a value",
        ),
        (Fails, Initializer(), "module : what initializes it reads or writes parameter inner.bias"),
        (
            Spoils,
            Initializer(),
            "module : what initializes it reads or writes parameter inner.weight",
        ),
        (Computed, None, 'buffer table: it has no values (device "meta"); build the module with'),
        (Computed, Initializer(), "buffer table: it has no values, and Computed has no reset_p"),
        (Resets, Initializer(), "buffer table: what initializes Resets leaves it without a value;"),
        (NoReset, "nowhere", "checkpoint nowhere: no complete checkpoint is there"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    make: Callable[[], nn.Module], initial: InitialValues | None, line: str
) -> None:
    module = on_meta(make)
    batch = torch.ones(4)
    with pytest.raises((RefusedError, CheckpointError)) as caught:
        Trainer(module, strategy_of(3), batch=batch, option=Option(initial=initial))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert all(each.is_meta for each in module.parameters())

    def ones(each: nn.Module) -> None:
        for value in [*each.parameters(recurse=False), *each.buffers(recurse=False)]:
            value.fill_(1.0)

    option = Option(initial=Initializer(ones))
    with Trainer(module, strategy_of(3), batch=batch, option=option) as trainer:
        assert trainer.step(batch).isfinite()


def test_a_folder_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    def refused() -> str:
        option = Option(initial=tmp_path)
        with pytest.raises(CheckpointError) as caught:
            Trainer(on_meta(Tied), strategy_of(3), batch=batch_of(0), option=option)
        return str(caught.value).removeprefix(f"checkpoint {tmp_path}")

    values = dict(Tied().state_dict())
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {**values, "layers.0.rise.bias": torch.zeros(3)})
    assert refused() == ": it is of another model: layers.0.rise.bias is 3 there, 16 here"
    write_safetensors(path, {name: each for name, each in values.items() if "fall.w" not in name})
    assert refused() == ": it has no parameter layers.0.fall.weight"
    write_safetensors(path, values)
    whole = path.read_bytes()
    for broken in (b"", whole[:7], whole[:50], whole[:-1], b"\xff" * 8 + whole[8:]):
        path.write_bytes(broken)
        line = refused()
        assert line.startswith("/a.safetensors: cannot be read: ")
        assert "\n" not in line


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    values = {name: each.bfloat16() for name, each in Layer(8).state_dict().items()}
    package.save_file(values, tmp_path / "model.safetensors")
    stored = StoredValues(tmp_path, on_meta(lambda: Layer(8)))
    assert equal({name: stored(name) for name in values}, values)


def test_a_unit_that_was_made_is_freed_when_training_begins() -> None:
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def fill(module: nn.Module) -> None:
        for each in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            each.fill_(1)
            kept.append(weakref.ref(each.untyped_storage()))

    option = Option(initial=Initializer(fill))
    trainer = Trainer(on_meta(Tied), strategy_of(3), batch=batch_of(0), option=option)
    buffers = {each.untyped_storage().data_ptr() for each in trainer.run.module.buffers()}
    left = [storage for each in kept if (storage := each()) is not None]
    assert {each.data_ptr() for each in left} <= buffers
    trainer.finish()
