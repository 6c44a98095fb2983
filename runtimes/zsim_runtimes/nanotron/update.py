"""nanotron's end of a step, which goes from parameter to parameter.

Functions named in comments are those of `src/nanotron` in February 2025 (0e0a27ea).
"""

from collections.abc import Sequence

from zsim.model.kernel import Kernel
from zsim.schedule.layout import Layout
from zsim.schedule.operation import View
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.parameter_groups import RuledPart
from zsim.zero.updated_tensor import UpdatedTensor


class EachParameter(OptimizerStep):
    """Measures, clips, updates and casts parameters one by one, each with launches of its own."""

    def kernels(
        self,
        elements: int,
        layouts: Sequence[Layout],
        *,
        reads: int,
        writes: int,
        each: int = 2,
    ) -> tuple[Kernel, ...]:
        """Return one kernel for each parameter, which has as large a part of `elements`."""
        # clip_grad_norm (optim/clip_grads.py) takes a norm of each gradient, then scales each
        sizes = [piece.size for layout in layouts for piece in layout.pieces]
        whole = max(1, sum(sizes))
        return tuple(
            self.kernel(-(-elements * size // whole), reads=reads, writes=writes, each=each)
            for size in sizes
        )

    def update_kernels(
        self, part: RuledPart, gradient: View, item: UpdatedTensor
    ) -> tuple[Kernel, ...]:
        """Return two for each parameter: that of Adam, and one that counts its steps."""
        # get_custom_lr_for_named_parameters (helpers.py) makes each parameter a group, for which
        # torch.optim.AdamW calls _foreach_add_ and _fused_adamw_ (torch 2.1).
        updates = super().update_kernels(part, gradient, item)
        return tuple(kernel for one in updates for kernel in (self._count, one))

    @property
    def _count(self) -> Kernel:
        return self.kernel(1, reads=1, writes=1, each=1)

    def casts(self, item: UpdatedTensor, /) -> int:
        """Return one for each parameter."""
        # as FP32GradientAccumulator.step in optim/gradient_accumulator.py does
        return max(1, len(item.layout.pieces))
