"""Experts that all tokens run through: an MLP, which may have a gate, and its sum with others."""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.experts import Experts
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import Value
from zsim.model.transformer.linear import linear
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.recomputed_parts import recomputed
from zsim.model.transformer.size import Size
from zsim.model.transformer.source_weights import value_of
from zsim.strategy.execution import Recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSteps:
    """The shared experts of the block `name`.

    Attributes:
        whole: the tokens of a micro-batch.
        size: the tokens of this rank.
        experts: the experts of the block.
        name: the name of the block.
        read: the tokens as a value.
        source: the tokens, which a gate reads.
    """

    whole: Size
    size: Size
    experts: Experts
    name: str
    read: Value
    source: Tensor

    @property
    def _in_parts(self) -> bool:
        """Return True if shared experts are in parts, on tensor ranks or on a side stream.

        They are also apart if exchanges of tokens overlap another micro-batch.
        """
        is_apart = self._overlaps or self.whole.shape.execution.merges_micro_batches
        return (self.whole.cut or is_apart) and self.experts.shared_intermediate_size > 0

    @property
    def _overlaps(self) -> bool:
        return self.whole.shape.execution.overlaps_shared

    def beside(self) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...]]:
        """Return the parts on a side stream: during the exchange of tokens, and that of results.

        The first part computes the scores of a gate, and runs up to the activation
        (`pre_forward_comm` and `linear_fc1_forward_and_act` of SharedExpertMLP). The second part is
        `linear_fc2_forward`, `post_forward_comm`, and the product with the gate in `get_output`.
        """
        if not (self._overlaps and self.experts.shared_intermediate_size):
            return (), ()
        size, read, name = self.whole, self.read, f"{self.name}/shared"
        made = size.value(f"{name}/down")
        *up, down = self.operators(
            size, size.whole(read), size.kept_in_block(read), size.whole(made)
        )
        product = value_of(up[-1].makes)
        first = Stretch(
            inputs=(read.name,),
            outputs=(product,),
            operators=tuple(up),
            begins=size.token_gather,
            side=True,
        )
        second = Stretch(
            inputs=(product.name,),
            outputs=(made,),
            operators=(down,),
            ends=size.token_sum,
            side=True,
        )
        if not self.experts.shared_gate:
            return (first,), (second,)
        (*scores, gates), gated = self._gates(tensor_of(made))
        score = value_of(scores[-1].makes)
        opens = Stretch(inputs=(read.name,), outputs=(score,), operators=tuple(scores), side=True)
        closes = Stretch(
            inputs=(made.name, score.name),
            outputs=(replace(made, name=gated.name),),
            operators=(gates,),
            side=True,
        )
        return (opens, first), (second, closes)

    def added_to(self, target: Value) -> tuple[Tensor, tuple[Operator, ...]]:
        """Return the outputs of routed experts, and steps that add outputs of shared ones."""
        if not self.experts.shared_intermediate_size:
            return tensor_of(target), ()
        routed = self.size.rows(f"{self.name}/routed", self.size.hidden)
        made, own = self._wide("down", self.size.hidden), self.source
        steps = () if self._in_parts else self.operators(self.size, own, own, made)
        return routed, (*steps, *self.added(made, routed, tensor_of(target)))

    def apart(self) -> tuple[tuple[Stretch, ...], tuple[Value, ...]]:
        """Return shared experts in parts, between a gather and a sum of tokens, and their output.

        Both are empty if there are none, or if each rank holds them whole.
        """
        if not self._in_parts:
            return (), ()
        size, read = self.whole, self.read
        made = size.value(f"{self.name}/shared/down")
        if self._overlaps:
            name = self._wide("gated", 1).name if self.experts.shared_gate else made.name
            return (), (replace(made, name=name),)
        stretch = Stretch(
            inputs=(read.name,),
            outputs=(made,),
            operators=self.operators(
                size, size.whole(read), size.kept_in_block(read), size.whole(made)
            ),
            begins=size.token_gather,
            ends=size.token_sum,
        )
        return (stretch,), (made,)

    def operators(
        self, size: Size, source: Tensor, kept: Tensor, target: Tensor
    ) -> tuple[Operator, ...]:
        """Return the MLP that all tokens run through, on all tokens of `size`.

        It reads `source`, which it saves as `kept`.
        """
        name, wide = f"{self.name}.shared", self.experts.shared_intermediate_size // size.tensor

        def rows(part: str) -> Tensor:
            return size.rows(f"{self.name}/shared/{part}", wide)

        gate, up, product = rows("gate"), rows("up"), rows("product")
        made_by = [
            linear(size, source, each, size.part(weight, wide, size.hidden), kept=kept)
            for weight, each in ((f"{name}.gate.weight", gate), (f"{name}.up.weight", up))
        ]
        area, kind = (size.tokens, wide), KernelKind.ELEMENTWISE
        if self.size.shape.execution.compiled:
            made_by.append(
                Operator(
                    reads=(gate, up),
                    makes=product,
                    saves=(gate, up),
                    forward=(_over(area, size.dtype, 3),),
                    backward=(_over(area, size.dtype, 5, backward=True),),
                )
            )
        else:
            curve, active = KernelKind.ACTIVATION, rows("active")
            made_by += [
                Operator(
                    reads=(gate,),
                    makes=active,
                    saves=(gate,),
                    forward=(streaming(curve, area, size.dtype, streams=2),),
                    backward=(streaming(curve, area, size.dtype, streams=3, backward=True),),
                ),
                Operator(
                    reads=(active, up),
                    makes=product,
                    saves=(active, up),
                    forward=(streaming(kind, area, size.dtype, streams=3),),
                    backward=(streaming(kind, area, size.dtype, streams=3, backward=True),) * 2,
                ),
            ]
        weight = size.part(f"{name}.down.weight", size.hidden, wide)
        found = (*made_by, linear(size, product, target, weight))
        again = Recomputed.SHARED_EXPERTS in size.shape.execution.recomputes
        return recomputed(found, found) if again else found

    def added(self, made: Tensor, routed: Tensor, target: Tensor) -> tuple[Operator, ...]:
        """Return the sum of routed experts and of shared ones, which may have a gate."""
        size, gated = self.size, made
        gates: tuple[Operator, ...] = ()
        if self.experts.shared_gate and self._overlaps:
            gated = self._wide("gated", size.hidden)
        elif self.experts.shared_gate:
            gates, gated = self._gates(made)
        rows, kind = (size.tokens, size.hidden), KernelKind.ELEMENTWISE
        added = Operator(
            reads=(routed, gated),
            makes=target,
            shares_gradient=True,
            forward=(streaming(kind, rows, size.dtype, streams=3),),
        )
        return (*gates, added)

    def _gates(self, made: Tensor) -> tuple[tuple[Operator, ...], Tensor]:
        """Return the product of the shared MLP's output with a gate for each token."""
        size = self.size
        score, gate = self._wide("score", 1), self._wide("sigmoid", 1)
        gated = self._wide("gated", size.hidden)
        rows, weight = (size.tokens, size.hidden), f"{self.name}.shared.score.weight"
        curve = (size.tokens, 1)
        return (
            linear(size, self.source, score, size.copied(weight, 1, size.hidden)),
            Operator(
                reads=(score,),
                makes=gate,
                saves=(gate,),
                forward=(_over(curve, size.dtype, 2),),
                backward=(_over(curve, size.dtype, 3, backward=True),),
            ),
            Operator(
                reads=(made, gate),
                makes=gated,
                saves=(made, gate),
                forward=(_over(rows, size.dtype, 2),),
                backward=(_over(rows, size.dtype, 2, backward=True),) * 2,
            ),
        ), gated

    def _wide(self, part: str, width: int) -> Tensor:
        """Return a tensor of the shared MLP, of `width` elements for each token."""
        return self.size.rows(f"{self.name}/shared/{part}", width)


def _over(shape: tuple[int, ...], dtype: DType, streams: int, *, backward: bool = False) -> Kernel:
    """Return a kernel over `streams` tensors of `shape`."""
    return streaming(KernelKind.ELEMENTWISE, shape, dtype, streams=streams, backward=backward)
