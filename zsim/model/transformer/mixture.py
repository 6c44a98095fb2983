"""Routed experts in place of an MLP: router, choice, copies of tokens, experts, weighted sums.

If every rank holds, or has gathered, all experts of a block, tokens stay on their rank, and the
steps are one `Stretch`. With expert ranks there are three. The first ends in the exchange that
sends copies of tokens and their weights to the ranks of their experts, the second in the exchange
that sends the results back (`MoEAlltoAllTokenDispatcher` of megatron/core/transformer/moe). The
copies are balanced: each rank sends equally many to each other. Weights that stay at the source
(`weighs_at_source`) are a segment before these three; the last one multiplies and adds up.

If blocks are compiled, as in Megatron-LM with its fused kernels, weights multiply inside the
experts, in the kernel of the activation (`weighted_bias_swiglu_impl`). Otherwise the steps
follow `grouped_mm_experts_forward` (transformers 5, integrations/moe.py): the weights multiply the
outputs of the experts.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import repeat

from zsim.dtype import DType
from zsim.model.experts import Drops, ExpertKernels, Experts, RouterFormat
from zsim.model.kernel import (
    Kernel,
    KernelKind,
    OperandLayout,
    matmul,
    streaming,
)
from zsim.model.model import Parameter, Value
from zsim.model.segment_exchange import SWAP_EXPERTS, gather_tokens, sum_outputs
from zsim.model.token_loads import balanced, repeated
from zsim.model.transformer.all_token_experts import AllTokenExperts
from zsim.model.transformer.expert_rows import ExpertRows
from zsim.model.transformer.linear import column_sum
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.recomputed_parts import recomputed
from zsim.model.transformer.router import Router
from zsim.model.transformer.router_losses import RouterLosses, are_apart, summed_map
from zsim.model.transformer.shared_experts import SharedExpertSteps
from zsim.model.transformer.size import Size
from zsim.model.transformer.source_weights import SourceWeights, value_of
from zsim.strategy.execution import Recomputed


def mixture(size: Size, source: Value, target: Value, name: str) -> tuple[Stretch, ...]:
    """Return the experts of block `name`, from its normed hidden state to the value to be added."""
    experts = size.shape.experts
    assert experts is not None
    steps = _ExpertSteps(size, experts, source, name)
    before, read = steps.shared.apart()
    if steps.exchanges:
        return (*before, *steps.exchanged(target, read))
    routed, shared = steps.shared.added_to(target)
    stretch = Stretch(
        inputs=(source.name, *(value.name for value in read)),
        outputs=(target, *steps.losses.values()),
        operators=(
            *steps.route(),
            *steps.permute(),
            *steps.experts(),
            *steps.combine(routed),
            *shared,
        ),
    )
    return (*before, stretch, *steps.losses.stretches())


class _ExpertSteps:
    """The steps of experts; each returns its operators."""

    def __init__(self, size: Size, experts: Experts, source: Value, name: str) -> None:
        self.whole, self.size = size, size.of_own_tokens
        self.shape, self.name, self.read = experts, name, source
        size = self.size
        self.source = size.whole(source)
        self.fused = size.shape.execution.compiled
        loops = size.shape.execution.loops_experts
        self.loop = loops or experts.kernels is ExpertKernels.LOOP
        self.exchanges = size.shape.execution.expert > 1
        self.parts = size.shape.execution.expert_tensor
        self.gathers = size.shape.execution.gathers_experts
        self.held = experts.count // size.shape.execution.expert
        self.loads = size.loads or balanced(experts.copies(size.tokens), self.held)
        self.copies = self.loads.total
        self.rows = ExpertRows(size=size, loads=self.loads, loops=self.loop)
        # the format of the router's logits, `probs.type_as(logits)` of moe_utils.py
        narrow = self.gathers and experts.router_format is not RouterFormat.FP32
        self.wide = size.dtype if narrow else size.wide
        self.weights = self._tensor("weights", self.copies, self.wide)
        every = self._tensor("probabilities", size.tokens * experts.count, self.wide)
        self.at_source = self.exchanges and size.shape.execution.weighs_at_source
        self.router = Router(
            size=size,
            experts=experts,
            source=self.source,
            name=name,
            copies=self.copies,
            weights=every if self.gathers else self.weights,
            losses_apart=are_apart(self.whole, experts),
        )
        self.losses = RouterLosses(
            whole=self.whole,
            size=size,
            experts=experts,
            name=name,
            logits=self.router.logits,
            apart=self.router.losses_apart,
            bias=self.router.bias,
        )
        self.kept = SourceWeights(
            size=size,
            name=name,
            copies=self.copies,
            weights=self.weights,
            rows=self._row_numbers,
            losses=self.losses,
            drops=experts.drops(size.tokens),
        )

        self.shared = SharedExpertSteps(
            whole=self.whole,
            size=size,
            experts=experts,
            name=name,
            read=self.read,
            source=self.source,
        )

    def route(self) -> tuple[Operator, ...]:
        """Return the steps of the router, which makes what its losses and its bias read."""
        return (*self.router.route(), *self.losses.made_by_router())

    def exchanged(self, target: Value, read: tuple[Value, ...]) -> tuple[Stretch, ...]:
        """Return the experts of other ranks: routing, the experts of this rank, and the sums.

        The sums also `read` the outputs of shared experts that ranks hold parts of.
        """
        size = self.size
        routed, shared = self.shared.added_to(target)
        up, down = self.shared.beside()
        reads_source = shared and not up and (not read or self.shape.shared_gate)
        others = (*((self.source.name,) if reads_source else ()), *(each.name for each in read))
        if self.gathers:
            return self._of_all_tokens(target, (routed, shared), others)
        if self.at_source:
            return self.kept.stretches(
                self.source,
                target,
                rows=(
                    self._counted(self._rows("permuted", size.hidden)),
                    self._counted(self._fc2),
                ),
                routes=self.route(),
                counts=() if self.shape.pads_to_capacity else (self._count(),),
                experts=self.experts(),
                adds=(self._weighted, routed, shared),
                others=others,
            )
        output = self._fc2
        weigh = () if self.fused else (self._weigh(output, self._weighted),)
        sent = self._counted(self._rows("permuted", size.hidden)), self._counted(self._ordered)
        back = replace(self._counted(self._returning), tensor_sharded=False)
        counts = () if self.shape.pads_to_capacity else (self._count(),)
        drops = self.shape.drops(size.tokens)
        run = self._run(sent, back, weigh, drops)
        return (
            Stretch(
                inputs=(self.source.name,),
                outputs=(
                    *sent,
                    *(value_of(each.makes) for each in counts),
                    *self.losses.values(),
                ),
                operators=(*self.route(), *counts, *self.permute()),
                ends=SWAP_EXPERTS,
                routes=counts[0].makes.name if counts else "",
                drops=drops,
            ),
            *up,
            *self.losses.stretches(),
            *run,
            *down,
            Stretch(
                inputs=(back.name, *others),
                outputs=(target,),
                operators=(*self._returned(routed), *shared),
            ),
        )

    def _of_all_tokens(
        self, target: Value, adds: tuple[Tensor, tuple[Operator, ...]], others: tuple[str, ...]
    ) -> tuple[Stretch, ...]:
        """Return routing, and the experts of this rank on the tokens of all ranks."""
        steps = self._of_all_parts()
        steps.parts = 1  # rows are made here, not gathered
        made = steps._rows("fc2", self.size.hidden)
        results = made if self.fused else steps._weighted
        weigh = () if self.fused else (steps._weigh(made, results),)
        every = AllTokenExperts(
            size=self.size,
            experts=self.shape,
            name=self.name,
            source=self.source,
            probabilities=self.router.weights,
            loads=steps.loads,
            rows=steps._row_numbers,
        )
        route = Stretch(
            inputs=(self.source.name,),
            outputs=(value_of(every.map), value_of(every.probabilities), *self.losses.values()),
            operators=(*self.route(), every.routed()),
        )
        moved = steps._rows("permuted", self.size.hidden), steps._ordered, results
        experts = (*steps.experts(), *weigh)
        stretches = every.stretches(target, moved=moved, experts=experts, adds=adds, others=others)
        return (route, *self.losses.stretches(), *stretches)

    def _run(
        self,
        sent: tuple[Value, ...],
        back: Value,
        weigh: tuple[Operator, ...],
        drops: Drops | None,
    ) -> tuple[Stretch, ...]:
        """Return the experts of this rank, from the rows `sent` to the rows that go `back`.

        Ranks with parts of an expert gather their rows, and add up and scatter the results, in the
        format of the weights (`dispatch_postprocess` and `combine_preprocess` of
        MoEAlltoAllTokenDispatcher, megatron/core/transformer/moe/token_dispatcher.py in August
        2026, d98e8a64).
        """
        read = tuple(each.name for each in sent)
        whole = Stretch(
            inputs=read,
            outputs=(back,),
            operators=(*self.experts(), *weigh),
            ends=SWAP_EXPERTS,
            drops=drops,
        )
        if self.parts == 1:
            return (whole,)
        steps = self._of_all_parts()
        output = steps._rows("fc2", self.size.hidden)
        weighed = () if self.fused else (steps._weigh(output, steps._weighted),)
        made = output if self.fused else steps._weighted
        partial = self._tensor("partial", self.copies * self.size.hidden, self.size.wide)
        value = replace(self._counted(partial), tensor_sharded=True)
        all_rows = replace(partial, elements=partial.elements * self.parts)
        return (
            Stretch(
                inputs=read,
                outputs=(value,),
                operators=(*steps.experts(), *weighed, self.rows.cast(made, all_rows)),
                begins=gather_tokens(),
                ends=sum_outputs(),
                drops=drops,
            ),
            Stretch(
                inputs=(value.name,),
                outputs=(back,),
                operators=(self.rows.cast(partial, tensor_of(back)),),
                ends=SWAP_EXPERTS,
                drops=drops,
            ),
        )

    def _of_all_parts(self) -> "_ExpertSteps":
        """Return the steps on the rows of all ranks with parts of the same experts."""
        other = copy(self)
        other.shape = replace(
            self.shape, intermediate_size=self.shape.intermediate_size // self.parts
        )
        other.loads = repeated(self.loads, self.parts)
        other.copies = other.loads.total
        other.rows = ExpertRows(size=self.size, loads=other.loads, loops=self.loop)
        other.weights = replace(self.weights, elements=self.weights.elements * self.parts)
        return other

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor that is saved for rows that an operator read: the gathered ones."""
        gathered = self.parts > 1 and tensor.name in {
            self._rows("permuted", 1).name,
            self._ordered.name,
        }
        return replace(tensor, name=f"{tensor.name}/whole") if gathered else tensor

    def _counted(self, tensor: Tensor) -> Value:
        """Return the value of rows whose number depends on the data."""
        return replace(value_of(tensor), copies=self.copies, tensor_sharded=self.parts > 1)

    def _count(self) -> Operator:
        """Return the numbers of copies for each expert, sums of the map over tokens."""
        experts = self.shape.count
        counts = self._tensor("counts", experts, DType.INT64)
        return Operator(reads=(), makes=counts, forward=(summed_map(self.size, experts),))

    @property
    def _ordered(self) -> Tensor:
        """The weights in the order of experts.

        Fused kernels and loops order them as they multiply. Weights that are exchanged arrive in
        this order.
        """
        if self.exchanges and (self.fused or self.loop):
            return self.weights
        return self._tensor("ordered", self.copies, self.wide)

    @property
    def _returning(self) -> Tensor:
        """The rows that go back to their tokens: outputs of experts, weighted or not."""
        if self.parts > 1:
            return self._rows("reduced", self.size.hidden)
        return self._fc2 if self.fused else self._weighted

    @property
    def _fc2(self) -> Tensor:
        return self._rows("fc2", self.size.hidden)

    @property
    def _weighted(self) -> Tensor:
        return self._rows("weighted", self.size.hidden)

    def permute(self) -> tuple[Operator, ...]:
        """Return the copies of tokens in the order of experts.

        A loop finds the tokens of each expert with a kernel that the host waits for.
        """
        size, copies = self.size, self.copies
        moved = (size.tokens + copies) * size.hidden * size.dtype.size_bytes
        copies_first: dict[bool, tuple[Kernel, ...]] = {
            way: self._moves(moved, backward=way) if self.rows.permutes_first else ()
            for way in (False, True)
        }
        finds = self._over((copies,), size.wide, 8)  # sorts numbers of eight bytes, in two passes
        permute = Operator(
            reads=(self.source,),
            makes=self._rows("permuted", size.hidden),
            saves=(self._row_numbers,),
            forward=(*(self._each(finds) if self.loop else (finds,)), *copies_first[False]),
            backward=copies_first[True],
        )
        if self.fused or self.loop:
            return (permute,)
        order = Operator(
            reads=(self.weights,),
            makes=self._tensor("ordered", copies, size.wide),
            saves=(self._tensor("order", copies, DType.INT64),),
            forward=(self._over((copies,), size.wide, 2),),
            backward=(self._over((copies,), size.wide, 2, backward=True),),
        )
        return (permute, order)

    def experts(self) -> tuple[Operator, ...]:
        """Return the products of the experts and the activation between them.

        Rows that came from several ranks are first sorted by expert, and sorted back in the end.
        """
        size = self.size
        product, output = self._rows("product", self.shape.intermediate_size), self._fc2
        (first, *ups), middle = self._up(self._rows("permuted", size.hidden), product)
        *down, last = self._grouped(product, output, "down")
        arranged, back = (self.rows.arranged(backward=way) for way in (False, True))
        places = (self._tensor("places", self.copies, DType.INT64),) if self.at_source else ()
        if Recomputed.EXPERT_ACTIVATION in size.shape.execution.recomputes:
            *down, last = recomputed((*middle, *down, last), middle)
            middle = ()
        return (
            replace(
                first,
                saves=(*first.saves, *places),
                forward=(*arranged, *first.forward),
                backward=(*first.backward, *back),
            ),
            *ups,
            *middle,
            *down,
            replace(last, forward=(*last.forward, *arranged), backward=(*back, *last.backward)),
        )

    def _up(
        self, permuted: Tensor, product: Tensor
    ) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
        """Return the products before the activation, which may be one, and the activation."""
        inner = self.shape.intermediate_size
        if self.at_source and not self.shape.bias:
            # GroupedExperts.forward (torchtitan/models/common/moe.py): w1_EFD, w3_EFD
            gate, up = self._rows("gate", inner), self._rows("up", inner)
            ups = *self._grouped(permuted, gate, "gate"), *self._grouped(permuted, up, "up")
        else:
            gate = up = self._rows("fc1", 2 * inner)
            ups = self._grouped(permuted, gate, "gate_up")
        if self.fused:
            return ups, (self._fused_gate((gate,) if up is gate else (gate, up), product),)
        active = self._rows("active", inner)
        return ups, (self._curve(gate, active), self._times(up, active, product))

    def combine(self, target: Tensor) -> tuple[Operator, ...]:
        """Return the sum of the outputs of each token's experts, in the order of tokens."""
        weigh = self._weigh(self._fc2, self._weighted)
        return (*(() if self.fused else (weigh,)), *self._returned(target))

    def _returned(self, target: Tensor) -> tuple[Operator, ...]:
        """Return the sums of results in the order of tokens, from those in the order of experts."""
        size = self.size
        output = self._returning
        moved = (size.tokens + self.copies) * size.hidden * size.dtype.size_bytes
        sums = Operator(
            reads=(output,),
            makes=target,
            # the permutation, of another segment if tokens are exchanged, saves them as well
            saves=() if self.exchanges else (self._row_numbers,),
            forward=self._moves(moved) if self.rows.permutes_first else (),
            backward=self._moves(moved, backward=True) if self.rows.permutes_first else (),
        )
        if self.fused:
            return (sums,)
        if self.loop:
            # `index_add_` keeps its source, for its shape alone
            return (replace(sums, saves=(output, *sums.saves)),)
        turned = self._rows("turned", size.hidden)
        area = (self.copies, size.hidden)
        turn = Operator(
            reads=(output,),
            makes=turned,
            saves=(self._tensor("back", self.copies, DType.INT64),),
            forward=(self._over(area, size.dtype, 2),),
            backward=(self._over(area, size.dtype, 2, backward=True),),
        )
        return (turn, replace(sums, reads=(turned,), saves=()))

    def _weigh(self, output: Tensor, target: Tensor) -> Operator:
        """Return the products of outputs and weights."""
        ordered = self._ordered
        area, dtype = (self.copies, self.size.hidden), self.size.dtype
        kernel = KernelKind.ELEMENTWISE
        back = self._each(streaming(kernel, area, dtype, streams=2, backward=True))
        return Operator(
            reads=(output, self.weights if self.loop else ordered),
            makes=target,
            saves=(output, self._kept(ordered)),
            forward=self._each(streaming(kernel, area, dtype, streams=2)),
            backward=(*back, *back),
        )

    def _grouped(self, source: Tensor, target: Tensor, part: str) -> tuple[Operator, ...]:
        """Return the linear layer `part` of all experts, and the sum with its biases."""
        size, experts = self.size, self.held
        rows, columns = (each.elements // self.copies for each in (target, source))
        weight = self._parameter(f"{part}.weight", experts, rows, columns)
        nt, nn, tn = OperandLayout
        trains = self._products(rows, columns, tn, backward=True)
        kept = self._kept(source)
        if (narrow := self.rows.narrow) is not None:  # Transformer Engine keeps the cast rows
            stored = narrow.stored_bytes(self.rows.padded.total, columns)
            kept = Tensor(name=f"{source.name}/cast", elements=stored, dtype=DType.INT8)
        project = Operator(
            reads=(source,),
            makes=target,
            parameters=(weight,),
            saves=() if weight.frozen else (kept, *self._offsets),
            forward=(
                *self.rows.casts(columns),
                *self._products(rows, columns, nt, backward=False),
            ),
            backward=(
                *self.rows.casts(rows, backward=True),
                *self._products(columns, rows, nn, backward=True),
            ),
            trains=() if weight.frozen else trains,
        )
        if not self.shape.bias:
            return (project,)
        bias = self._parameter(f"{part}.bias", experts, rows)
        plain = replace(target, name=f"{target.name}/unbiased")
        add = Operator(
            reads=(plain,),
            makes=target,
            parameters=(bias,),
            saves=(self._row_numbers,),
            shares_gradient=True,
            forward=(self._over((self.copies, rows), size.dtype, 3),),
            trains=() if bias.frozen else (column_sum(size, rows, tokens=self.copies),),
        )
        return (replace(project, makes=plain), add)

    def _products(
        self, n: int, k: int, layout: OperandLayout, *, backward: bool
    ) -> tuple[Kernel, ...]:
        """Return the products of all experts: one kernel, or one for each expert with tokens."""
        dtype = self.size.dtype
        if not self.loop:
            return (self.rows.product(n, k, layout, backward=backward),)
        return tuple(
            matmul(
                *((n, k, rows) if layout is OperandLayout.TN else (rows, n, k)),
                dtype,
                backward=backward,
                layout=layout,
            )
            for rows in self._rows_of_each()
        )

    @property
    def _row_numbers(self) -> Tensor:
        """The token of each copy; a loop also keeps its place among the experts of the token."""
        return self._tensor("rows", self.copies * (2 if self.loop else 1), DType.INT64)

    @property
    def _offsets(self) -> tuple[Tensor, ...]:
        """The first row of each expert, in four bytes, if one kernel has all rows."""
        return () if self.loop else (self._tensor("offsets", 4 * self.shape.count, DType.INT8),)

    def _rows_of_each(self) -> Iterator[int]:
        """Yield the rows of each expert that has any."""
        for experts, rows in self.loads.groups:
            yield from repeat(rows, experts if rows else 0)

    def _fused_gate(self, halves: tuple[Tensor, ...], target: Tensor) -> Operator:
        """Return activation, product and, if they are here, weights in one kernel per direction."""
        inner = self.shape.intermediate_size
        return Operator(
            reads=(*halves, *(() if self.at_source else (self.weights,))),
            makes=target,
            saves=(*halves, *(() if self.at_source else (self._kept(self._ordered),))),
            forward=(self._over((self.copies, inner), self.size.dtype, 3),),
            backward=(self._over((self.copies, inner), self.size.dtype, 5, backward=True),),
        )

    def _curve(self, source: Tensor, target: Tensor) -> Operator:
        """Return the activation of the first half of each row."""
        area, kind = (self.copies, self.shape.intermediate_size), KernelKind.ACTIVATION
        dtype = self.size.dtype
        return Operator(
            reads=(source,),
            makes=target,
            saves=(source,),
            forward=self._each(streaming(kind, area, dtype, streams=2)),
            backward=self._each(streaming(kind, area, dtype, streams=3, backward=True)),
        )

    def _times(self, source: Tensor, active: Tensor, target: Tensor) -> Operator:
        """Return the product of the activation and the second half of each row."""
        area, kind = (self.copies, self.shape.intermediate_size), KernelKind.ELEMENTWISE
        dtype = self.size.dtype
        back = self._each(streaming(kind, area, dtype, streams=3, backward=True))
        return Operator(
            reads=(active, source),
            makes=target,
            saves=(active, source),
            forward=self._each(streaming(kind, area, dtype, streams=3)),
            backward=(*back, *back),
        )

    def _each(self, kernel: Kernel) -> tuple[Kernel, ...]:
        """Return a kernel over the rows of all experts, or its parts if experts run in a loop."""
        if not self.loop:
            return (replace(kernel, loads=self.loads),)
        whole = kernel.shape[0]
        return tuple(
            replace(
                kernel,
                flops=kernel.flops * rows // whole,
                bytes=kernel.bytes * rows // whole,
                shape=(rows, *kernel.shape[1:]),
            )
            for rows in self._rows_of_each()
        )

    def _moves(self, moved: int, *, backward: bool = False) -> tuple[Kernel, ...]:
        """Return the kernels that move this many bytes of rows of the hidden state."""
        kernel = Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=moved // self.size.dtype.size_bytes,
            bytes=moved,
            dtype=self.size.dtype,
            shape=(self.copies, self.size.hidden),
            backward=backward,
        )
        return self._each(kernel)

    def _over(
        self, shape: tuple[int, ...], dtype: DType, streams: int, *, backward: bool = False
    ) -> Kernel:
        """Return a kernel over `streams` tensors of `shape`, whose rows may be token copies."""
        kernel = streaming(KernelKind.ELEMENTWISE, shape, dtype, streams=streams, backward=backward)
        routed = shape[0] == self.copies and not self.loop
        return replace(kernel, loads=self.loads) if routed else kernel

    def _parameter(self, part: str, *shape: int) -> Parameter:
        name = f"{self.name}.experts.{part}"
        return replace(self.size.copied(name, *shape), experts=shape[0])

    def _tensor(self, part: str, elements: int, dtype: DType) -> Tensor:
        return Tensor(name=f"{self.name}/experts/{part}", elements=elements, dtype=dtype)

    def _rows(self, part: str, width: int) -> Tensor:
        """Return a tensor of `width` elements for each copy of a token."""
        return self._tensor(part, self.copies * width, self.size.dtype)
