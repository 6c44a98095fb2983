"""The end of a step in DeepSpeed: a norm for each group, with or without clipping, and their sum.

Groups are sub-groups in stage 3, and groups of parameters in stages 1 and 2.
"""

from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor


class NormPerGroup(OptimizerStep):
    """An update whose norms are reduced separately, one number at a time.

    DeepSpeed reduces each norm over the data axis and then over the tensor axis; here one group
    covers both.
    """

    # DeepSpeed 0.19: scaled_global_norm (stage_1_and_2.py) and _get_norm_groups (stage3.py) call
    # get_grad_norm_direct for each group; `step` of both does so with or without clipping
    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the sum of all norms, reduced in any case; None without clipping."""
        names = ["norm", *(f"norm{number}" for number in range(1, len(self.tensors)))]
        for name, item in zip(names, self.tensors, strict=True):
            self._measure_norm(writer, name, (item,))
        for name in names[1:]:  # torch.linalg.vector_norm of them all
            writer.copy(f"norm/add/{name}", name, names[0], accumulate=True)
            writer.free(name)
        if self.strategy.train.clip_norm is None:
            writer.free(names[0])
            return None
        return names[0]


class NormPerGroupToHost(NormPerGroup):
    """The same with parameters on the host: masters are copied there, and cast."""

    # _reassign_or_swap_out_partitioned_parameters (stage3.py): `data.copy_` blocks
    def finish_one(self, writer: ScheduleWriter, item: UpdatedTensor, updated: str) -> None:
        """Wait until the parameters of the tensor are on the host."""
        writer.host_wait("wait", updated)
        super().finish_one(writer, item, updated)
