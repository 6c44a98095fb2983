"""Replace parts of torch for a recorded script, and restore them afterwards."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import functools
import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zsim_record.record.device_guard import device_guard
from zsim_record.record.device_module import DEVICE_MODULE
from zsim_record.record.pretended_factories import factories_replaced
from zsim_record.record.pretended_streams import (
    DEVICE_TYPE,
    DeviceStreams,
    PretendedEvent,
    PretendedStream,
    RecordedEngine,
)
from zsim_record.record.recorded_collectives import CollectiveRecorder
from zsim_record.record.recorded_future import futures_followed
from zsim_record.record.tape import TORCH_FOLDER, Tape

ATTENTION = "scaled_dot_product_attention"
BELOW_THE_DISPATCHER = frozenset(
    {"triton", "transformer_engine", "flash_attn", "xformers", "apex", "bitsandbytes"}
)
"""Libraries that launch kernels themselves."""


@functools.cache
def register_device() -> None:
    """Register the pretended device with torch, once per process."""
    _setup_privateuseone_for_python_backend(
        DEVICE_TYPE, backend_module=DEVICE_MODULE, device_guard=device_guard()
    )
    dist.Backend.backend_capability["fake"].append(DEVICE_TYPE)
    dist.Backend.default_device_backend_map[DEVICE_TYPE] = "fake"


def replaced(tape: Tape, streams: DeviceStreams, collectives: CollectiveRecorder) -> ExitStack:
    """Replace functions of torch that need a real device, until the result is closed."""
    stack = ExitStack()
    for each in (
        _memory(tape, streams),
        _streams(streams),
        _data_setter(),
        factories_replaced(),
        futures_followed(),
        patch.object(functional, ATTENTION, _fused_attention(getattr(functional, ATTENTION))),
        _groups(tape),
        _objects(collectives),
        _paired_objects(collectives),
        _refusals(tape),
    ):
        stack.enter_context(each)
    return stack


def _fused_attention(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap attention to run as one kernel, as on a GPU, if one supports its arguments.

    torch has fused kernels for known devices in C++, and uses matrix products and a softmax for
    others.
    """

    @functools.wraps(plain)
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
    ) -> torch.Tensor:
        aten = torch.ops.aten
        is_half = query.dtype in {torch.bfloat16, torch.float16}
        is_plain = (
            query.device.type != DEVICE_TYPE
            or query.dim() != 4
            or attn_mask is not None
            or (not is_half and (enable_gqa or query.dtype is not torch.float32))
        )
        if is_plain:
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if is_half:
            call = aten._scaled_dot_product_flash_attention
            results = call(query, key, value, dropout_p, is_causal, scale=scale)
        else:
            call = aten._scaled_dot_product_efficient_attention
            saves = torch.is_grad_enabled()
            results = call(query, key, value, None, saves, dropout_p, is_causal, scale=scale)
        attended: torch.Tensor = results[0]
        return attended

    return attend


@contextmanager
def _memory(tape: Tape, streams: DeviceStreams) -> Generator[None]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> object:
        if storage.nbytes() != size:
            resize(storage, size)
            tape.resized(storage, streams.current.timeline)
        return storage

    def record_stream(tensor: torch.Tensor, stream: PretendedStream) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        block = tape.block(local, streams.current.timeline)
        if block is not None:
            tape.contract.record_stream(block, stream.timeline)

    addresses: dict[int, int] = {}

    def address_of(storage: torch.UntypedStorage) -> int:
        """Return an address that is unique per storage; accesses through it are not recorded."""
        return addresses.setdefault(storage._cdata, (len(addresses) + 1) << 40)

    def data_ptr(tensor: torch.Tensor) -> int:
        return (
            address_of(tensor.untyped_storage())
            + int(tensor.storage_offset()) * tensor.element_size()
        )

    with (
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(torch.Tensor, "record_stream", record_stream),
        patch.object(torch.Tensor, "data_ptr", data_ptr),
        patch.object(torch.UntypedStorage, "data_ptr", address_of),
    ):
        yield


@contextmanager
def _streams(streams: DeviceStreams) -> Generator[None]:
    accelerator = torch.accelerator
    engine = RecordedEngine(vars(torch.autograd.Variable)["_execution_engine"], streams)
    with (
        patch.object(torch, "Stream", PretendedStream),
        patch.object(torch, "Event", PretendedEvent),
        patch.object(torch.autograd.Variable, "_execution_engine", engine),
        patch.object(accelerator, "current_stream", DEVICE_MODULE.current_stream),
        patch.object(accelerator, "set_stream", DEVICE_MODULE.set_stream),
        patch.object(accelerator, "synchronize", DEVICE_MODULE.synchronize),
        patch.object(accelerator, "device_count", DEVICE_MODULE.device_count),
        patch.object(accelerator, "empty_cache", DEVICE_MODULE.empty_cache),
    ):
        yield


@contextmanager
def _data_setter() -> Generator[None]:
    """Return a context in which `tensor.data = other` works across devices, as with CPU and CUDA.

    Fake tensors of two devices have different types in torch, which refuses the assignment. Here
    the two tensors swap their contents instead.
    """
    data: Any = torch.Tensor.data

    def set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if getattr(tensor, "fake_device", None) == getattr(other, "fake_device", None):
            data.__set__(tensor, other)
            return
        become(tensor, other)

    moved = property(data.__get__, set_data)

    def _apply(
        module: torch.nn.Module,
        function: Callable[..., Any],
        recurse: bool = True,  # noqa: FBT001, FBT002  (torch's own signature)
    ) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                _apply(child, function)
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            with torch.no_grad():
                parameter.data = function(parameter.detach())
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.data = function(parameter.grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    with (
        patch.object(torch.Tensor, "data", moved),
        patch.object(torch.nn.Module, "_apply", _apply),
    ):
        yield


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give `tensor` the memory, device and class of `other`."""
    requires = tensor.requires_grad
    fresh = other.detach().requires_grad_(requires)
    is_parameter = getattr(tensor, "_is_param", False)
    torch._C._swap_tensor_impl(tensor, fresh)
    if isinstance(fresh, FakeTensor) and not isinstance(tensor, FakeTensor):
        cast("Any", tensor).__class__ = FakeTensor  # integers on the CPU are real until they move
    kept = {name: value for name, value in tensor.__dict__.items() if name == "_is_param"}
    attributes: Any = tensor.__dict__
    attributes.clear()
    attributes.update(fresh.__dict__, **kept)
    if is_parameter:
        tensor._is_param = True


@contextmanager
def _groups(tape: Tape) -> Generator[None]:
    """Return a context in which process groups use the fake backend with the recorded world."""
    start = distributed_c10d.init_process_group
    create = distributed_c10d.new_group

    def init_process_group(backend: object = None, *_: object, **given: Any) -> None:
        del backend
        kept = {name: given[name] for name in ("timeout", "group_name") if name in given}
        start("fake", rank=tape.rank, world_size=tape.world, store=FakeStore(), **kept)

    def new_group(*args: Any, **given: Any) -> object:
        given.pop("backend", None)
        arguments = list(args)
        if len(arguments) > 2:
            arguments[2] = None
        return create(*arguments, **given)

    with ExitStack() as stack:
        for module in (dist, distributed_c10d):
            stack.enter_context(patch.object(module, "init_process_group", init_process_group))
            stack.enter_context(patch.object(module, "new_group", new_group))
        # DDP compares shapes across ranks, which do not exist here; recorded ranks are compared
        # later.
        stack.enter_context(patch.object(dist, "_verify_params_across_processes", _do_nothing))
        yield


def _do_nothing(*_: object, **__: object) -> None:
    """Do nothing."""


@contextmanager
def _objects(collectives: CollectiveRecorder) -> Generator[None]:
    """Return a context in which all ranks contribute this rank's objects to collectives."""

    def note(kind: str, group: dist.ProcessGroup | None) -> int:
        found = group or dist.group.WORLD
        assert found is not None
        collectives.note_objects(kind, found)
        return found.size()

    def all_gather_object(
        object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None
    ) -> None:
        object_list[:] = [obj] * note("all_gather_object", group)

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        group_dst: int | None = None,
    ) -> None:
        del dst, group_dst
        size = note("gather_object", group)
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * size

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        del object_list, src, device, group_src
        note("broadcast_object_list", group)

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        group_src: int | None = None,
    ) -> None:
        del src, group_src
        size = note("scatter_object_list", group)
        if scatter_object_input_list:
            own = dist.get_rank(group) % size
            scatter_object_output_list[0] = scatter_object_input_list[own]

    with ExitStack() as stack:
        for function in (
            all_gather_object,
            gather_object,
            broadcast_object_list,
            scatter_object_list,
        ):
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, function.__name__, function))
        yield


@contextmanager
def _paired_objects(collectives: CollectiveRecorder) -> Generator[None]:
    """Record sent objects, and refuse to receive objects of another rank."""

    def send_object_list(*_: object, group: dist.ProcessGroup | None = None, **__: object) -> None:
        found = group or dist.group.WORLD
        assert found is not None
        collectives.note_objects("send_object_list", found)

    def recv_object_list(*_: object, **__: object) -> int:
        raise collectives.refuse("recv_object_list(): the objects of another rank are not known")

    with ExitStack() as stack:
        for function in (send_object_list, recv_object_list):
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, function.__name__, function))
        yield


class _KernelLibraries(MetaPathFinder):
    """Refuses imports of libraries whose kernels torch's dispatcher does not see."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse `name` if the script imports it; imports by torch are allowed."""
        del path, target
        if name.partition(".")[0] not in BELOW_THE_DISPATCHER or _torch_imports():
            return None
        error = self._tape.refuse(f"import {name}: its kernels are not seen")
        raise ModuleNotFoundError(str(error), name=name)


def _torch_imports() -> bool:
    """Return True if the current import statement is in torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TORCH_FOLDER)


@contextmanager
def _refusals(tape: Tape) -> Generator[None]:
    """Return a context that reports kernels below the dispatcher and replaced functions."""

    def compile_(model: Any = None, **_: object) -> Any:
        tape.invent("torch.compile() = the model as it is: it is recorded in eager mode")
        return model if model is not None else (lambda function: function)

    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in BELOW_THE_DISPATCHER or _torch_imports():
            return find(name, package)
        tape.invent(f"find_spec({name!r}) = None")
        return None

    finder = _KernelLibraries(tape)
    sys.meta_path.insert(0, finder)
    try:
        with (
            patch.object(torch, "compile", compile_),
            patch.object(importlib.util, "find_spec", find_spec),
        ):
            yield
    finally:
        sys.meta_path.remove(finder)
