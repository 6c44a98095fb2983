"""Userbuffers of Transformer Engine: memory that other ranks of a tensor axis read and write.

Each GEMM of a linear layer that overlaps a collective has a communicator with a buffer for the
hidden states of all tokens. It is allocated in setup and shared by all layers (`initialize_ub`,
Transformer Engine 2.20, transformer_engine/pytorch/module/base.py). A rank's own tokens are copied
to their place in it before a gather (`fill_userbuffers_buffer_for_all_gather`); GEMMs write outputs
to be scattered to it. Transformer Engine has two more buffers, for weight GEMMs in MXFP8, which
zsim does not use.
"""

from enum import StrEnum

from zsim.model.kernel import FusedPart, parts_of
from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter


class UserbufferUse(StrEnum):
    """GEMMs of a segment that have a userbuffer, by its content."""

    INPUT = "input"
    """Tokens that the first layers read: `qkv_fprop`, `fc1_fprop`."""
    INPUT_AGAIN = "input_again"
    """The same tokens, gathered for the gradients of weights: `qkv_dgrad`, `fc1_dgrad`."""
    INPUT_GRADIENT = "input_gradient"
    """The gradient of the input, which is scattered: `qkv_wgrad`, `fc1_wgrad`."""
    OUTPUT = "output"
    """The last layer's output tokens, which are scattered: `proj_fprop`, `fc2_fprop`."""
    OUTPUT_GRADIENT = "output_gradient"
    """The gradient of the output, gathered: `proj_dgrad`, `fc2_dgrad`."""


_USES = {
    FusedPart.GATHERED: UserbufferUse.INPUT,
    FusedPart.BESIDE_GATHER: UserbufferUse.INPUT_AGAIN,
    FusedPart.BESIDE_SCATTER: UserbufferUse.INPUT_GRADIENT,
    FusedPart.SPLIT: UserbufferUse.OUTPUT,
    FusedPart.GRADIENT: UserbufferUse.OUTPUT_GRADIENT,
}
"""Uses, by the kinds of fused parts in a segment's kernels."""


class Userbuffers:
    """Allocates the userbuffers of a model's segments, and finds the buffer of each use."""

    def __init__(self, writer: ScheduleWriter, model: Model) -> None:
        self.names = set[str]()
        self._places = dict[str, int]()
        for unit in model.units:
            for place, segment in enumerate(unit.segments):
                parts = parts_of((*segment.forward, *segment.backward))
                self._places |= {value.name: place for value in segment.outputs if parts}
                for use in (_USES[part] for part in sorted(parts)):
                    of = segment.outputs[0].name if use.startswith("output") else segment.inputs[0]
                    self._take(writer, model, f"userbuffers/{place}/{use}", of)

    def _take(self, writer: ScheduleWriter, model: Model, name: str, of: str) -> None:
        """Allocate a buffer for all tokens of the value `of`, unless another layer has done so."""
        self.names.add(name)
        if name in writer.alive:
            return
        value = model.values[of]
        writer.prefix = "setup"
        writer.buffer(name, value.elements * model.tensor, value.dtype, Kind.WORKSPACE)
        writer.persist(name)

    def whole(self, segment: Segment, action: Action) -> str | None:
        """Return the buffer of the input that `segment` reads whole; None if it has none."""
        return self._of(
            segment, UserbufferUse.INPUT_AGAIN if action is Action.BACKWARD else UserbufferUse.INPUT
        )

    def input_gradient(self, segment: Segment) -> str | None:
        """Return the buffer of partial sums of the input gradient of `segment`, or None."""
        return self._of(segment, UserbufferUse.INPUT_GRADIENT)

    def output(self, value: str, *, gradient: bool = False) -> str | None:
        """Return the buffer of partial sums of `value`, or of the gradient of all its tokens."""
        use = UserbufferUse.OUTPUT_GRADIENT if gradient else UserbufferUse.OUTPUT
        return self._named(self._places.get(value), use)

    def _of(self, segment: Segment, use: UserbufferUse) -> str | None:
        return self._named(self._places.get(segment.outputs[0].name), use)

    def _named(self, place: int | None, use: UserbufferUse) -> str | None:
        name = f"userbuffers/{place}/{use}"
        return name if name in self.names else None
