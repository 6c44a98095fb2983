"""Experts that read the tokens of all expert ranks, and results that these ranks add up.

`MoEAllGatherTokenDispatcher` of Megatron-LM (megatron/core/transformer/moe/token_dispatcher.py in
August 2026, d98e8a64). Every rank gathers tokens, the map from tokens to experts, and the weights
of all experts. It selects the rows of its experts, runs them, and adds them up in the order of
tokens. In the format of the weights, which is that of the router's logits, results are added up
over ranks, and each rank keeps the sums of its tokens.
"""

from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.expert_transport import ExpertChoice
from zsim.model.experts import Experts
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import Value
from zsim.model.segment_exchange import SUM_OF_EXPERTS, gather_for_experts
from zsim.model.token_loads import TokenLoads
from zsim.model.transformer.operator import Operator, Stretch, Tensor, tensor_of
from zsim.model.transformer.size import Size
from zsim.model.transformer.source_weights import value_of

KIND = KernelKind.ELEMENTWISE
MAP = DType.INT8
"""A byte for each pair of a token and an expert."""

Operators = tuple[Operator, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllTokenExperts:
    """Selection of rows from the tokens of all ranks, and their sums, in the block `name`.

    Attributes:
        size: the tokens of this rank.
        experts: the experts of the block.
        name: the block.
        source: the tokens.
        probabilities: the weights of all experts for each token; zero unless chosen.
        loads: the rows of the experts of this rank, from all ranks.
        rows: the token of each row.
    """

    size: Size
    experts: Experts
    name: str
    source: Tensor
    probabilities: Tensor
    loads: TokenLoads
    rows: Tensor

    @property
    def ranks(self) -> int:
        """Ranks whose tokens are gathered: of different experts, and of parts of the same ones."""
        return self.size.shape.execution.expert * self.size.shape.execution.expert_tensor

    @property
    def held(self) -> int:
        """Experts of this rank."""
        return self.experts.count // self.size.shape.execution.expert

    @property
    def map(self) -> Tensor:
        """The map from tokens to experts."""
        return self._tensor("routing_map", self.size.tokens * self.experts.count, MAP)

    def routed(self) -> Operator:
        """Return the map, which the kernels of the choice write."""
        return Operator(reads=(), makes=self.map)

    def stretches(
        self,
        target: Value,
        *,
        moved: tuple[Tensor, Tensor, Tensor],
        experts: Operators,
        adds: tuple[Tensor, Operators],
        others: tuple[str, ...],
    ) -> tuple[Stretch, ...]:
        """Return the counts of rows, the experts on all tokens, and the results of own tokens.

        `moved` are the rows that the experts read, their weights, and the results. `adds` are the
        sums of routed experts, and steps that add shared ones, which read `others`.
        """
        permuted, weights, results = moved
        (routed, shared), counts = adds, self._count()
        inputs = (self.map.name, self.probabilities.name, self.source.name)
        wide = self.probabilities.dtype
        casts = wide is not self.size.dtype
        summed = replace(target, name=f"{self.name}/experts/summed", dtype=wide)
        if not (casts or shared):
            summed = target
        elif not casts:
            summed = replace(target, name=routed.name)
        own = tensor_of(summed)
        last = (self._cast(own, routed),) if casts else ()
        made = (
            Stretch(
                inputs=inputs,
                outputs=(value_of(counts.makes),),
                operators=(counts,),
                begins=gather_for_experts(stays=True),
                routes=counts.makes.name,
            ),
            Stretch(
                inputs=inputs,
                outputs=(summed,),
                operators=(
                    self._select_weights(weights),
                    self._permute(permuted),
                    *experts,
                    *self._add_up(results, replace(own, elements=own.elements * self.ranks)),
                ),
                begins=gather_for_experts(),
                ends=SUM_OF_EXPERTS,
            ),
        )
        if summed is target:
            return made
        after = Stretch(
            inputs=(summed.name, *others), outputs=(target,), operators=(*last, *shared)
        )
        return (*made, after)

    @property
    def _all_tokens(self) -> int:
        return self.size.tokens * self.ranks

    def _count(self) -> Operator:
        """Return the rows of each own expert, sums of the map over all tokens."""
        area = (self._all_tokens, self.held)
        elements = area[0] * area[1]
        moved = 3 * elements * MAP.size_bytes  # cuts the map out, then adds up
        sums = Kernel(kind=KIND, flops=elements, bytes=moved, dtype=self.size.dtype, shape=area)
        counts = self._tensor("counts", self.held, DType.INT64)
        return Operator(reads=(), makes=counts, forward=(sums,))

    def _select_weights(self, target: Tensor) -> Operator:
        """Return the weights of the rows, in the order of own experts.

        Upstream cuts out own experts, transposes, and selects (`masked_select`). In backward it
        writes zeros where a token has another expert.
        """
        own, every = (self._all_tokens, self.held), (self._all_tokens, self.experts.count)
        dtype = self.probabilities.dtype
        back = [streaming(KIND, own, dtype, streams=2, backward=True)] * 2
        return Operator(
            reads=(self.probabilities,),
            makes=target,
            saves=(self._tensor("local_map", own[0] * own[1], MAP),),
            forward=(streaming(KIND, own, dtype, streams=2),) * 3,
            backward=(*back, streaming(KIND, every, dtype, streams=1, backward=True)),
        )

    def _permute(self, target: Tensor) -> Operator:
        """Return a row for each own expert of a token; tokens without any are not read."""
        return Operator(
            reads=(self.source,),
            makes=target,
            saves=(self.rows,),
            forward=(self._moves(self._read_tokens),),
            backward=(self._moves(self._all_tokens, backward=True),),
        )

    def _add_up(self, results: Tensor, target: Tensor) -> Operators:
        """Return the sums of the rows of each token, zero without rows, in the wide format."""
        casts = target.dtype is not self.size.dtype
        made = self._tensor("local", target.elements, self.size.dtype) if casts else target
        sums = Operator(
            reads=(results,),
            makes=made,
            saves=(self.rows,),
            forward=(self._moves(self._all_tokens),),
            backward=(self._moves(self._read_tokens, backward=True),),
        )
        return (sums, self._cast(made, target)) if casts else (sums,)

    @property
    def _read_tokens(self) -> int:
        """Tokens of all ranks with experts of this rank."""
        expert = self.size.shape.execution.expert
        places = ExpertChoice.of(self.experts).places(expert)
        return round(self._all_tokens * places / expert)

    def _moves(self, tokens: int, *, backward: bool = False) -> Kernel:
        """Return the kernel that copies `tokens` to rows, or adds rows up."""
        rows = (tokens + self.loads.total, self.size.hidden)
        found = streaming(KIND, rows, self.size.dtype, streams=1, backward=backward)
        return replace(found, shape=(self.loads.total, self.size.hidden), loads=self.loads)

    def _cast(self, source: Tensor, target: Tensor) -> Operator:
        """Return the cast of hidden states to another format."""
        forward, backward = (
            Kernel(
                kind=KIND,
                flops=target.elements,
                bytes=source.size_bytes + target.size_bytes,
                dtype=self.size.dtype,
                shape=(target.elements // self.size.hidden, self.size.hidden),
                backward=way,
            )
            for way in (False, True)
        )
        return Operator(reads=(source,), makes=target, forward=(forward,), backward=(backward,))

    def _tensor(self, part: str, elements: int, dtype: DType) -> Tensor:
        return Tensor(name=f"{self.name}/experts/{part}", elements=elements, dtype=dtype)
