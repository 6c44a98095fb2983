"""Auxiliary losses of a router as segments: their loads may be summed over ranks.

The router makes the sums of its scores over tokens, and the rows of each expert. A separate segment
computes the loss of both: before it, ranks sum the rows over the tokens of the loss
(`_apply_aux_loss`, `_apply_seq_aux_loss` and `_apply_global_aux_loss` of
megatron/core/transformer/moe/router.py in August 2026, d98e8a64). A z loss needs no other ranks.

A bias of experts also needs the rows of each expert (`_apply_expert_bias`).
"""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.experts import Experts, LoadBalancing, LoadScope
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import Parameter, Value
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.size import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """The auxiliary losses of the router of the block `name`.

    Attributes:
        whole: the tokens of a micro-batch.
        size: the tokens of this rank.
        experts: the experts that it chooses among.
        name: the name of the block.
        logits: the logits of the router.
        apart: its losses are segments.
        bias: its bias, if any.
    """

    whole: Size
    size: Size
    experts: Experts
    name: str
    logits: Tensor
    apart: bool
    bias: Parameter | None

    def made_by_router(self) -> tuple[Operator, ...]:
        """Return the operators of the router that make what its losses and its bias read."""
        found: list[Operator] = []
        if self.apart and self.experts.auxiliary_loss:
            found += (self._summed_scores(), self._load())
        if self.apart and self.experts.z_loss:
            found.append(self._logit_sizes())
        if self.bias is not None:
            load = Tensor(name=self.bias.load, elements=self.bias.elements, dtype=DType.INT64)
            found.append(self._rows_of_each(load))
        return tuple(found)

    def values(self) -> tuple[Value, ...]:
        """Return the values that the losses read; ranks of the tensor axis have different loads."""
        found: list[Value] = []
        for each in self.made_by_router():
            value = Value(
                name=each.makes.name, elements=each.makes.elements, dtype=each.makes.dtype
            )
            found.append(replace(value, tensor_sharded=self.whole.sequence and not each.reads))
        return tuple(found)

    def stretches(self) -> tuple[Stretch, ...]:
        """Return the losses."""
        found: list[Stretch] = []
        if not self.apart:
            return ()
        if self.experts.auxiliary_loss:
            read = self._summed_scores().makes, self._load().makes
            scope = self.experts.load_balancing_type.scope
            found.append(self._loss("auxiliary", read, scope))
        if self.experts.z_loss:
            found.append(self._loss("z", (self._logit_sizes().makes,), LoadScope.RANK))
        return tuple(found)

    def _loss(self, part: str, read: tuple[Tensor, ...], scope: LoadScope) -> Stretch:
        """Return a loss of what the router made, with one kernel in each direction."""
        target = Value(name=f"{self.name}/experts/{part}/loss", elements=1, dtype=self.size.wide)
        extent = (read[0].elements,)
        kernels = (
            streaming(
                KernelKind.ELEMENTWISE, extent, self.size.wide, streams=len(read), backward=way
            )
            for way in (False, True)
        )
        forward, backward = kernels
        loss = Operator(
            reads=read[:1],
            makes=tensor_of(target),
            saves=read[-1:],
            forward=(forward,),
            backward=(backward,),
        )
        names = tuple(each.name for each in read)
        return Stretch(inputs=names, outputs=(target,), operators=(loss,), loads=scope)

    @property
    def _sums(self) -> int:
        """Elements of a sum over tokens: one for each expert, and sequence if they are apart."""
        each_sequence = self.experts.load_balancing_type is LoadBalancing.SEQ_AUX_LOSS
        return self.experts.count * (self.whole.sequences if each_sequence else 1)

    def _summed_scores(self) -> Operator:
        """Return the softmax of the logits, which is kept, and its sums over tokens."""
        rows, wide = (self.size.tokens, self.experts.count), self.size.wide
        kind = KernelKind.SOFTMAX
        return Operator(
            reads=(self.logits,),
            makes=self._tensor("auxiliary/scores", self._sums, wide),
            saves=(self._tensor("auxiliary", rows[0] * rows[1], wide),),
            forward=(streaming(kind, rows, wide, streams=2),),
            backward=(streaming(kind, rows, wide, streams=3, backward=True),),
        )

    def _load(self) -> Operator:
        return self._rows_of_each(self._tensor("auxiliary/load", self._sums, DType.INT64))

    def _rows_of_each(self, load: Tensor) -> Operator:
        """Return the rows of each expert: sums of the map from tokens to experts."""
        kernel = summed_map(self.size, self.experts.count)
        return Operator(reads=(), makes=load, forward=(kernel,))

    def _logit_sizes(self) -> Operator:
        """Return the mean square of the logarithms of the sums of exponents of logits."""
        rows = (self.size.tokens, self.experts.count)
        kind, wide = KernelKind.SOFTMAX, self.size.wide
        return Operator(
            reads=(self.logits,),
            makes=self._tensor("z/sum", 1, wide),
            saves=(self.logits, self._tensor("z", self.size.tokens, wide)),
            forward=(streaming(kind, rows, wide, streams=1),),
            backward=(streaming(kind, rows, wide, streams=2, backward=True),),
        )

    def _tensor(self, part: str, elements: int, dtype: DType) -> Tensor:
        return Tensor(name=f"{self.name}/experts/{part}", elements=elements, dtype=dtype)


def are_apart(size: Size, experts: Experts) -> bool:
    """Return True if losses of routers are segments; otherwise they are a part of the router.

    They are if ranks exchange tokens of experts, or if their loads are summed over ranks.
    """
    execution = size.shape.execution
    if execution.own_loads or not experts.losses:
        return False
    is_of_all = experts.load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS
    return execution.expert > 1 or execution.context > 1 or size.cut or is_of_all


def summed_map(size: Size, experts: int) -> Kernel:
    """Return the sum over tokens of the map from tokens to experts, with a byte for each."""
    area = size.tokens * experts
    return Kernel(
        kind=KernelKind.ELEMENTWISE,
        flops=area,
        bytes=area,
        dtype=size.dtype,
        shape=(size.tokens, experts),
    )
