"""Data volumes of DeepSpeed without ZeRO: all gradients, all-reduced once a step.

Buckets hold trained parameters in the order of the model; each closes when it exceeds 500
million elements. Norms and the overflow flag are exchanged over the tensor axis only.
"""

from typing import Final

from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.model.model import Model
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.checkpoint_volume import checkpoints
from zsim_runtimes.deepspeed.options import DeepSpeed

BUCKET_ELEMENTS: Final = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE in runtime/engine.py


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and that of numbers over the tensor axis."""
    precision = strategy.train.precision
    found, filled = list[int](), 0
    for each in model.parameters:
        filled += 0 if each.frozen else each.elements
        if filled > BUCKET_ELEMENTS:
            found.append(filled)
            filled = 0
    wire = strategy.options(DeepSpeed).communication_data_type or precision.compute
    numbers = int(precision.has_master or strategy.train.clip_norm is not None)
    numbers += precision is Precision.FP16
    return [
        *all_reduces(
            "data",
            [*found, *([filled] if filled else [])],
            ranks=strategy.parallel.data,
            size_bytes=wire.size_bytes,
        ),
        *all_reduces(
            "tensor",
            [1] * numbers,
            ranks=strategy.parallel.tensor,
            size_bytes=precision.optimizer.size_bytes,
        ),
    ]


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of gradients that are flattened, and copied back."""
    size = strategy.train.precision.compute.size_bytes
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    return CopiedBytes(compute=trained * 4 * size)


def norms(model: Model, strategy: Strategy) -> int:
    """Return 0: every data rank has all gradients, so no norm is reduced over them."""
    del model, strategy
    return 0


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return no bytes: states stay on the device."""
    del model, strategy
    return HostBytes(to_host=0, from_host=0)


VOLUME = DataVolume(
    data=data,
    norms=norms,
    copied=copied,
    host=host,
    checkpoints=checkpoints,
    reduces_overflow=False,
)
