"""Build the `Model` of any module without data, by running it on "meta"."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zsim.dtype import DType
from zsim.model.kernel import Kernel
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.strategy.precision import Precision
from zsim_torch.ground.torch_dtype import DTYPE_OF_TORCH, TORCH_DTYPE
from zsim_torch.module.capture import (
    END,
    START,
    Capture,
    CapturedStorage,
    LiveBytes,
    MetaCall,
    UnitWindow,
    watched,
)
from zsim_torch.module.description import BatchSize, batch_value
from zsim_torch.module.module_state import unchanged
from zsim_torch.module.unit import ModuleUnitError


def model_from(
    module: nn.Module,
    example_inputs: Sequence[object],
    *,
    units: Sequence[str] | None = None,
    name: str | None = None,
    precision: Precision = Precision.FP32,
    size: BatchSize | None = None,
) -> Model:
    """Return the `Model` of `module(*example_inputs)`: parameters, saved bytes and cost of units.

    The module is run twice, forward and backward, on "meta": no values are computed and the module
    is not changed. The loss is the output if it is one number, else the mean of its first tensor.
    Parameters and float inputs are taken to be in the data type of `precision`. `units` are paths
    of disjoint submodules; by default the members of the largest list of equal blocks, or else the
    children.

    Operators before the first unit form a unit "start" and those after the last a unit "end", if
    they read parameters; operators between two units belong to the former. Full checkpointing
    recomputes neither start nor end. A unit that is called again becomes a new unit with the same
    parameters. `size` is for reports; by default sequences are the first dimension of the first
    input, and tokens its elements if they are integers.

    Attention and RMSNorm are taken to run as one kernel, as on a GPU; causal masking is recognized
    only there. Tensors that `torch.utils.checkpoint` saves inside a unit are not recognized: use
    the strategy's checkpointing instead.

    Raises:
        UnitError: the module cannot run without data, a unit is missing or lies in another, or a
            parameter is not trained.
    """
    chosen = _units(module, units)
    dtype = TORCH_DTYPE[precision.compute]
    parameters = {key: _parameter(key, each, dtype) for key, each in module.named_parameters()}
    buffers = {key: _on_meta(each, dtype) for key, each in module.named_buffers()}
    inputs = tuple(
        tree_map(lambda each: _on_meta(each, dtype) if isinstance(each, Tensor) else each, given)
        for given in example_inputs
    )
    given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    capture = Capture(parameters, tuple(buffers.values()))
    capture.batch(given)
    run = MetaCall(parameters | buffers, tuple(parameters.values()), inputs)
    held = LiveBytes([*run.values.values(), *given])
    loss = _watched(module, chosen, run, capture=capture, held=held)
    windows = _merged(capture, held)
    _adopt(windows, parameters)
    described = _described(windows, capture.storages, parameters, loss)
    size = size or _size(inputs)
    return Model(
        name=name or type(module).__name__,
        units=described,
        batch=batch_value(inputs),
        micro_batch_size=size.sequences,
        tokens=size.tokens,
        forward_flops=_products([kernel for each in windows for kernel in each.forward]),
        backward_flops=_products([kernel for each in windows for kernel in each.backward]),
        attention_flops=3 * sum(k.flops for each in windows for k in each.forward if k.causal),
        masked_flops=3 * sum(k.flops - k.causal_flops for each in windows for k in each.forward),
    )


def _watched(
    module: nn.Module,
    units: dict[str, nn.Module],
    run: MetaCall,
    *,
    capture: Capture,
    held: LiveBytes,
) -> Tensor:
    """Run twice and return the loss; a separate function, so that no local keeps tensors alive."""
    try:
        with unchanged(module):
            loss = watched(capture, module, units, run)
            watched(held, module, units, run)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModuleUnitError(f"module: it does not run without data: {line}") from error
    return loss


def _units(module: nn.Module, paths: Sequence[str] | None) -> dict[str, nn.Module]:
    known = dict(module.named_modules())
    if paths is None:
        return _blocks(module)
    for path in paths:
        if path not in known or not path:
            raise ModuleUnitError(f"unit {path}: the module has no such submodule")
    for one, other in pairwise(sorted(paths)):
        if one == other or other.startswith(f"{one}."):
            raise ModuleUnitError(f"unit {other}: it lies in unit {one}")
    return {path: known[path] for path in paths}


def _blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return members of the largest list of equal modules, else the children, else the module."""
    best: dict[str, nn.Module] = {}
    largest = 0
    for path, each in module.named_modules():
        members = list(each.named_children())
        if not isinstance(each, nn.ModuleList | nn.Sequential):
            continue
        count = sum(parameter.numel() for parameter in each.parameters())
        if len(members) > 1 and len({type(one) for _, one in members}) == 1 and count > largest:
            best = {f"{path}.{key}".lstrip("."): one for key, one in members}
            largest = count
    return best or dict(module.named_children()) or {"module": module}


def _parameter(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if not parameter.requires_grad:
        raise ModuleUnitError(
            f"parameter {name}: requires_grad is False, every parameter is trained"
        )
    return torch.empty(parameter.shape, dtype=dtype, device="meta", requires_grad=True)


def _on_meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    chosen = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=chosen, device="meta")


def _merged(capture: Capture, held: LiveBytes) -> list[UnitWindow]:
    """Merge the operators after a unit into the unit's window.

    The windows before the first unit and after the last stay separate if they have parameters.
    """
    for window, levels in zip(capture.windows, held.windows, strict=True):
        window.forward_levels = levels.forward_levels
        window.backward_levels = levels.backward_levels
    place: list[int] = []
    found: list[UnitWindow] = []
    last = len(capture.windows) - 1
    for index, window in enumerate(capture.windows):
        between = window.name == END and index != last
        if between or (index == last and found and not window.parameters):
            place.append(len(found) - 1)
            _absorb(found[-1], window)
            continue
        calls = sum(each.name.split("@")[0] == window.name for each in found)
        window.name = f"{window.name}@{calls + 1}" if calls else window.name
        place.append(len(found))
        found.append(window)
    if len(found) > 1 and not found[0].parameters:
        _absorb(found[1], found[0])
        del found[0]
        place = [max(each - 1, 0) for each in place]
    for storage in capture.storages.values():
        if storage.window >= 0:
            storage.window = place[storage.window]
    return found


def _absorb(window: UnitWindow, other: UnitWindow) -> None:
    window.parameters |= other.parameters
    window.reads |= other.reads
    window.saves |= other.saves
    window.forward += other.forward
    window.backward += other.backward
    window.forward_levels += other.forward_levels
    window.backward_levels = other.backward_levels + window.backward_levels


def _adopt(windows: Sequence[UnitWindow], parameters: Mapping[str, Tensor]) -> None:
    """Assign a parameter that nothing reads to the unit that contains it, or to the first."""
    used = {name for window in windows for name in window.parameters}
    for name in parameters:
        if name not in used:
            owners = [window for window in windows if name.startswith(f"{window.name}.")]
            (owners or list(windows))[0].parameters[name] = None


def _described(
    windows: Sequence[UnitWindow],
    storages: Mapping[int, CapturedStorage],
    parameters: Mapping[str, Tensor],
    loss: Tensor,
) -> tuple[Unit, ...]:
    """Return units, and the values between them: storages that a later unit reads."""
    names = _crossing(windows, storages)
    units: list[Unit] = []
    for index, window in enumerate(windows):
        outputs = [
            _value(names[number], storages[number])
            for number in names
            if storages[number].window == index
        ]
        if index == len(windows) - 1:
            dtype = DTYPE_OF_TORCH[loss.dtype]
            outputs.append(Value(name=f"{window.name}/loss", elements=1, dtype=dtype))
        outer = [each for each in window.reads if storages[each].window < index]
        inputs = dict.fromkeys(names.get(each, BATCH) for each in outer)
        kept = [each for each in window.saves if storages[each].window == index]
        own = tuple(name for name in parameters if name in window.parameters)
        room = sum(storages[each].size_bytes for each in kept)
        made = sum(value.size_bytes for value in outputs)
        slopes = sum(
            storages[each].size_bytes
            for each in dict.fromkeys((*outer, *window.saves))
            if storages[each].window < index and storages[each].differentiable
        )
        own_bytes = sum(parameters[n].numel() * parameters[n].element_size() for n in own)
        segment = Segment(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            parameters=own,
            saved_bytes=room,
            saves_input=len(kept) < len(window.saves),
            forward_workspace_bytes=_beyond(window.forward_levels, room + made),
            backward_workspace_bytes=_beyond(window.backward_levels, slopes + own_bytes),
            forward=tuple(window.forward),
            backward=tuple(window.backward),
        )
        module, again, _ = window.name.partition("@")
        shared = any(each.name == module and each.segments[0].parameters == own for each in units)
        units.append(
            Unit(
                name=window.name,
                module=module if again and shared else "",
                parameters=tuple(Parameter(name=n, shape=tuple(parameters[n].shape)) for n in own),
                segments=(segment,),
                checkpoint=window.name not in (START, END),
            )
        )
    return tuple(units)


def _beyond(levels: Sequence[int], room: int) -> int:
    """Return the peak of live bytes beyond those at the start and `room` more bytes."""
    return max(0, max(levels) - levels[0] - room) if levels else 0


def _crossing(
    windows: Sequence[UnitWindow], storages: Mapping[int, CapturedStorage]
) -> dict[int, str]:
    """Return names of storages that a later window reads, in the order of creation."""
    crossing = {
        number
        for index, window in enumerate(windows)
        for number in (*window.reads, *window.saves)
        if 0 <= storages[number].window < index
    }
    names: dict[int, str] = {}
    counts: dict[int, int] = {}
    for number, storage in storages.items():
        if number in crossing:
            count = counts.get(storage.window, 0)
            counts[storage.window] = count + 1
            names[number] = f"{windows[storage.window].name}/output{count}"
    return names


def _value(name: str, storage: CapturedStorage) -> Value:
    dtype = DTYPE_OF_TORCH.get(storage.dtype, DType.INT8)
    return Value(
        name=name,
        elements=storage.size_bytes // dtype.size_bytes,
        dtype=dtype,
        requires_gradient=storage.differentiable,
    )


def _products(kernels: Sequence[Kernel]) -> int:
    return sum(kernel.flops for kernel in kernels if kernel.kind.multiplies_matrices)


def _size(inputs: Sequence[object]) -> BatchSize:
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dim()]
    if not tensors:
        return BatchSize()
    first = tensors[0]
    whole = not first.is_floating_point()
    return BatchSize(
        sequences=max(first.shape[0], 1), tokens=max(first.numel() if whole else first.shape[0], 1)
    )
