"""Shapes of the models that zsim can build, with the field names of their configuration files.

Both families are decoder-only transformers with pre-norm; they differ in the defaults of some
fields.
"""

from dataclasses import dataclass
from enum import StrEnum

from zsim.dtype import Quantization
from zsim.model.architecture_error import ArchitectureError
from zsim.model.experts import Experts, Latent
from zsim.model.kernel import CUDNN
from zsim.strategy.execution import PLAIN, Execution


class Positions(StrEnum):
    """Positional encodings."""

    LEARNED = "learned"
    """A trained vector for each position is added to the embedding."""
    ROTARY = "rotary"
    """Queries and keys are rotated (Su et al. 2021, "RoFormer")."""
    ALIBI = "alibi"
    """Scores fall with distance (Press et al. 2021, "Train short, test long")."""


class Norm(StrEnum):
    """Norms, by the divisor of each row."""

    LAYER = "layer"
    """Its standard deviation, after subtracting its mean (Ba et al. 2016)."""
    RMS = "rms"
    """Its root mean square (Zhang and Sennrich 2019)."""


class Activation(StrEnum):
    """Activation functions of an MLP."""

    GELU = "gelu"
    RELU = "relu"
    RELU2 = "relu2"
    """ReLU squared (So et al. 2021, "Primer", section 4.1)."""
    XIELU = "xielu"
    """A curve with two trained numbers in each block (Huang et al. 2024, arXiv 2411.13010)."""
    SWIGLU = "swiglu"
    """SiLU of one linear layer times another (Shazeer 2020)."""
    GEGLU = "geglu"
    """GELU of one linear layer times another (Shazeer 2020)."""


class NormPlacement(StrEnum):
    """Where blocks apply the norms of attention and of the MLP."""

    BEFORE = "before"
    """To the input: pre-norm (Xiong et al. 2020)."""
    AFTER = "after"
    """To the output, before it is added (OLMo et al. 2024, "2 OLMo 2 Furious", section 2.1)."""
    BOTH = "both"
    """To both (Gemma Team 2024, "Gemma 2", section 2)."""


class QKNorm(StrEnum):
    """Norms of queries and keys, before positional encoding."""

    HEAD = "head"
    """Of each head alone, with one scale for all heads (Qwen Team 2025, "Qwen3", section 2)."""
    UNSCALED = "unscaled"
    """Of each head alone, without a scale (Meta 2025, Llama 4)."""
    WIDTH = "width"
    """Of all heads together (OLMo et al. 2024, section 2.1)."""


class Attention(StrEnum):
    """Implementations of attention, by how they store scores."""

    PLAIN = "plain"
    """The softmax of all scores is written to memory and kept for backward."""
    FLASH = "flash"
    """Scores stay on the chip (Dao et al. 2022); one number per row is kept."""
    FLASH2 = "flash2"
    """Other kernels for the same (Dao 2023, "FlashAttention-2"), used by PyTorch since 2.2."""
    CUDNN = "cudnn"
    """cuDNN's kernels for the same. PyTorch prefers them on Hopper and Blackwell from cuDNN 9.15 on
    (its wheels of 2.11 have 9.19; `check_prefer_cudnn_attention` in sdp_utils.cpp). torchtitan's
    checkpointing by operations does not keep their output (`_op_sac_save_list` names
    `_scaled_dot_product_flash_attention` and the efficient one, November 2025)."""

    @property
    def version(self) -> int:
        """Return the version of its fused kernels, 1 to 3; 1 for plain attention."""
        return {Attention.FLASH2: 2, Attention.CUDNN: CUDNN}.get(self, 1)


HEAD = "head"
"""Name of the output projection among the targets of adapters."""

PROJECTIONS = ("q", "k", "v")
"""Names of the layers of queries, keys and values, or of parts of one joined layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021, "LoRA", section 4): B A x is added to the output W x.

    A has `rank` rows and B `rank` columns. Only these two are trained. `targets` are the linear
    layers of each block that have adapters; by default those of queries and values, or the layer
    that computes both; `HEAD` may be one. Parts of a joined layer, such as q and v, share one
    adapter (`LoRAQKVLinear` of LitGPT). `quantization` is the format of the frozen weights of all
    linear layers of blocks (Dettmers et al. 2023, "QLoRA"), and of the head if it `quantizes_head`;
    embeddings and norms are not quantized. If it `keeps_inputs`, autograd keeps the input of each
    quantized layer, as `MatMul4Bit` of bitsandbytes does before 0.43.2; if it `casts_weights`, the
    latter casts each dequantized weight to bf16, because weights were quantized from fp16.
    `dropout` is the probability that an element of the input of A is dropped, apart for each layer.
    """

    rank: int
    targets: tuple[str, ...] = ()
    quantization: Quantization | None = None
    quantizes_head: bool = False
    keeps_inputs: bool = False
    casts_weights: bool = False
    dropout: float = 0.0


HEAD_SIZE_MAX = 65_536
"""Maximum size of a head: 256 times the largest for which kernels exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only transformer: blocks of causal self-attention and an MLP.

    Attributes:
        layers: number of blocks.
        hidden_groups: number of modules for the blocks, each called several times in a row:
            parameters shared across layers (Lan et al. 2020, "ALBERT", section 3.1;
            `num_hidden_groups` of Hugging Face). None is one module per block.
        sequence_length, vocab_size: in tokens.
        tied_embeddings: the output projection is the token embedding.
        key_value_heads: heads of keys and values, each shared by equally many query heads (Ainslie
            et al. 2023, "GQA"). None is one per query head.
        head_size: elements of each head; None is hidden_size / attention_heads.
        intermediate_size: width inside the MLP; None is four times hidden_size.
        position_embeddings: number of learned positions; None is sequence_length.
        bias: linear layers and layer norms have biases.
        qkv_bias: the layers of queries, keys and values have biases; None is the value of `bias`.
        output_bias: the last layer of attention has a bias; None is the value of `bias`.
        norm_bias: layer norms have biases; None is the value of `bias`.
        norm_weight: norms have a scale. With neither scale nor bias they have no parameters
            (Groeneveld et al. 2024, "OLMo", section 2.1).
        head_bias: the output projection has a bias.
        embedding_norm: a norm follows the embedding (Le Scao et al. 2022, "BLOOM", section 3.2).
        norm_placement: where blocks apply norms.
        qk_norm: norms of queries and of keys, of the kind given by `norm`.
        joined_qkv: one matrix computes queries, keys and values.
        parallel_residual: attention and MLP read the same hidden state (Black et al. 2022,
            "GPT-NeoX-20B", section 2.1).
        shared_norm: they also share the norm before them (Almazrouei et al. 2023, "Falcon", 7B;
            Gunasekar et al. 2023, "Textbooks are all you need"). Needs parallel_residual.
        window: tokens that each token sees, including itself (Beltagy et al. 2020, "Longformer",
            section 3.1; Jiang et al. 2023, "Mistral 7B", section 2); None is all before it.
        global_every: with a window, every n-th block sees all tokens; None is no such block.
        attention: implementation of attention.
        recompute_attention: plain attention recomputes its scores in backward instead of keeping
            them: selective recomputation (Korthikanti et al. 2022, section 5).
        dropout: the probability that an element is dropped: in each term before it is added to the
            hidden state, in the sum of embeddings if positions are learned, and in scores after
            their softmax. 0 is no dropout.
        fused: biases, dropout, and the scale and mask of scores are free, as part of the kernels
            before them. If False, each is a separate kernel, and there is dropout, as in the first
            Megatron-LM (Shoeybi et al. 2019, section 3); saved tensors are counted without it.
        frozen: patterns of names of parameters that are not trained; `*` is any part of a name.
        lora: adapters; with them, all other parameters are frozen.
        experts: routed experts in place of the MLP of some blocks; None is an MLP in all of them.
        latent: attention with compressed keys and values; None: keys and values are not compressed.
        sinks: each head has a trained number that takes part in its softmax, with no value (OpenAI
            2025, "gpt-oss-120b & gpt-oss-20b model card", section 2.3).
        mtp_layers: blocks after the last one that predict one further token each, with the
            embedding and the head of the model (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).
        execution: how a runtime executes the model.
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
    output_bias: bool | None = None
    norm_bias: bool | None = None
    norm_weight: bool = True
    head_bias: bool = False
    embedding_norm: bool = False
    norm_placement: NormPlacement = NormPlacement.BEFORE
    qk_norm: QKNorm | None = None
    joined_qkv: bool = True
    parallel_residual: bool = False
    shared_norm: bool = False
    window: int | None = None
    global_every: int | None = None
    attention: Attention = Attention.FLASH
    recompute_attention: bool = False
    dropout: float = 0.0
    fused: bool = True
    frozen: tuple[str, ...] = ()
    lora: LoRA | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    sinks: bool = False
    mtp_layers: int = 0
    execution: Execution = PLAIN

    def __post_init__(self) -> None:
        self._need_positive_extents()
        if not 0 <= self.dropout < 1:
            raise ArchitectureError(f"model.dropout: {self.dropout} must be at least 0 and below 1")
        if self.hidden_groups is not None and self.layers % self.hidden_groups:
            raise ArchitectureError(
                f"model.hidden_groups: {self.hidden_groups} must divide layers {self.layers}"
            )
        context = self.execution.context
        if context > 1 and self.sequence_length % (2 * context):
            # Each rank has one part of either half, to balance the pairs of causal attention.
            raise ArchitectureError(
                f"model.sequence_length: {self.sequence_length} must be a multiple of twice the "
                f"context {context}"
            )
        if self.execution.context > 1 and self.attention is Attention.PLAIN:
            raise ArchitectureError(
                "model.attention: plain is not modelled for context of several ranks"
            )
        if (self.head_size or 0) > HEAD_SIZE_MAX:
            why = f"must be at most {HEAD_SIZE_MAX}"
            raise ArchitectureError(f"model.head_size: {self.head_size} {why}")
        if (
            self.head_size is None
            and self.latent is None
            and self.hidden_size % self.attention_heads
        ):
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
        self._need_fitting_norms()
        self._need_fitting_window()
        self._need_fitting_parts()
        if self.lora is not None:
            self._need_layers(self.lora)
        if self.position_embeddings is not None:
            self._need_positions(self.position_embeddings)

    def _need_positive_extents(self) -> None:
        """Raise ArchitectureError unless each extent is at least 1, or None."""
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
            "window",
            "global_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArchitectureError(f"model.{name}: {value} must be at least 1")

    def _need_positions(self, count: int) -> None:
        """Raise ArchitectureError unless positions are learned, with one for each token."""
        if self.positions is not Positions.LEARNED:
            raise ArchitectureError(
                f"model.position_embeddings: {count} is for positions learned, not {self.positions}"
            )
        if count < self.sequence_length:
            raise ArchitectureError(
                f"model.sequence_length: {self.sequence_length} must be at most the {count} "
                "position_embeddings"
            )

    def _need_fitting_norms(self) -> None:
        """Raise ArchitectureError unless the placement and kind of norms are supported."""
        after = self.norm_placement is not NormPlacement.BEFORE
        if after and (self.bias or self.biased_output or self.parallel_residual):
            named = "bias" if self.bias else "output_bias"
            named = "parallel_residual" if self.parallel_residual else named
            raise ArchitectureError(
                f"model.norm_placement: {self.norm_placement} needs {named} false, norms behind "
                "attention and MLP are modelled without"
            )
        if self.shared_norm and not self.parallel_residual:
            raise ArchitectureError("model.shared_norm: true needs parallel_residual true")
        if self.qk_norm is not None and self.joined_qkv:
            raise ArchitectureError(
                f"model.qk_norm: {self.qk_norm} needs joined_qkv false, queries and keys of their "
                "own"
            )

    def _need_fitting_window(self) -> None:
        """Raise ArchitectureError unless the window fields fit each other and the context."""
        if self.global_every is not None and self.window is None:
            raise ArchitectureError(f"model.global_every: {self.global_every} needs a window")
        if self.has_windows and self.execution.context > 1:
            raise ArchitectureError(
                f"model.window: {self.window} is not modelled for context of several ranks"
            )

    def _need_fitting_parts(self) -> None:
        """Raise ArchitectureError unless experts, latent attention and heads fit the rest."""
        if self.mtp_layers < 0:
            raise ArchitectureError(f"model.mtp_layers: {self.mtp_layers} must be at least 0")
        plain = self.attention is Attention.PLAIN
        latent = (
            ("positions", self.positions is not Positions.ROTARY),
            ("attention", plain),
            ("joined_qkv", self.joined_qkv),
            ("qk_norm", self.qk_norm is not None),
            ("qkv_bias", self.biased_qkv),
            ("head_size", self.head_size is not None),
            ("key_value_heads", self.shared_heads != self.attention_heads),
            ("lora", self.lora is not None),
            ("sinks", self.sinks),
        )
        mixed = (
            ("hidden_groups", self.hidden_groups is not None),
            ("fused", not self.fused),
            ("parallel_residual", self.parallel_residual),
            ("bias", self.bias),
            ("activation", not self.gated),
        )
        heads = (("norm_placement", self.norm_placement is not NormPlacement.BEFORE),)
        for part, has, conflicts in (
            ("latent", self.latent is not None, latent),
            ("experts", self.experts is not None, mixed),
            ("sinks", self.sinks, (("attention", plain),)),
            ("mtp_layers", self.mtp_layers > 0, (*heads, *mixed[:3])),
        ):
            for name, conflicting in conflicts:
                if has and self.execution.context > 1 and part != "experts":
                    raise ArchitectureError(
                        f"model.{part}: not modelled for context of several ranks"
                    )
                if has and conflicting:
                    value = getattr(self, name)
                    shown = f"{value} is" if isinstance(value, bool | int | str) else "is"
                    raise ArchitectureError(f"model.{name}: {shown} not modelled with {part}")

    def _need_layers(self, lora: LoRA) -> None:
        """Raise ArchitectureError unless the rank is positive and blocks have the target layers."""
        if lora.rank < 1:
            raise ArchitectureError(f"model.lora.rank: {lora.rank} must be at least 1")
        layers = self.linear_layers if self.tied_embeddings else (*self.linear_layers, HEAD)
        if lora.quantizes_head and (self.tied_embeddings or lora.quantization is None):
            needs = "an untied head" if self.tied_embeddings else "model.lora.quantization"
            raise ArchitectureError(f"model.lora.quantizes_head: true needs {needs}")
        if self.joined_qkv and "qkv" not in lora.targets:
            layers = (*PROJECTIONS, *layers)
        for name in lora.targets:
            if name not in layers:
                allowed = ", ".join(layers)
                raise ArchitectureError(f"model.lora.targets: {name!r} must be one of {allowed}")

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Linear layers of a block, as the part of their parameters' names."""
        projections = ("qkv",) if self.joined_qkv else PROJECTIONS
        if self.experts is not None:  # adapters of experts are not modelled
            return (*projections, "proj")
        gate = ("gate",) if self.gated else ()
        return (*projections, "proj", *gate, "up", "down")

    @property
    def adapted(self) -> frozenset[str]:
        """Linear layers of a block that have adapters."""
        if self.lora is None:
            return frozenset()
        usual = ("qkv",) if self.joined_qkv else ("q", "v")
        return frozenset((*self.lora.targets, *(("qkv",) if self.adapted_parts else ())) or usual)

    @property
    def adapted_parts(self) -> tuple[str, ...]:
        """Parts of a joined layer of queries, keys and values that share one adapter."""
        targets = self.lora.targets if self.lora is not None and self.joined_qkv else ()
        return tuple(name for name in PROJECTIONS if name in targets)

    def module_of(self, layer: int) -> int:
        """Return the first block that calls the same module as `layer`."""
        return layer - layer % (self.layers // (self.hidden_groups or self.layers))

    @property
    def shared_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.attention_heads if self.key_value_heads is None else self.key_value_heads

    @property
    def head_width(self) -> int:
        """Elements of the queries and keys of a head."""
        if self.latent is not None:
            return self.latent.head_size
        return (
            self.hidden_size // self.attention_heads if self.head_size is None else self.head_size
        )

    @property
    def wide(self) -> int:
        """Elements of a token inside the MLP."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def places(self) -> int:
        """Number of learned positions; 0 if positions are not learned."""
        if self.positions is not Positions.LEARNED:
            return 0
        return self.position_embeddings or self.sequence_length

    @property
    def gated(self) -> bool:
        """Return True if the MLP multiplies two linear layers."""
        return self.activation in (Activation.SWIGLU, Activation.GEGLU)

    def has_experts(self, layer: int) -> bool:
        """Return True if block `layer` has routed experts."""
        return self.experts is not None and self.experts.serves(layer)

    @property
    def has_windows(self) -> bool:
        """Return True if some block sees only part of the sequence."""
        return any(self.is_local(layer) for layer in range(min(2, self.layers)))

    def is_local(self, layer: int) -> bool:
        """Return True if tokens of block `layer` see only a window."""
        if self.window is None or self.window >= self.sequence_length:
            return False
        return self.global_every is None or (layer + 1) % self.global_every != 0

    @property
    def biased_norms(self) -> bool:
        """Return True if layer norms have biases."""
        return self.bias if self.norm_bias is None else self.norm_bias

    @property
    def biased_output(self) -> bool:
        """Return True if the last layer of attention has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def biased_qkv(self) -> bool:
        """Return True if the layers of queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT(Transformer):
    """As GPT-2 (Radford et al. 2019): learned positions, layer norms, GELU, biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Transformer):
    """As Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, no biases.

    Queries, keys and values have separate matrices.
    """

    positions: Positions = Positions.ROTARY
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SWIGLU
    bias: bool = False
    joined_qkv: bool = False


Architecture = GPT | Llama
