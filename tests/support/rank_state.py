"""State of a rank's process that jobs may change, and its restoration between jobs.

`Fresh.taken()` notes the state before the first job of a process. `restore` undoes changes of the
environment, folder, signals and warnings, of random generators, of torch's settings and modes, of
attributes and containers of this repository's modules and classes, and of torch's own functions and
hooks; it clears caches and collects garbage. A module that a job imports in its midst is known from
the next job on. `not_undone` names leftovers that only the end of the process removes.
"""

import gc
import os
import random  # noqa: TID251  # its state is what jobs change
import signal
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch

ROOT = Path(__file__).parents[2]
TORCH_C: Any = import_module("torch._C")
"""For settings that torch has no public reader of."""
CACHED = type(lru_cache(repr))
CONTAINERS = (list, dict, set, OrderedDict, defaultdict)
TORCH_MODULES = (
    "torch",
    "torch.autograd",
    "torch.autograd.graph",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.utils.checkpoint",
)
TORCH_CLASSES = (
    torch.Tensor,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.LayerNorm,
    torch.nn.Embedding,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.autograd.Function,
)
MADE_LATE = ("__annotations__", "__abstractmethods__", "__signature__", "__doc__", "_abc_impl")
"""Attributes that Python itself adds to a class when they are first read."""
JOIN_S = 1.0
"""Seconds in which the threads of a job may end after it."""

Owner = type | ModuleType
Container = list[Any] | set[Any] | dict[Any, Any]
Flag = tuple[Callable[[], Any], Callable[[Any], object]]
FLAGS: dict[str, Flag] = {
    "folder": (os.getcwd, os.chdir),
    "path": (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    "warnings": (
        lambda: list(warnings.filters),
        lambda value: warnings.filters.__setitem__(slice(None), value),  # type: ignore[index]  # a list
    ),
    "profile": (sys.getprofile, sys.setprofile),
    "trace": (sys.gettrace, sys.settrace),
    "collector": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "cores": (
        lambda: os.sched_getaffinity(0),
        lambda value: os.sched_setaffinity(0, value),
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "threads of backward": (
        TORCH_C._is_multithreading_enabled,  # torch has no public reader
        TORCH_C._set_multithreading_enabled,
    ),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "precision of products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "warn always": (torch.is_warn_always_enabled, torch.set_warn_always),
}
"""Settings of a process: how to read and to set each."""


@dataclass(slots=True)
class Fresh:
    """The state of a process before its first job."""

    environment: dict[str, str]
    flags: dict[str, Any]
    handlers: dict[signal.Signals, Any]
    generators: tuple[torch.Tensor, Any, Any]
    threads: set[threading.Thread]
    attributes: dict[int, tuple[Owner, dict[str, Any]]] = field(default_factory=dict)
    contents: dict[int, tuple[Container, Container]] = field(default_factory=dict)

    @classmethod
    def taken(cls) -> Self:
        """Return the state of this process now."""
        return cls(
            environment=dict(os.environ),
            flags={name: read() for name, (read, _) in FLAGS.items()},
            handlers={each: signal.getsignal(each) for each in signal.valid_signals()},
            generators=(torch.get_rng_state(), random.getstate(), _numpy_state()),
            threads=set(threading.enumerate()),
        )

    def learn(self) -> None:
        """Note the attributes of modules and classes that were loaded since the last call."""
        for owner in _owners():
            if id(owner) not in self.attributes:
                names = vars(owner)
                self.attributes[id(owner)] = (
                    owner,
                    {name: value for name, value in names.items() if _is_kept(owner, name, value)},
                )
                for name, value in names.items():
                    if type(value) in CONTAINERS and _is_held(owner, name):
                        self.contents.setdefault(id(value), (value, value.copy()))

    def restore(self) -> None:
        """Undo all changes since the state was taken, but for those that `not_undone` names."""
        _leave_modes()
        if os.environ != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        for name, (read, write) in FLAGS.items():
            if read() != self.flags[name]:
                write(self.flags[name])
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        torch.set_flush_denormal(False)
        torch.set_rng_state(self.generators[0])
        random.setstate(self.generators[1])
        _set_numpy_state(self.generators[2])
        for owner, attributes in self.attributes.values():
            _put_back(owner, attributes)
        for container, content in self.contents.values():
            _refill(container, content)
        _clear_caches()
        gc.collect()
        gc.freeze()  # the next collection looks at what the next job leaves

    def not_undone(self) -> list[str]:
        """Return the names of threads and children of a job that go on after it."""
        found: list[str] = []
        for thread in set(threading.enumerate()) - self.threads:
            if not thread.name.startswith("Dummy"):  # a thread of torch, which runs backwards
                thread.join(JOIN_S)
                if thread.is_alive():
                    found.append(f"thread {thread.name}")
        return found + [f"process {child}" for child in _children()]


def _children() -> list[str]:
    """Return the children of all threads; a thread may end while they are read."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "children").read_text().split()
    return found


def _is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and file.startswith(f"{ROOT}/") and "/site-packages/" not in file


def _owners() -> Iterator[Owner]:
    """Yield modules and classes of this repository, then those of torch, whose attributes count."""
    for module in list(sys.modules.values()):
        if module.__name__ != __name__ and _is_ours(module):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == module.__name__:
                    yield value
    yield from (sys.modules[name] for name in TORCH_MODULES if name in sys.modules)
    yield from TORCH_CLASSES


def _is_of_torch(owner: Owner) -> bool:
    name: str = owner.__module__ if isinstance(owner, type) else owner.__name__
    return name.partition(".")[0] == "torch"


def _is_held(owner: Owner, name: str) -> bool:
    """Return True for containers of this repository, and for torch's global hooks."""
    return not name.startswith("__") and (not _is_of_torch(owner) or name.startswith("_global_"))


def _is_kept(owner: Owner, name: str, value: object) -> bool:
    """Return True unless torch or Python changes the attribute itself, between jobs or within."""
    if name in MADE_LATE or name.startswith("__pydantic"):
        return False
    if _is_of_torch(owner):
        return callable(value) or name.startswith("_global_")
    return isinstance(owner, type) or not name.startswith("__")


def _put_back(owner: Owner, attributes: dict[str, Any]) -> None:
    now = vars(owner)
    for name, value in attributes.items():
        if now.get(name, owner) is not value:
            setattr(owner, name, value)
    if _is_of_torch(owner) and not isinstance(owner, type):
        return  # torch makes names as it goes
    for name in set(now) - set(attributes):
        if _is_kept(owner, name, now[name]) and not isinstance(now[name], ModuleType):
            delattr(owner, name)


def _refill(container: Container, content: Container) -> None:
    if _parts(container) == _parts(content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _parts(container: Container) -> list[int]:
    """Return which objects a container has: equal ones may be others."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


def _leave_modes() -> None:
    """Leave modes of dispatch and hooks of saved tensors that a job has entered."""
    while TORCH_C._len_torch_dispatch_stack():  # torch has no public ones
        TORCH_C._pop_torch_dispatch_stack(None)
    while TORCH_C._len_torch_function_stack():
        TORCH_C._pop_torch_function_stack()
    while TORCH_C._autograd._top_saved_tensors_default_hooks(True):
        TORCH_C._autograd._pop_saved_tensors_default_hooks()


def _clear_caches() -> None:
    """Empty what functions of the torch backend, and DTensor, have kept by their arguments."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "zsim_torch":
            for owner in (module, *vars(module).values()):
                if owner is module or (isinstance(owner, type) and owner.__module__ == name):
                    for value in vars(owner).values():
                        if isinstance(value, CACHED):
                            value.cache_clear()
    if "torch.distributed.tensor" in sys.modules:
        TORCH_C._clear_DTensor_sharding_propagator_cache()


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _set_numpy_state(state: object) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)
