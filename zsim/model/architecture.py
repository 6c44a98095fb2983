"""Shapes of the models that zsim can build by itself, in the words of their configuration files.

Both families are decoder-only transformers with pre-norm; they differ in what a field is if nobody
says it.
"""

from dataclasses import dataclass
from enum import StrEnum

from zsim.strategy.execution import PLAIN, Execution


class ArchitectureError(ValueError):
    """A shape that cannot exist; the message starts with the name of the field."""


class Positions(StrEnum):
    """Positional encodings."""

    LEARNED = "learned"
    """A trained vector for each position is added to the embedding."""
    ROTARY = "rotary"
    """Queries and keys are rotated (Su et al. 2021, "RoFormer")."""
    ALIBI = "alibi"
    """Scores fall with distance (Press et al. 2021, "Train short, test long")."""


class Norm(StrEnum):
    """Norms: what each row is divided by."""

    LAYER = "layer"
    """Its deviation, after its mean is taken away (Ba et al. 2016)."""
    RMS = "rms"
    """Its root mean square (Zhang and Sennrich 2019)."""


class Activation(StrEnum):
    """Activation functions of an MLP."""

    GELU = "gelu"
    SWIGLU = "swiglu"
    """SiLU of one linear layer times another (Shazeer 2020)."""


class Attention(StrEnum):
    """Implementations of attention: how scores are held."""

    PLAIN = "plain"
    """The softmax of all scores is written to memory and kept for backward."""
    FLASH = "flash"
    """Scores stay on the chip (Dao et al. 2022): one number a row is kept."""
    FLASH2 = "flash2"
    """The same in other kernels (Dao 2023, "FlashAttention-2"), as PyTorch has since 2.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021, "LoRA", section 4): B A x is added to what W x makes.

    A has `rank` rows, B as many columns; they are trained, and nothing else is. `targets` are the
    linear layers of each block that have them; none named are those of queries and values, or the
    one that makes both.
    """

    rank: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only transformer: blocks of causal self-attention and an MLP.

    Attributes:
        layers: blocks.
        hidden_groups: modules that are blocks, each called by so many in a row: parameters shared
            across layers (Lan et al. 2020, "ALBERT", section 3.1; `num_hidden_groups` of Hugging
            Face); None is one for each.
        sequence_length, vocab_size: in tokens.
        tied_embeddings: the output projection is the token embedding.
        key_value_heads: heads of keys and values, each for as many of queries (Ainslie et al. 2023,
            "GQA"); None is one for each.
        head_size: of each head; None is hidden_size / attention_heads.
        intermediate_size: width inside the MLP; None is four times hidden_size.
        position_embeddings: learned positions that there are; None is sequence_length.
        bias: linear layers and layer norms have biases.
        qkv_bias: queries, keys and values have; None is as `bias` says.
        joined_qkv: one matrix makes queries, keys and values.
        parallel_residual: attention and MLP read the same hidden state (Black et al. 2022,
            "GPT-NeoX-20B", section 2.1).
        attention: how scores are held.
        recompute_attention: plain attention makes its scores again in backward instead of keeping
            them: selective recomputation (Korthikanti et al. 2022, section 5).
        dropout: the probability that an element is dropped: of a summand of the hidden state before
            it is added, of the sum of embeddings where positions are learned, of scores behind
            their softmax. 0 is no dropout.
        fused: biases, dropout, scale and mask of scores cost nothing beside the kernels that they
            follow. If not, each is a kernel of its own, and there is dropout, as in the first
            Megatron-LM (Shoeybi et al. 2019, section 3); what is saved is counted without it.
        frozen: patterns of names of parameters that are not trained; `*` is any part of a name.
        lora: adapters that are trained in place of the rest.
        execution: how a runtime executes it.
    """

    layers: int
    hidden_size: int
    attention_heads: int
    sequence_length: int
    vocab_size: int
    hidden_groups: int | None = None
    tied_embeddings: bool = False
    key_value_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int | None = None
    positions: Positions = Positions.LEARNED
    position_embeddings: int | None = None
    norm: Norm = Norm.LAYER
    activation: Activation = Activation.GELU
    bias: bool = True
    qkv_bias: bool | None = None
    joined_qkv: bool = True
    parallel_residual: bool = False
    attention: Attention = Attention.FLASH
    recompute_attention: bool = False
    dropout: float = 0.0
    fused: bool = True
    frozen: tuple[str, ...] = ()
    lora: LoRA | None = None
    execution: Execution = PLAIN

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden_groups",
            "hidden_size",
            "attention_heads",
            "sequence_length",
            "vocab_size",
            "key_value_heads",
            "head_size",
            "intermediate_size",
            "position_embeddings",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArchitectureError(f"model.{name}: {value} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ArchitectureError(f"model.dropout: {self.dropout} must be at least 0 and below 1")
        if self.hidden_groups is not None and self.layers % self.hidden_groups:
            raise ArchitectureError(
                f"model.hidden_groups: {self.hidden_groups} must divide layers {self.layers}"
            )
        if self.sequence_length % self.execution.context:
            raise ArchitectureError(
                f"model.sequence_length: {self.sequence_length} must be a multiple of context "
                f"{self.execution.context}"
            )
        if self.execution.context > 1 and self.attention is Attention.PLAIN:
            raise ArchitectureError(
                "model.attention: plain is not modelled for context of several ranks"
            )
        if self.head_size is None and self.hidden_size % self.attention_heads:
            raise ArchitectureError(
                f"model.attention_heads: {self.attention_heads} must divide hidden_size "
                f"{self.hidden_size}"
            )
        if self.attention_heads % self.shared_heads:
            raise ArchitectureError(
                f"model.key_value_heads: {self.shared_heads} must divide attention_heads "
                f"{self.attention_heads}"
            )
        if self.positions is Positions.ROTARY and self.head_width % 2:
            raise ArchitectureError(
                f"model.head_size: {self.head_width} must be even, rotary positions turn pairs"
            )
        if self.lora is not None:
            self._need_layers(self.lora)
        if self.position_embeddings is not None:
            if self.positions is not Positions.LEARNED:
                raise ArchitectureError(
                    f"model.position_embeddings: {self.position_embeddings} is for positions "
                    f"learned, not {self.positions}"
                )
            if self.position_embeddings < self.sequence_length:
                raise ArchitectureError(
                    f"model.sequence_length: {self.sequence_length} must be at most the "
                    f"{self.position_embeddings} position_embeddings"
                )

    def _need_layers(self, lora: LoRA) -> None:
        """Return if blocks have the layers that have adapters."""
        if lora.rank < 1:
            raise ArchitectureError(f"model.lora.rank: {lora.rank} must be at least 1")
        for name in lora.targets:
            if name not in self.linear_layers:
                allowed = ", ".join(self.linear_layers)
                raise ArchitectureError(f"model.lora.targets: {name!r} must be one of {allowed}")

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Linear layers of a block, by the part of the names of their parameters."""
        projections = ("qkv",) if self.joined_qkv else ("q", "k", "v")
        gate = ("gate",) if self.activation is Activation.SWIGLU else ()
        return (*projections, "proj", *gate, "up", "down")

    @property
    def adapted(self) -> frozenset[str]:
        """Linear layers of a block that have adapters."""
        if self.lora is None:
            return frozenset()
        return frozenset(self.lora.targets or (("qkv",) if self.joined_qkv else ("q", "v")))

    def module_of(self, layer: int) -> int:
        """Return the first of the blocks that are calls of one module, `layer` among them."""
        return layer - layer % (self.layers // (self.hidden_groups or self.layers))

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values."""
        return self.attention_heads if self.key_value_heads is None else self.key_value_heads

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return (
            self.hidden_size // self.attention_heads if self.head_size is None else self.head_size
        )

    @property
    def wide(self) -> int:
        """Elements of a token inside the MLP."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def places(self) -> int:
        """Learned positions; 0 where positions are not learned."""
        if self.positions is not Positions.LEARNED:
            return 0
        return self.position_embeddings or self.sequence_length

    @property
    def biased_qkv(self) -> bool:
        """Return whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT(Transformer):
    """As GPT-2 (Radford et al. 2019): learned positions, layer norms, GELU, biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Transformer):
    """As Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, no biases.

    Queries, keys and values have a matrix each.
    """

    positions: Positions = Positions.ROTARY
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SWIGLU
    bias: bool = False
    joined_qkv: bool = False


Architecture = GPT | Llama
