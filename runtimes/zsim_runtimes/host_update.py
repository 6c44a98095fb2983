"""The end of a step with states in host memory, when Python itself runs the optimizer.

DeepSpeed's CPU Adam and PyTorch's optimizers block, so no device operation is issued meanwhile.
Copies to and from the device are on the current stream.
"""

from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.zero.offloaded_optimizer import HostOptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor


class BlockingHostStep(HostOptimizerStep):
    """An update of parameters that are kept on the host; the host waits for each tensor."""

    number_home = COMPUTE
    to_device = COMPUTE
    from_device = COMPUTE

    @property
    def parameters(self) -> MemoryTier:
        """Tier in which parameters are kept."""
        return MemoryTier.HOST

    def finish_one(self, writer: ScheduleWriter, item: UpdatedTensor, updated: str) -> None:
        """Wait until the tensor is updated; free its gradient."""
        writer.host_wait("wait", updated)
        super(HostOptimizerStep, self).finish_one(writer, item, updated)
