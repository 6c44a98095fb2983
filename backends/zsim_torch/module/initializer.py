"""Initialize a module on "meta" with its own modules, one unit at a time, as FSDP2 defers it.

A unit gets memory, its modules fill it, this rank's shard is copied, and the rest is freed when the
next unit is initialized. Every unit starts with its own generator, so that values depend neither on
ranks, strategy nor on the order of units.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from zsim.backend.backend import RefusedError
from zsim_torch.module.absent import Absence, AbsentParameterError

RESET: Final = "reset_parameters"


@dataclass(frozen=True, slots=True)
class Initializer:
    """A description of how to initialize a module, for `Option(initial=...)`.

    Attributes:
        call: called with each module of a unit, inner ones first; fills its parameters and buffers,
            like `_init_weights` of a Hugging Face model. By default it calls the module's
            `reset_parameters`.
        seed: seed of each unit's generator, the same on every rank.
        stored: path of a checkpoint, or of a file or folder of safetensors, with all parameters.
            Missing buffers are initialized, or keep their values if they have any.
        ignore: `fnmatch` patterns of names in `stored` that the module does not have; other unknown
            names raise an error.
    """

    call: Callable[[nn.Module], object] | None = None
    seed: int = 0
    stored: str | PathLike[str] | None = None
    ignore: Sequence[str] = ()


class _Maker(NamedTuple):
    """Modules that are allocated and filled together, inner ones first."""

    path: str
    modules: tuple[nn.Module, ...]


class MadeValues:
    """Initial values of parameters of `module` by name, computed on demand, one unit at a time.

    `units` are submodules that are initialized as one. A parameter outside of them is initialized
    by the module that holds it, alone; a tied parameter by the first module that holds it.
    """

    def __init__(self, module: nn.Module, units: Iterable[nn.Module], how: Initializer) -> None:
        """Check that a module can initialize each parameter.

        Raises:
            RefusedError: no module can initialize one of them.
        """
        self._how = how
        self._names = {id(each): name for name, each in module.named_parameters()}
        self._makers: dict[str, _Maker] = {}
        self._made: tuple[_Maker, dict[int, Tensor]] | None = None
        self._ids = {name: number for number, name in self._names.items()}
        wholes = {id(unit) for unit in units} - {id(module)}
        unit: _Maker | None = None
        for path, each in module.named_modules():
            if unit is None or not path.startswith(f"{unit.path}."):
                unit = _Maker(path, tuple(_inner_first(each))) if id(each) in wholes else None
            for parameter in each.parameters(recurse=False):
                name = self._names[id(parameter)]
                maker = self._makers.setdefault(name, unit or _Maker(path, (each,)))
                if how.call is None and not any(hasattr(one, RESET) for one in maker.modules):
                    raise _no_initializer(f"parameter {name}", each)

    def __call__(self, name: str) -> Tensor:
        """Return the value of a parameter.

        Raises:
            RefusedError: it cannot be initialized.
        """
        maker = self._makers[name]
        if self._made is None or self._made[0] is not maker:
            self._made = None
            self._made = (maker, _make(maker, self._how))
        found = self._made[1][self._ids[name]].detach()
        if _has_unwritten(found):
            raise RefusedError(f"parameter {name}: what initializes it leaves it without a value")
        return found

    def forget(self) -> None:
        """Free the last unit."""
        self._made = None


def fill_buffers(module: nn.Module, how: Initializer) -> None:
    """Initialize buffers on "meta" by the modules that hold them.

    Raises:
        RefusedError: a buffer still has no value; the message names it.
    """
    for path, each in module.named_modules():
        absent = {key: one for key, one in each.named_buffers(recurse=False) if one.is_meta}
        if not absent:
            continue
        names = {key: f"{path}.{key}" if path else key for key in absent}
        if how.call is None and not hasattr(each, RESET):
            raise _no_initializer(f"buffer {next(iter(names.values()))}", each)
        with Absence(module):
            made = _make(_Maker(path, (each,)), how)
        for key, one in absent.items():
            if _has_unwritten(made[id(one)]):
                raise RefusedError(
                    f"buffer {names[key]}: what initializes {type(each).__name__} leaves it "
                    "without a value; build the module with its buffers in memory"
                )
            put_buffer(module, one, made[id(one)])


def put_buffer(module: nn.Module, buffer: Tensor, value: Tensor) -> None:
    """Replace `buffer` by `value` in every module that has it."""
    for each in module.modules():
        for key, one in each.named_buffers(recurse=False, remove_duplicate=False):
            if one is buffer:
                each.register_buffer(key, value, key not in _not_persistent(each))


def _not_persistent(module: nn.Module) -> set[str]:
    found: set[str] = vars(module)["_non_persistent_buffers_set"]
    return found


def _make(maker: _Maker, how: Initializer) -> dict[int, Tensor]:
    """Initialize modules and return their parameters and buffers by the ids of the originals.

    Raises:
        RefusedError: they need values of other units, or fail.
    """
    slots = [
        (table, key, each)
        for module in maker.modules
        for table in (vars(module)["_parameters"], vars(module)["_buffers"])
        for key, each in table.items()
        if each is not None
    ]
    rooms = {id(each): _room(each) for _, _, each in slots}
    try:
        for table, key, each in slots:
            table[key] = rooms[id(each)]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(zlib.crc32(f"{how.seed} {maker.path}".encode()))
            for module in maker.modules:
                _initialize(module, how)
        made = {id(each): (table[key], each.shape) for table, key, each in reversed(slots)}
    except AbsentParameterError as error:
        raise RefusedError(
            f"module {maker.path}: what initializes it reads or writes {error.what}, which is made "
            "with another unit"
        ) from error
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RefusedError(f"module {maker.path}: what initializes it fails: {line}") from error
    finally:
        for table, key, each in slots:
            table[key] = each
    for value, shape in made.values():
        if value.shape != shape or value.is_meta:
            raise RefusedError(
                f"module {maker.path}: what initializes it makes {tuple(value.shape)} of a "
                f"parameter or buffer of {tuple(shape)}"
            )
    return {number: value for number, (value, _) in made.items()}


def _initialize(module: nn.Module, how: Initializer) -> None:
    if how.call is not None:
        how.call(module)
    elif hasattr(module, RESET):
        getattr(module, RESET)()


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for each in module.children():
        yield from _inner_first(each)
    yield module


def _room(tensor: Tensor) -> Tensor:
    """Return memory for a parameter or buffer: filled with NaN, or a copy of its values."""
    if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
        return tensor.clone()
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.dtype is not torch.bool:
        made.fill_(_no_value(tensor.dtype))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _no_value(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _has_unwritten(tensor: Tensor) -> bool:
    """Return True if an element was not written; True for every non-empty boolean tensor."""
    if tensor.dtype is torch.bool:
        return tensor.numel() > 0
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == _no_value(tensor.dtype)).any())


def _no_initializer(what: str, module: nn.Module) -> RefusedError:
    return RefusedError(
        f"{what}: it has no values, and {type(module).__name__} has no {RESET}; say "
        "initial=Initializer(call), which is called with each module"
    )
