"""Weights of experts that stay at the source of their tokens, and multiply the returned results.

`AllToAllTokenDispatcher` of torchtitan (torchtitan/models/common/token_dispatcher.py in August
2026, b5bcd76c) sorts copies of tokens and their scores by expert, sends the copies alone, and
multiplies what comes back in fp32 before it adds up the results of each token. If the block is
compiled, this is one kernel.
"""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.experts import Drops
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import Value
from zsim.model.segment_exchange import SWAP_EXPERTS
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.router_losses import RouterLosses
from zsim.model.transformer.size import Size

KIND = KernelKind.ELEMENTWISE

Operators = tuple[Operator, ...]


def value_of(tensor: Tensor) -> Value:
    """Return the value that has the memory of a tensor."""
    return Value(name=tensor.name, elements=tensor.elements, dtype=tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWeights:
    """Weights of `copies` of the tokens of a rank.

    Attributes:
        size: the tokens of this rank.
        name: the block.
        copies: copies of tokens that this rank sends.
        weights: their weights in the order of tokens.
        rows: the token of each copy in the order of experts.
        losses: auxiliary losses of the router.
        drops: rule that drops copies; None if all are kept.
    """

    size: Size
    name: str
    copies: int
    weights: Tensor
    rows: Tensor
    losses: RouterLosses
    drops: Drops | None

    @property
    def ordered(self) -> Tensor:
        """The weights in the order of experts."""
        return self._tensor("ordered", self.copies, self.size.wide)

    def stretches(
        self,
        source: Tensor,
        target: Value,
        *,
        rows: tuple[Value, Value],
        routes: Operators,
        counts: Operators,
        experts: Operators,
        adds: tuple[Tensor, Tensor, Operators],
        others: tuple[str, ...],
    ) -> tuple[Stretch, ...]:
        """Return routing, permutation, experts, and the sums of what comes back.

        `rows` are the copies that the permutation ends in exchanging, and the results of experts.
        `adds` are weighed results, their sums, and steps that add shared experts, which read
        `others`.
        """
        (sent, back), (weighted, routed, shared) = rows, adds
        numbers = value_of(self.ordered), value_of(self.rows)
        return (
            Stretch(
                inputs=(source.name,),
                outputs=(*numbers, *self.losses.values()),
                operators=(*routes, *self.order()),
            ),
            Stretch(
                inputs=(source.name, self.rows.name),
                outputs=(sent, *(value_of(each.makes) for each in counts)),
                operators=(*counts, self.permute(source, tensor_of(sent))),
                ends=SWAP_EXPERTS,
                routes=counts[0].makes.name if counts else "",
                drops=self.drops,
            ),
            *self.losses.stretches(),
            Stretch(
                inputs=(sent.name,),
                outputs=(back,),
                operators=experts,
                ends=SWAP_EXPERTS,
                drops=self.drops,
            ),
            Stretch(
                inputs=(back.name, *(each.name for each in numbers), *others),
                outputs=(target,),
                operators=(
                    self.weigh(tensor_of(back), weighted),
                    self.add_up(weighted, routed),
                    *shared,
                ),
            ),
        )

    def order(self) -> tuple[Operator, ...]:
        """Return the sort of copies by expert, and that of their weights (`_local_reorder`)."""
        wide, order = self.size.wide, self._tensor("order", self.copies, DType.INT64)
        finds = streaming(KIND, (self.copies,), wide, streams=8)  # numbers of eight bytes, twice
        return (
            Operator(reads=(), makes=self.rows, forward=(finds,)),
            Operator(
                reads=(self.weights,),
                makes=self.ordered,
                saves=(order,),
                forward=(streaming(KIND, (self.copies,), wide, streams=2),),
                backward=(streaming(KIND, (self.copies,), wide, streams=2, backward=True),),
            ),
        )

    def permute(self, source: Tensor, target: Tensor) -> Operator:
        """Return the copies of tokens in the order of experts."""
        return Operator(
            reads=(source,),
            makes=target,
            saves=(self.rows,),
            forward=(self._moves(),),
            backward=(self._moves(backward=True),),
        )

    def weigh(self, returned: Tensor, target: Tensor) -> Operator:
        """Return the products of returned results and their weights, in fp32."""
        if self.size.shape.execution.compiled:
            return Operator(
                reads=(returned, self.ordered),
                makes=target,
                saves=(returned, self.ordered),
                forward=(self._over(2),),
                backward=(self._over(3, backward=True),),
            )
        wide = self._tensor("returned_wide", returned.elements, DType.FP32)
        product, casts = self._over(2, DType.FP32), self._cast()
        cast_back, product_back = (
            self._cast(backward=True),
            self._over(2, DType.FP32, backward=True),
        )
        sums = self._over(3, DType.FP32, backward=True)  # gradients times results, added up by row
        return Operator(
            reads=(returned, self.ordered),
            makes=target,
            saves=(wide, self.ordered),
            forward=(casts, product, casts),
            backward=(cast_back, product_back, sums, cast_back),
        )

    def add_up(self, weighted: Tensor, target: Tensor) -> Operator:
        """Return the sums of results by token."""
        return Operator(
            reads=(weighted,),
            makes=target,
            saves=(self.rows,),
            forward=(self._moves(),),
            backward=(self._moves(backward=True),),
        )

    def _moves(self, *, backward: bool = False) -> Kernel:
        """Return the kernel that copies rows of tokens to their copies, or adds them up."""
        size = self.size
        rows = (size.tokens + self.copies, size.hidden)
        return streaming(KIND, rows, size.dtype, streams=1, backward=backward)

    def _over(
        self,
        streams: int,
        dtype: DType | None = None,
        *,
        backward: bool = False,
    ) -> Kernel:
        rows = (self.copies, self.size.hidden)
        return streaming(KIND, rows, dtype or self.size.dtype, streams=streams, backward=backward)

    def _cast(self, *, backward: bool = False) -> Kernel:
        kernel = self._over(1, backward=backward)
        wide = self.copies * self.size.hidden * DType.FP32.size_bytes
        return replace(kernel, bytes=kernel.bytes + wide)

    def _tensor(self, part: str, elements: int, dtype: DType) -> Tensor:
        return Tensor(name=f"{self.name}/experts/{part}", elements=elements, dtype=dtype)
