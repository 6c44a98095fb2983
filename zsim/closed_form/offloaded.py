"""Bytes that offloading moves in a step, by link, from model and strategy alone.

Of each parameter that a rank updates: its gradient goes out once and its new value comes back once,
in the compute format (Ren et al. 2021, section 3: 2 + 2 bytes in 16 bits); states in files are read
and written once (Rajbhandari et al. 2021, section 4.1). Shards of parameters that are not on the
device are fetched for every gather over the data axis.
"""

from zsim.closed_form.checkpoint import kept_bytes
from zsim.closed_form.zero_stages import buckets, gathers, kept_back, padded_elements
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.schedule.schedule import FileBytes, HostBytes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy


def host_bytes(model: Model, strategy: Strategy) -> HostBytes:
    """Return what a rank copies to its host in a step, and from there.

    Checkpoints go twice, out and back (Rajbhandari et al. 2020, section 8: Pa+cpu), on to files or
    not.
    """
    kept = checkpoint_bytes(model, strategy)
    out, back = kept.to_host, kept.from_host
    offload, precision = strategy.offload, strategy.train.precision
    if offload.optimizer is not MemoryTier.DEVICE:
        stays = kept_back(model, strategy)
        updated = _updated(model, strategy, but=stays) * precision.compute.size_bytes
        clips = strategy.train.clip_norm is not None
        number = precision.optimizer.size_bytes  # goes over ranks by way of the device
        out += updated + clips * number
        back += updated if offload.parameters is MemoryTier.DEVICE else 0
        part = DType.FP64.size_bytes if stays else number  # added up with the device's
        back += (clips + (precision is Precision.FP16)) * part
    if offload.parameters is not MemoryTier.DEVICE:
        back += _fetched(model, strategy)
    return HostBytes(to_host=out, from_host=back)


def checkpoint_bytes(model: Model, strategy: Strategy) -> HostBytes:
    """Return what checkpoints alone are of that."""
    moves = strategy.checkpoint_tier is not MemoryTier.DEVICE
    kept = _checkpoints(model, strategy) if moves else 0
    return HostBytes(to_host=kept, from_host=kept)


def file_bytes(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return what a rank reads from files in a step, and writes; None if it keeps none."""
    offload, precision = strategy.offload, strategy.train.precision
    if not offload.uses_nvme:
        return None
    read = written = 0
    updated = _updated(model, strategy)
    if offload.optimizer is MemoryTier.NVME:
        each = (1 + strategy.moments) * precision.optimizer.size_bytes
        each += precision.compute.size_bytes if offload.files_gradients else 0
        read = written = updated * each
    if offload.parameters is MemoryTier.NVME:
        read += _fetched(model, strategy)
        written += updated * precision.compute.size_bytes
    if offload.checkpoints is MemoryTier.NVME:
        read += _checkpoints(model, strategy)
        written += _checkpoints(model, strategy)
    return FileBytes(read=read, written=written)


def _checkpoints(model: Model, strategy: Strategy) -> int:
    """Return bytes of the checkpoints of a step."""
    return strategy.train.gradient_accumulation_steps * kept_bytes(model, strategy)


def _updated(model: Model, strategy: Strategy, *, but: int = 0) -> int:
    """Elements that a rank updates, with padding, of all `but` so many."""
    whole = padded_elements(model, strategy, frozen=False) - but
    return whole if strategy.zero.stage == 0 else whole // strategy.parallel.data


def _fetched(model: Model, strategy: Strategy) -> int:
    """Bytes of shards that a rank brings to its device in a step."""
    ranks, size = strategy.parallel.data, strategy.train.precision.compute.size_bytes
    return sum(
        gathers(each, strategy)[0] * (each.padded(ranks) // ranks) * size
        for each in buckets(model, strategy)
    )
