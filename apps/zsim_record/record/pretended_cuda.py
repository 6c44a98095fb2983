"""Make `torch.cuda` work without CUDA: "cuda" refers to the pretended device."""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

from zsim_record.record.device_module import DEVICE_MODULE, MEMORY_BYTES
from zsim_record.record.pretended_streams import DEVICE_TYPE
from zsim_record.record.tape import Tape

CUDA = "cuda"
_REFUSED_CLASSES = ("CUDAGraph", "graph", "MemPool")
"""Classes of `torch.cuda` whose kernels a recording does not see, so creating one is refused."""
_REFUSED_FUNCTIONS = ("make_graphed_callables", "use_mem_pool")
_LEGACY_TYPES = {
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""Classes of `torch.cuda` that create tensors of one data type."""
_MARKS = ("mark", "range_push", "range_pop", "range_start", "range_end")
"""Functions of `torch.cuda.nvtx`, which mark ranges for a profiler."""
_REAL_DEVICE = torch.device
_REAL_GENERATOR = torch.Generator


class _DeviceKind(type):
    """Lets `isinstance(x, torch.device)` hold for real devices."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_DEVICE)


class PretendedDevice(metaclass=_DeviceKind):
    """Replaces `torch.device`: a "cuda" device becomes the pretended one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.device:  # type: ignore[misc]
        """Return the named device."""
        return _REAL_DEVICE(*(_mapped(each) for each in args), **kwargs)


class _GeneratorKind(type):
    """Lets `isinstance(x, torch.Generator)` hold for real generators."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_GENERATOR)


class PretendedGenerator(metaclass=_GeneratorKind):
    """Replaces `torch.Generator`: a CPU generator serves "cuda", since no numbers are drawn."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        """Return a generator."""
        given = PretendedDevice(_mapped(device))
        return _REAL_GENERATOR("cpu" if given.type == DEVICE_TYPE else given)


class _LegacyType(type):
    """A class such as `torch.cuda.FloatTensor`: tensors of one data type on the device."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == DEVICE_TYPE
            and instance.dtype is cls.dtype
        )

    def __call__(cls, *given: Any) -> torch.Tensor:
        is_data = len(given) == 1 and not isinstance(given[0], (int, torch.Size))
        if is_data:
            return torch.tensor(given[0], dtype=cls.dtype, device=DEVICE_TYPE)
        return torch.empty(*given, dtype=cls.dtype, device=DEVICE_TYPE)


class CudaNames(TorchFunctionMode):
    """Replaces "cuda" in arguments of torch functions by the pretended device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with the pretended device in place of each "cuda"."""
        del types
        named = {name: _mapped(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE_TYPE, non_blocking=named.get("non_blocking", False))
        return func(*(_mapped(each) for each in args), **named)


def _mapped(value: Any) -> Any:
    if isinstance(value, str) and (value == CUDA or value.startswith(f"{CUDA}:")):
        return value.replace(CUDA, DEVICE_TYPE, 1)
    return value


@contextmanager
def cuda_masked(tape: Tape) -> Generator[None]:
    """Return a context in which `torch.cuda` is the pretended device."""
    cuda = torch.cuda
    with ExitStack() as stack:
        for name in dir(type(DEVICE_MODULE)):
            if not name.startswith("__") and not hasattr(ModuleType, name):
                value = getattr(DEVICE_MODULE, name)
                stack.enter_context(patch.object(cuda, name, value, create=True))
        for name in _REFUSED_CLASSES:
            stack.enter_context(patch.object(cuda, name, _refused_class(tape, name), create=True))
        for name in _REFUSED_FUNCTIONS:
            stack.enter_context(patch.object(cuda, name, _refusing(tape, name), create=True))
        for name, dtype in _LEGACY_TYPES.items():
            made = _LegacyType(name, (), {"dtype": dtype})
            stack.enter_context(patch.object(cuda, name, made, create=True))
        stack.enter_context(patch.object(torch, "Generator", PretendedGenerator))
        properties = SimpleNamespace(
            name=DEVICE_MODULE.get_device_name(),
            major=9,
            minor=0,
            total_memory=MEMORY_BYTES,
            multi_processor_count=132,
        )
        for name in _MARKS:
            stack.enter_context(patch.object(cuda.nvtx, name, lambda *_, **__: 0))
        stack.enter_context(patch.object(cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(patch.object(cuda, "ExternalStream", DEVICE_MODULE.Stream, create=True))
        stack.enter_context(patch.object(torch, "device", PretendedDevice))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", property(_is_on_device)))
        stack.enter_context(CudaNames())
        stack.enter_context(patch.object(torch.nn.Module, "cuda", _module_to_device))
        mesh = device_mesh.DeviceMesh
        stack.enter_context(patch.object(mesh, "__init__", _with_device(mesh.__init__)))
        yield


def _with_device(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor `start` of a mesh to replace "cuda" by the pretended device."""

    @functools.wraps(start)
    def begin(mesh: object, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(mesh, _mapped(device_type), *args, **kwargs)

    return begin


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE_TYPE


def _module_to_device(module: torch.nn.Module, device: object = None) -> torch.nn.Module:
    del device
    return module.to(DEVICE_TYPE)


def _refused_class(tape: Tape, name: str) -> type:
    """Return a class for annotations and `isinstance` that cannot be instantiated."""
    refuse = _refusing(tape, name)
    return type(name, (), {"__new__": lambda *_, **__: refuse(), "__module__": "torch.cuda"})


def _refusing(tape: Tape, name: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise tape.refuse(f"torch.cuda.{name}: what it runs is not seen")

    return refuse
