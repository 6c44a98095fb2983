"""Routed experts, latent attention and prediction heads: the parts of a shape that few models have.

Field names of the papers are in the comments of the readers in `zsim.scenario`.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from math import ceil

from zsim.model.architecture_error import ArchitectureError


class Scores(StrEnum):
    """Functions from the logits of a router to the weights of experts."""

    SOFTMAX = "softmax"
    """Over all experts, before the choice (Fedus et al. 2021, "Switch Transformers")."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """Over the chosen experts alone (Jiang et al. 2024, "Mixtral of experts", section 2.1)."""
    SIGMOID = "sigmoid"
    """Of each expert alone (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2)."""


class DropRule(StrEnum):
    """How rows beyond a capacity are chosen."""

    WEIGHT = "probs"
    """Rows with the smallest weights are dropped."""
    POSITION = "position"
    """The last rows are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Rows of a source for an expert beyond `capacity` are dropped; `by` chooses them."""

    capacity: int
    by: DropRule = DropRule.WEIGHT

    def __str__(self) -> str:
        return f"beyond {self.capacity} by {self.by}"


class LoadScope(StrEnum):
    """The tokens over which an auxiliary loss sums the loads of experts."""

    RANK = "rank"
    """The tokens of a rank in a micro-batch, as of a z loss, which depends on no loads."""
    SEQUENCE = "sequence"
    """The tokens of all ranks that share sequences, in a micro-batch."""
    MICRO_BATCH = "micro_batch"
    """The tokens of all ranks, in a micro-batch."""
    BATCH = "batch"
    """The tokens of all ranks, in this micro-batch and all earlier ones: Megatron's global loss."""


class LoadBalancing(StrEnum):
    """Auxiliary losses of the balance of tokens over experts, by their names in Megatron-LM."""

    AUX_LOSS = "aux_loss"
    """Of the tokens of a micro-batch, on all ranks that share its sequences (Fedus et al. 2021)."""
    SEQ_AUX_LOSS = "seq_aux_loss"
    """Of each sequence apart (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2)."""
    GLOBAL_AUX_LOSS = "global_aux_loss"
    """Of the tokens of all ranks, in this micro-batch and all earlier ones of the step (Qiu et al.
    2025, arXiv 2501.11873)."""

    @property
    def scope(self) -> LoadScope:
        """The tokens over which loads are summed."""
        return LoadScope.BATCH if self is LoadBalancing.GLOBAL_AUX_LOSS else LoadScope.SEQUENCE


class RouterFormat(StrEnum):
    """Formats in which a router multiplies."""

    COMPUTE = "compute"
    """The format of all other products."""
    FP32 = "fp32"


class ExpertKernels(StrEnum):
    """Implementations of the products of routed experts."""

    GROUPED = "grouped"
    """One kernel for all experts of a rank (`torch.nn.functional.grouped_mm`, Transformer Engine's
    GroupedLinear, the default of transformers 5)."""
    LOOP = "loop"
    """One expert after the other, each with its own kernels and a wait of the host for its tokens
    (`eager` experts of transformers)."""


def _need_positive(table: object, section: str, names: tuple[str, ...]) -> None:
    """Raise ArchitectureError unless each named field of `table` is at least 1, or None."""
    for name in names:
        value = getattr(table, name)
        if value is not None and value < 1:
            raise ArchitectureError(f"model.{section}.{name}: {value} must be at least 1")


FACTORS = {
    "bias_rate": "score_bias",
    "auxiliary_coefficient": "auxiliary_loss",
    "z_coefficient": "z_loss",
}
"""Factors by name, and the part of the training that each is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts in place of the MLP of some blocks: each token runs through `top_k` of them.

    Attributes:
        count: number of routed experts of a block.
        top_k: experts of each token.
        intermediate_size: width inside each expert.
        shared_intermediate_size: width of an additional MLP for all tokens; 0 for none.
            Several shared experts are one MLP with the sum of their widths.
        shared_gate: the output of this MLP is multiplied by the sigmoid of a linear layer to one
            number (Qwen Team 2024, "Qwen1.5-MoE").
        dense_layers: first blocks that have an MLP instead, with the `intermediate_size` of the
            model.
        every: of the other blocks, every n-th has experts, counted from the first block of the
            model (`interleave_moe_layer_step` of Llama 4).
        scores: weights of experts.
        score_bias: a number for each expert is added to its score for the choice alone. A rule
            without gradients updates it (Wang et al. 2024, "Auxiliary-loss-free load balancing").
        bias_rate: change of these numbers in a step (Wang et al. 2024: 0.001).
        normalised: weights of the chosen experts are divided by their sum.
        scaling: factor of the weights of routed experts.
        groups, top_groups: experts are chosen from `top_groups` of `groups` equal groups.
        router_bias: the router has a bias.
        bias: linear layers of experts have biases.
        router_format: format in which the router multiplies.
        auxiliary_loss: the loss has a term for the balance of tokens over experts. It changes the
            work of routers, and no parameters.
        auxiliary_coefficient: factor of this term (Fedus et al. 2021, section 2.2: 0.01). Only real
            ranks use it.
        load_balancing_type: the tokens of this term (`moe_router_load_balancing_type`).
        z_loss: the loss has a term for the size of logits of routers (Zoph et al. 2022, "ST-MoE";
            `moe_z_loss_coeff`).
        z_coefficient: factor of this term (Zoph et al. 2022: 0.001). Only real ranks use it.
        kernels: implementation of the products of experts.
        capacity_factor: limit of the copies from one rank to one expert, in multiples of their
            mean; copies beyond it are dropped. None for no limit.
        drop_policy: how dropped copies are chosen (`moe_token_drop_policy`: probs or position).
        pads_to_capacity: copies to each expert are filled up to this limit, so that their number
            does not depend on data (`moe_pad_expert_input_to_capacity` of Megatron-LM).
    """

    count: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    every: int = 1
    scores: Scores = Scores.SOFTMAX
    score_bias: bool = False
    bias_rate: float = 1e-3
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    router_bias: bool = False
    bias: bool = False
    router_format: RouterFormat = RouterFormat.COMPUTE
    auxiliary_loss: bool = True
    auxiliary_coefficient: float = 0.01
    load_balancing_type: LoadBalancing = LoadBalancing.AUX_LOSS
    z_loss: bool = False
    z_coefficient: float = 1e-3
    kernels: ExpertKernels = ExpertKernels.GROUPED
    capacity_factor: float | None = None
    drop_policy: DropRule = DropRule.WEIGHT
    pads_to_capacity: bool = False

    def __post_init__(self) -> None:
        names = ("count", "top_k", "intermediate_size", "every", "groups", "top_groups")
        _need_positive(self, "experts", names)
        for name in ("shared_intermediate_size", "dense_layers"):
            if getattr(self, name) < 0:
                raise ArchitectureError(f"model.experts.{name}: {getattr(self, name)} must be >= 0")
        if self.count % self.groups:
            raise ArchitectureError(
                f"model.experts.groups: {self.groups} must divide the {self.count} experts"
            )
        if self.top_groups > self.groups:
            raise ArchitectureError(
                f"model.experts.top_groups: {self.top_groups} must be at most groups {self.groups}"
            )
        open_to = self.count // self.groups * self.top_groups
        if self.top_k > open_to:
            raise ArchitectureError(
                f"model.experts.top_k: {self.top_k} must be at most the {open_to} experts to "
                "choose from"
            )
        factor = self.capacity_factor
        if factor is not None and not 1 <= factor <= self.count:
            raise ArchitectureError(
                f"model.experts.capacity_factor: {factor:g} must be from 1, the mean, to "
                f"{self.count}, the experts"
            )
        if self.pads_to_capacity and factor is None:
            raise ArchitectureError("model.experts.pads_to_capacity: true needs capacity_factor")
        if self.drop_policy is not DropRule.WEIGHT and factor is None:
            raise ArchitectureError(
                f"model.experts.drop_policy: {self.drop_policy} needs capacity_factor"
            )
        kind = self.load_balancing_type
        if kind is not LoadBalancing.AUX_LOSS and not self.auxiliary_loss:
            raise ArchitectureError(
                f"model.experts.load_balancing_type: {kind} needs auxiliary_loss = true"
            )
        for name in ("scaling", "bias_rate", "auxiliary_coefficient", "z_coefficient"):
            value = getattr(self, name)
            if value <= 0:
                raise ArchitectureError(f"model.experts.{name}: {value} must be more than 0")
        self._need_used_factors()
        if self.shared_gate and not self.shared_intermediate_size:
            raise ArchitectureError(
                "model.experts.shared_gate: true needs shared_intermediate_size"
            )

    def _need_used_factors(self) -> None:
        """Raise ArchitectureError if a factor is given for a part that is not there."""
        plain = {each.name: each.default for each in fields(self)}
        for name, part in FACTORS.items():
            if getattr(self, name) != plain[name] and not getattr(self, part):
                raise ArchitectureError(
                    f"model.experts.{name}: {getattr(self, name):g} needs {part} = true"
                )

    @property
    def losses(self) -> int:
        """The number of auxiliary losses of a router."""
        return self.auxiliary_loss + self.z_loss

    def capacity(self, tokens: int) -> int:
        """Return the limit of copies from a rank with `tokens` to one expert; 0 for no limit."""
        # get_capacity of Megatron-LM (megatron/core/transformer/moe/moe_utils.py)
        if self.capacity_factor is None:
            return 0
        return ceil(tokens * self.top_k / self.count * self.capacity_factor)

    def drops(self, tokens: int) -> Drops | None:
        """Return the rule of dropping copies of `tokens` beyond a limit; None for no limit."""
        capacity = self.capacity(tokens)
        return Drops(capacity=capacity, by=self.drop_policy) if capacity else None

    def copies(self, tokens: int) -> int:
        """Return the copies of `tokens` that a rank sends to experts, with padding if any."""
        if self.pads_to_capacity:
            return self.count * self.capacity(tokens)
        return tokens * self.top_k

    def serves(self, layer: int) -> bool:
        """Return True if block `layer`, counted from 0, has experts instead of an MLP."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention with compressed keys and values (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    A linear layer compresses a token to `key_value_rank` elements, which another expands to the
    keys without positions and the values of all heads; `rope_size` elements of each key turn with
    the position, and all heads share them.

    Attributes:
        key_value_rank: elements of the compressed keys and values (`kv_lora_rank`).
        query_rank: elements of compressed queries (`q_lora_rank`); None if one layer computes them.
        nope_size, rope_size: elements of the queries and keys of a head without and with positions.
        value_size: elements of the values of a head.
        bias: the compressing layers have biases.
    """

    key_value_rank: int
    query_rank: int | None = None
    nope_size: int = 128
    rope_size: int = 64
    value_size: int = 128
    bias: bool = False

    def __post_init__(self) -> None:
        names = tuple(each.name for each in fields(self) if each.name != "bias")
        _need_positive(self, "latent", names)
        if self.rope_size % 2:
            raise ArchitectureError(
                f"model.latent.rope_size: {self.rope_size} must be even, rotary positions turn "
                "pairs"
            )

    @property
    def head_size(self) -> int:
        """Elements of the queries and keys of a head."""
        return self.nope_size + self.rope_size
