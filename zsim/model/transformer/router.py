"""The router of a mixture: its product, scores, and the choice of experts with their weights."""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.experts import Experts, RouterFormat, Scores
from zsim.model.kernel import Kernel, KernelKind, OperandLayout, matmul, streaming
from zsim.model.model import Parameter
from zsim.model.transformer.linear import linear
from zsim.model.transformer.operator import Operator, Tensor
from zsim.model.transformer.size import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router of the block `name`.

    Attributes:
        size: the tokens of this rank.
        experts: the experts that it chooses among.
        source: the tokens.
        copies: copies of tokens for their experts.
        weights: the tensor of the weights of these copies.
        losses_apart: auxiliary losses are computed by other operators (`router_losses`).
    """

    size: Size
    experts: Experts
    source: Tensor
    name: str
    copies: int
    weights: Tensor
    losses_apart: bool = False

    @property
    def logits(self) -> Tensor:
        """The logits: of every token for every expert."""
        wide = self.experts.router_format is RouterFormat.FP32
        elements = self.size.tokens * self.experts.count
        return self._tensor("logits", elements, DType.FP32 if wide else self.size.dtype)

    def route(self) -> tuple[Operator, ...]:
        """Return the product of the router, and the choice of experts with their weights."""
        size, shape = self.size, self.experts
        wide = shape.router_format is RouterFormat.FP32
        logits = self.logits
        dtype = logits.dtype
        weight = size.copied(f"{self.name}.router.weight", shape.count, size.hidden)
        bias = size.copied(f"{self.name}.router.bias", shape.count) if shape.router_bias else None
        made: list[Operator] = []
        read = self.source
        if wide and dtype is not size.dtype and not self.size.shape.execution.compiled:
            read = replace(self.source, name=f"{self.name}/router/wide", dtype=dtype)
            made.append(self._cast(read))
        project = linear(replace(size, dtype=dtype), read, logits, weight, bias=bias)
        if wide and dtype is not size.dtype and self.size.shape.execution.compiled:
            project = self._widening(project)
        return (*made, project, self._choose(logits))

    def _widening(self, project: Operator) -> Operator:
        """Return the product of a router whose operands are narrower than its output.

        In backward, the source is cast for products in fp32 (`RouterGatingLinearFunction` of
        megatron/core/transformer/moe/moe_utils.py).
        """
        size, count = self.size, self.experts.count
        product = matmul(size.tokens, count, size.hidden, size.dtype, layout=OperandLayout.NT)
        area = size.tokens * count
        wider = area * (DType.FP32.size_bytes - size.dtype.size_bytes)
        source = replace(self.source, name=f"{self.source.name}/wide", dtype=DType.FP32)
        _, *rest = project.forward
        return replace(
            project,
            forward=(replace(product, bytes=product.bytes + wider), *rest),
            trains=(*self._cast(source).backward, *project.trains) if project.trains else (),
        )

    def _cast(self, target: Tensor) -> Operator:
        moved = target.elements * (self.size.dtype.size_bytes + target.element_bytes)
        forward, backward = (
            Kernel(
                kind=KernelKind.ELEMENTWISE,
                flops=target.elements,
                bytes=moved,
                dtype=self.size.dtype,
                shape=(self.size.tokens, self.size.hidden),
                backward=way,
            )
            for way in (False, True)
        )
        return Operator(
            reads=(self.source,), makes=target, forward=(forward,), backward=(backward,)
        )

    def _choose(self, logits: Tensor) -> Operator:
        """Return scores, the choice of experts, and the weights of the chosen ones.

        Fused kernels keep scores, weights of all experts and the map from tokens to experts.
        Others keep the scores, the chosen experts, and weights with their sum if they are divided
        by it. An auxiliary loss is a softmax of the logits and its sum over tokens, kept as scores;
        a z loss keeps the logits.
        """
        size, shape, wide = self.size, self.experts, self.size.wide
        area = size.tokens * shape.count
        of_chosen = shape.scores is Scores.SOFTMAX_OF_CHOSEN
        chosen = self._tensor("chosen", self.copies, DType.INT64)
        saves = [chosen]
        if self.size.shape.execution.compiled:
            saves = [self._tensor("map", area, DType.INT8), self._tensor("dense", area, wide)]
        if not of_chosen or self.size.shape.execution.compiled:
            saves.append(self._tensor("scores", area, wide))
        if shape.normalised and not of_chosen and not self.size.shape.execution.compiled:
            saves += [
                self._tensor("top", self.copies, wide),
                self._tensor("sums", size.tokens, wide),
            ]
        if of_chosen and not self.size.shape.execution.compiled:
            saves.append(self._tensor("softmax", self.copies, wide))
        passes = 3 + (shape.groups > 1) + shape.score_bias  # scores, choice, groups, bias
        losses = 0 if self.losses_apart else shape.losses
        if losses and shape.auxiliary_loss:
            saves.append(self._tensor("auxiliary", area, wide))
        if losses and shape.z_loss:
            saves.append(logits)
        passes += 2 * losses
        kernel, rows = KernelKind.SOFTMAX, (size.tokens, shape.count)
        forward = tuple(streaming(kernel, rows, wide, streams=2) for _ in range(passes // 2))
        backward = tuple(
            streaming(kernel, rows, wide, streams=3, backward=True) for _ in range(1 + losses)
        )
        return Operator(
            reads=(logits,),
            makes=self.weights,
            parameters=() if self.bias is None else (self.bias,),
            saves=tuple(saves),
            forward=forward,
            backward=backward,
        )

    @property
    def bias(self) -> Parameter | None:
        """The bias of scores that a rule updates from the rows of each expert, if any."""
        if not self.experts.score_bias or self.size.shape.execution.own_loads:
            return None
        return Parameter(
            name=f"{self.name}.router.score_bias",
            shape=(self.experts.count,),
            frozen=True,
            load=f"{self.name}/experts/load",
        )

    def _tensor(self, part: str, elements: int, dtype: DType) -> Tensor:
        return Tensor(name=f"{self.name}/experts/{part}", elements=elements, dtype=dtype)
