"""Sizes of the parts of a transformer on one rank of the tensor axis."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from zsim.dtype import DType
from zsim.model.architecture import Architecture, Norm
from zsim.model.generator import Draws
from zsim.model.model import Parameter, Value
from zsim.model.narrow_products import NarrowProducts
from zsim.model.segment_exchange import SegmentExchange, gather_tokens, sum_outputs
from zsim.model.token_loads import TokenLoads
from zsim.model.transformer.operator import Tensor
from zsim.strategy.execution import Norms, TokenFusion


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A resolved shape: sequences of a micro-batch, ranks of the tensor axis, formats.

    `dtype` is the format of activations, `wide` that of statistics and of the loss. With
    `sequence`, values between attention and MLP are sharded by tokens over the tensor axis. With
    `keeps_gathered`, gathered values are kept for backward instead of gathered again. With
    `in_place_loss`, the gradient of the logits replaces their softmax in memory, as in a
    vocabulary-parallel cross entropy. In a layer that `stays_wide`, all GEMMs are in `dtype`.
    `loads` are the token copies of the experts of a block; None is the same number for each.
    """

    shape: Architecture
    sequences: int
    tensor: int
    dtype: DType
    wide: DType
    sequence: bool = False
    keeps_gathered: bool = False
    in_place_loss: bool = False
    stays_wide: bool = False
    loads: TokenLoads | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch whose hidden state this rank holds outside attention and MLP."""
        return self.tokens // self.tensor if self.sequence else self.tokens

    @property
    def of_own_tokens(self) -> "Size":
        """The size of a rank that has its own tokens alone, as one sequence, and no tensor axis."""
        if not self.cut:
            return self
        length = self.own_tokens * self.shape.execution.context
        shape = replace(self.shape, sequence_length=length)
        return replace(self, shape=shape, sequences=1, tensor=1, sequence=False)

    @property
    def length(self) -> int:
        """Tokens of a sequence on this rank."""
        return self.shape.sequence_length // self.shape.execution.context

    @property
    def narrow(self) -> NarrowProducts | None:
        """Casts of narrow GEMMs of linear layers inside blocks; None if these are in `dtype`."""
        execution = self.shape.execution
        if execution.recipe is None or self.stays_wide:
            return None
        return NarrowProducts(
            recipe=execution.recipe,
            quantizer=execution.quantizer,
            any_layout=execution.any_layout,
        )

    @property
    def hidden(self) -> int:
        """Elements of a token in the hidden state."""
        return self.shape.hidden_size

    @property
    def heads(self) -> int:
        """Query heads on this rank."""
        return self.shape.attention_heads // self.tensor

    @property
    def shared_heads(self) -> int:
        """Key and value heads on this rank."""
        return self.shape.shared_heads // self.tensor

    @property
    def query_width(self) -> int:
        """Elements of a token in the queries of this rank."""
        return self.heads * self.shape.head_width

    @property
    def key_width(self) -> int:
        """Elements of a token in the keys of this rank, and in its values."""
        return self.shared_heads * self.shape.head_width

    @property
    def inner_width(self) -> int:
        """Elements of a token inside this rank's part of the MLP."""
        return self.shape.wide // self.tensor

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of this rank's logits, padded to equal parts as in Megatron-LM."""
        return -(-self.shape.vocab_size // self.tensor)

    @property
    def cut(self) -> bool:
        """Return True if there is a tensor axis."""
        return self.tensor > 1

    def value(self, name: str) -> Value:
        """Return a hidden state called `name`."""
        return Value(
            name=name,
            elements=self.own_tokens * self.hidden,
            dtype=self.dtype,
            tensor_sharded=self.sequence,
        )

    @property
    def gathers_each(self) -> bool:
        """Return True if each linear layer of a block gathers its input tokens."""
        return self.cut and self.sequence and self.shape.execution.gathers_each

    @property
    def float8_tokens(self) -> bool:
        """Return True if linear layers of a block gather tokens in 8-bit floats."""
        casts = self.shape.execution.float8_tokens and not self.stays_wide
        return self.cut and self.sequence and casts

    @property
    def token_gather(self) -> SegmentExchange | None:
        """Return the exchange that begins a part of a block; None without a tensor axis."""
        return gather_tokens(narrow=self.float8_tokens) if self.cut else None

    @property
    def token_sum(self) -> SegmentExchange | None:
        """Return the exchange that ends a part of a block; None without a tensor axis."""
        return sum_outputs(narrow=self.float8_tokens) if self.cut else None

    @property
    def fused_by(self) -> TokenFusion | None:
        """How products of a block are fused with collectives of its tokens; None if not."""
        found = self.shape.execution.fuses_tokens
        return found if self.cut and (self.sequence or found is TokenFusion.NCCL) else None

    @property
    def fuses_gathers(self) -> bool:
        """Return True if the compiler fuses products with gathers: only for several sequences.

        With one sequence, tokens are the first axis with more than one element. The gathered tensor
        is then viewed and not concatenated (`_maybe_view_chunk_cat`, torch 2.13), so no pattern is
        a gather along tokens (`find_all_gather_patterns`,
        torch/_inductor/fx_passes/micro_pipeline_tp.py).
        """
        return self.fused_by is TokenFusion.COMPILER and self.sequences > 1

    @property
    def composes_norms(self) -> bool:
        """Return True if each norm runs as several kernels."""
        execution, norm = self.shape.execution, self.shape.norm
        return execution.norms is Norms.COMPOSED and norm is Norm.RMS and not execution.compiled

    @property
    def replicates_embedding(self) -> bool:
        """Return True if each rank of the tensor axis holds the whole token embedding.

        An embedding tied to the head's weight is sharded like that.
        """
        is_own = self.cut and self.sequence and not self.shape.tied_embeddings
        return is_own and self.shape.execution.replicates_embedding

    @property
    def rearranges(self) -> bool:
        """Return True if collectives along tokens need copies of whole tensors."""
        return self.cut and self.sequence and self.shape.execution.rearranges

    @property
    def draws(self) -> Draws | None:
        """How ranks of the tensor axis drop elements of a hidden state; None without dropout."""
        if not self.shape.dropout:
            return None
        return Draws.APART if self.sequence else Draws.ALIKE

    def masks(self, value: Value) -> tuple[Tensor, ...]:
        """Return the saved dropout mask of a hidden state, one byte per element, if any."""
        if not self.shape.dropout:
            return ()
        return (Tensor(name=f"{value.name}/mask", elements=value.elements, dtype=DType.INT8),)

    def whole(self, value: Value) -> Tensor:
        """Return all tokens of a hidden state."""
        return Tensor(name=value.name, elements=self.tokens * self.hidden, dtype=self.dtype)

    def kept(self, value: Value) -> Tensor:
        """Return the tensor that a linear layer with gathered input saves for backward."""
        whole = self.whole(value)
        if not (self.sequence and self.keeps_gathered):
            return whole
        return Tensor(name=f"{value.name}/whole", elements=whole.elements, dtype=whole.dtype)

    def kept_in_block(self, value: Value) -> Tensor:
        """Return the tensor that a linear layer of a block saves, possibly in 8-bit floats."""
        kept = self.kept(value)
        is_narrow = self.float8_tokens and self.keeps_gathered
        return replace(kept, dtype=DType.FP8) if is_narrow else kept

    def rows(self, name: str, width: int) -> Tensor:
        """Return a tensor of `width` elements per token."""
        return Tensor(name=name, elements=self.tokens * width, dtype=self.dtype)

    def part(self, name: str, *shape: int) -> Parameter:
        """Return a parameter sharded over the tensor axis, with this shape on each rank."""
        return Parameter(
            name=name, shape=shape, tensor_sharded=self.cut, frozen=self.is_frozen(name)
        )

    def copied(self, name: str, *shape: int) -> Parameter:
        """Return a parameter replicated over the tensor axis."""
        return Parameter(name=name, shape=shape, frozen=self.is_frozen(name))

    def copied_for_heads(self, name: str, *shape: int) -> Parameter:
        """Return a parameter replicated over the tensor axis, which serves a rank's own heads."""
        return replace(self.copied(name, *shape), serves_own_heads=self.cut)

    def is_frozen(self, name: str) -> bool:
        """Return True if a parameter is not trained; with adapters, only these are trained."""
        if self.shape.lora is not None and ".lora_" not in name:
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.shape.frozen)
