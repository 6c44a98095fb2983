"""Kernels that move, cast and multiply rows of experts, by dispatcher and format.

With NCCL's all-to-all a rank copies each token once for each expert, in the order of experts, and
sends these rows. The rows that it receives are in the order of their sources, so a rank with
several experts sorts chunks of them, and sorts them back afterwards (`MoEAlltoAllTokenDispatcher`
of megatron/core/transformer/moe/token_dispatcher.py, `sort_chunks_by_idxs`). A library sends each
token once to each rank, which copies it there for each of its experts; afterwards, a rank adds up
its copies, and the library adds those of all ranks on the way back (`MoEFlexTokenDispatcher`).

Narrow products of Transformer Engine need rows in multiples of 16 and more for each expert
(`get_fp8_align_size`, `get_fp4_align_size`). `quantization_padding` of TEGroupedMLP copies all rows
to pad them, and back; HybridEP pads rows as it copies them (`pad_multiple`).
"""

from dataclasses import dataclass, replace

from zsim.model.expert_transport import transport_of
from zsim.model.kernel import Kernel, KernelKind, OperandLayout, grouped_matmul
from zsim.model.narrow_products import Kernels, NarrowProducts
from zsim.model.token_loads import TokenLoads, repeated
from zsim.model.transformer.operator import Operator, Tensor
from zsim.model.transformer.size import Size
from zsim.strategy.execution import DispatchLibrary, Float4, Float8

PAD = 16
PADS = {Float8.MXFP8: 32, Float4.NVFP4: 128}
"""Rows of each expert are a multiple of this: by scaling, `PAD` for all others."""


def padded(loads: TokenLoads, multiple: int) -> TokenLoads:
    """Return `loads` with the rows of each expert rounded up to a multiple."""
    groups = ((count, -(-rows // multiple) * multiple) for count, rows in loads.groups)
    return replace(loads, groups=tuple(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Rows of a block's experts on a rank, with which kernels are built.

    `loads` are the rows of its experts; if it `loops`, each expert has separate kernels.
    """

    size: Size
    loads: TokenLoads
    loops: bool

    @property
    def narrow(self) -> NarrowProducts | None:
        """Casts for narrow products; None for products in the format of activations.

        Only Transformer Engine's grouped products are modelled so.
        """
        found = self.size.narrow
        return None if self.loops or found is None or not found.joins_casts else found

    @property
    def library(self) -> DispatchLibrary | None:
        """The library that exchanges tokens; None if NCCL does, or none are exchanged."""
        found = transport_of(self.size.shape)
        return None if found is None else found.library

    @property
    def permutes_first(self) -> bool:
        """True if a rank copies tokens for each expert before it sends them."""
        return self.library is None

    def arranged(self, *, backward: bool = False) -> Kernels:
        """Return the kernels that put received rows in the order of experts, or back.

        Rows that were copied before are only sorted, unless one expert has all of them. If weights
        stay at the source, a grouped product always has them sorted (`_permute` of torchtitan).
        """
        width = self.size.hidden * self.size.dtype.size_bytes
        rows, moved, execution = self.loads.total, 0, self.size.shape.execution
        transport = transport_of(self.size.shape)
        if transport is not None:
            places = transport.choice.places(execution.expert)
            moved = (round(self.size.tokens * places) + rows) * width
        elif execution.gathers_experts:
            moved = 0  # copied in the order of experts
        elif execution.expert > 1 and (
            self.loads.experts > 1 or (execution.weighs_at_source and not self.loops)
        ):
            moved = 2 * rows * width
        found = (self._moving(moved, backward=backward),) if moved else ()
        if self.narrow is None or self.library is DispatchLibrary.HYBRIDEP:
            return found
        return (*found, self._moving(2 * rows * width, backward=backward))

    def casts(self, columns: int, *, backward: bool = False) -> Kernels:
        """Return the kernels that cast rows of `columns` for products; none in wide formats."""
        if self.narrow is None:
            return ()
        rows = self.padded.total
        found = self.narrow.cast(rows, columns, copies=self.narrow.copies, backward=backward)
        return tuple(replace(each, loads=self.loads) for each in found)

    @property
    def padded(self) -> TokenLoads:
        """Loads of products."""
        if self.narrow is None:
            return self.loads
        return padded(self.loads, PADS.get(self.narrow.recipe, PAD))

    def product(self, n: int, k: int, layout: OperandLayout, *, backward: bool) -> Kernel:
        """Return the product of all experts as one kernel."""
        dtype = self.size.dtype if self.narrow is None else self.narrow.dtype
        made = grouped_matmul(self.padded, n, k, dtype, backward=backward, layout=layout)
        scaled = self.narrow is not None and self.narrow.recipe is Float8.BLOCKWISE
        return replace(made, block_scaled=scaled)

    def cast(self, source: Tensor, target: Tensor) -> Operator:
        """Return the cast of rows between the formats of activations and of weights."""
        kernels = (
            Kernel(
                kind=KernelKind.ELEMENTWISE,
                flops=target.elements,
                bytes=source.size_bytes + target.size_bytes,
                dtype=self.size.dtype,
                shape=(target.elements // self.size.hidden, self.size.hidden),
                backward=way,
                loads=repeated(self.loads, target.elements // self.size.hidden // self.loads.total),
            )
            for way in (False, True)
        )
        forward, backward = kernels
        return Operator(reads=(source,), makes=target, forward=(forward,), backward=(backward,))

    def _moving(self, moved: int, *, backward: bool) -> Kernel:
        return Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=moved // self.size.dtype.size_bytes,
            bytes=moved,
            dtype=self.size.dtype,
            shape=(self.loads.total, self.size.hidden),
            backward=backward,
            loads=self.loads,
        )
