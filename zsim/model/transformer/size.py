"""The numbers that the parts of a transformer are made of, on one rank of the tensor axis."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from zsim.dtype import DType
from zsim.model.architecture import Architecture, Norm
from zsim.model.generator import Draws
from zsim.model.model import Parameter, Value
from zsim.model.transformer.operator import Tensor
from zsim.strategy.execution import Float8, Norms, TokenFusion


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A shape, resolved: sequences of a micro-batch, ranks of the tensor axis, formats.

    `dtype` is the format of activations, `wide` that of statistics and of the loss. `sequence` says
    that what flows between attention and MLP is cut by tokens over the tensor axis; `keeps_whole`
    that what was gathered of it is kept for backward instead of gathered again. `in_place_loss`
    says that the gradient of the logits is made in the place of their softmax, as a
    vocabulary-parallel cross entropy does.
    """

    shape: Architecture
    sequences: int
    tensor: int
    dtype: DType
    wide: DType
    sequence: bool = False
    keeps_whole: bool = False
    in_place_loss: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch whose hidden state this rank has outside attention and MLP."""
        return self.tokens // self.tensor if self.sequence else self.tokens

    @property
    def length(self) -> int:
        """Tokens of a sequence that this rank has."""
        return self.shape.sequence_length // self.shape.execution.context

    @property
    def float8(self) -> Float8 | None:
        """Return how linear layers inside blocks are narrower than the rest; None if not."""
        return self.shape.execution.float8

    @property
    def hidden(self) -> int:
        """Elements of a token in the hidden state."""
        return self.shape.hidden_size

    @property
    def heads(self) -> int:
        """Heads of queries that this rank has."""
        return self.shape.attention_heads // self.tensor

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values that this rank has."""
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
        """Tokens whose logits this rank makes; padded, as Megatron-LM does, to equal parts."""
        return -(-self.shape.vocab_size // self.tensor)

    @property
    def cut(self) -> bool:
        """Return whether there is a tensor axis."""
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
        """Return whether each linear layer of a block gathers the tokens that it reads."""
        return self.cut and self.sequence and self.shape.execution.gathers_each

    @property
    def float8_tokens(self) -> bool:
        """Return whether tokens that linear layers of a block gather come in 8-bit floats."""
        return self.cut and self.sequence and self.shape.execution.float8_tokens

    @property
    def fused_by(self) -> TokenFusion | None:
        """Return what fuses products of a block with collectives of its tokens, if anything."""
        found = self.shape.execution.fuses_tokens
        return found if self.cut and (self.sequence or found is TokenFusion.NCCL) else None

    @property
    def fuses_gathers(self) -> bool:
        """Return whether the compiler fuses them with gathers: of several sequences alone.

        Of one, tokens are the first axis that has any extent, so what was gathered is viewed and
        not put together (`_maybe_view_chunk_cat`, torch 2.13): no pattern is a gather along tokens
        (`find_all_gather_patterns`, torch/_inductor/fx_passes/micro_pipeline_tp.py).
        """
        return self.fused_by is TokenFusion.COMPILER and self.sequences > 1

    @property
    def composes_norms(self) -> bool:
        """Return whether norms are several kernels each."""
        execution, norm = self.shape.execution, self.shape.norm
        return execution.norms is Norms.COMPOSED and norm is Norm.RMS and not execution.compiled

    @property
    def whole_embedding(self) -> bool:
        """Return whether each rank of the tensor axis has all of the token embedding.

        One that is the head's weight, too, is cut as that is.
        """
        is_own = self.cut and self.sequence and not self.shape.tied_embeddings
        return is_own and self.shape.execution.whole_embedding

    @property
    def rearranges(self) -> bool:
        """Return whether collectives along tokens need copies of what is whole."""
        return self.cut and self.sequence and self.shape.execution.rearranges

    @property
    def draws(self) -> Draws | None:
        """Way in which ranks of the tensor axis drop elements of a hidden state, if they do."""
        if not self.shape.dropout:
            return None
        return Draws.APART if self.sequence else Draws.ALIKE

    def masks(self, value: Value) -> tuple[Tensor, ...]:
        """Bytes kept for backward of dropping elements of a hidden state: one for each."""
        if not self.shape.dropout:
            return ()
        return (Tensor(name=f"{value.name}/mask", elements=value.elements, dtype=DType.INT8),)

    def whole(self, value: Value) -> Tensor:
        """All tokens of a hidden state."""
        return Tensor(name=value.name, elements=self.tokens * self.hidden, dtype=self.dtype)

    def kept(self, value: Value) -> Tensor:
        """Return what a linear layer that reads all tokens keeps of a hidden state for backward."""
        whole = self.whole(value)
        if not (self.sequence and self.keeps_whole):
            return whole
        return Tensor(name=f"{value.name}/whole", elements=whole.elements, dtype=whole.dtype)

    def kept_in_block(self, value: Value) -> Tensor:
        """Return what a linear layer of a block, which may read 8-bit floats, keeps of it."""
        kept = self.kept(value)
        is_narrow = self.float8_tokens and self.keeps_whole
        return replace(kept, dtype=DType.FP8) if is_narrow else kept

    def rows(self, name: str, width: int) -> Tensor:
        """Return a tensor of `width` elements for each token."""
        return Tensor(name=name, elements=self.tokens * width, dtype=self.dtype)

    def part(self, name: str, *shape: int) -> Parameter:
        """Return a parameter of which each rank of the tensor axis has a part, of this shape."""
        return Parameter(
            name=name, shape=shape, tensor_sharded=self.cut, frozen=self.is_frozen(name)
        )

    def copied(self, name: str, *shape: int) -> Parameter:
        """Return a parameter of which each rank of the tensor axis has a copy."""
        return Parameter(name=name, shape=shape, frozen=self.is_frozen(name))

    def is_frozen(self, name: str) -> bool:
        """Tell whether a parameter is not trained: with adapters these alone are."""
        if self.shape.lora is not None and ".lora_" not in name:
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.shape.frozen)
