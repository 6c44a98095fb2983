"""Bytes that offloading moves in a step, by link, from model and strategy alone.

For each parameter that a rank updates, the gradient is copied out once and the new value back
once, in the compute format (Ren et al. 2021, section 3: 2 + 2 bytes in 16 bits). States in files
are read and written once (Rajbhandari et al. 2021, section 4.1). Shards of parameters that are not
on the device are fetched for every gather over the data axis.
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
    """Return the bytes that a rank copies to and from its host in a step.

    Checkpoints are copied out and back (Rajbhandari et al. 2020, section 8: Pa+cpu), whether or
    not they continue to files.
    """
    kept = checkpoint_bytes(model, strategy)
    out, back = kept.to_host, kept.from_host
    offload, precision = strategy.offload, strategy.train.precision
    if offload.optimizer is not MemoryTier.DEVICE:
        stays = kept_back(model, strategy)
        updated = _updated(model, strategy, but=stays) * precision.compute.size_bytes
        clips = strategy.train.clip_norm is not None
        number = precision.optimizer.size_bytes  # the device reduces it over ranks
        out += updated + clips * number
        back += updated if offload.parameters is MemoryTier.DEVICE else 0
        part = DType.FP64.size_bytes if stays else number  # added to the device's part
        back += (clips + (precision is Precision.FP16)) * part
    if offload.parameters is not MemoryTier.DEVICE:
        back += _fetched(model, strategy)
    return HostBytes(to_host=out, from_host=back)


def checkpoint_bytes(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes of `host_bytes` that belong to checkpoints."""
    moves = strategy.checkpoint_tier is not MemoryTier.DEVICE
    kept = _checkpoints(model, strategy) if moves else 0
    return HostBytes(to_host=kept, from_host=kept)


def file_bytes(model: Model, strategy: Strategy) -> FileBytes | None:
    """Return the bytes that a rank reads and writes in files in a step; None if it uses none."""
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
    """Return the bytes of the checkpoints of a step."""
    return strategy.train.gradient_accumulation_steps * kept_bytes(model, strategy)


def _updated(model: Model, strategy: Strategy, *, but: int = 0) -> int:
    """Return the elements, with padding, that a rank updates; `but` of the whole are excluded."""
    whole = padded_elements(model, strategy, frozen=False) - but
    return whole if strategy.zero.stage == 0 else whole // strategy.parallel.data


def _fetched(model: Model, strategy: Strategy) -> int:
    """Return the bytes of shards that a rank fetches to its device in a step."""
    size = strategy.train.precision.compute.size_bytes
    return sum(
        gathers(each, strategy)[0] * each.shard(strategy) * size
        for each in buckets(model, strategy)
    )
