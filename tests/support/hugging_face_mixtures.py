"""Small mixtures of transformers, trained by `Trainer` on expert ranks and by a plain loop.

Their norms and losses compute in fp32, so a rounding there may differ by 1e-7 in fp64 as well.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from exact_training import cluster
from tiny_training import Parameters
from torch import Tensor, distributed, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import zsim
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module import expert_unit
from zsim_torch.module.module_loss import loss_of
from zsim_torch.module.routed_rows import SentRows, in_order
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

TOKENS, LENGTH = 64, 16
Fields = dict[str, Any]

COMMON: Fields = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
}
RATE, EPSILON = 0.01, 1e-5


def _mixtral() -> nn.Module:
    experts: Fields = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.05,
    }
    return MixtralForCausalLM(
        MixtralConfig(**COMMON, **experts, num_key_value_heads=2, output_router_logits=True)
    )


def _qwen3_moe() -> nn.Module:
    experts: Fields = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, **experts, num_key_value_heads=2, output_router_logits=True)
    )


def _deepseek_v3() -> nn.Module:
    experts: Fields = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    groups: Fields = {
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    latent: Fields = {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    }
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**COMMON, **experts, **groups, **latent, v_head_dim=8)
    )


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}


def made(name: str, precision: Precision) -> nn.Module:
    """Return the module `name` with equal values in every process."""
    torch.manual_seed(0)
    module = MIXTURES[name]().to(TORCH_DTYPE[precision.compute]).train()
    if precision is Precision.FP64:  # torch's grouped products have no fp64
        vars(module)["config"]._experts_implementation = "eager"
    return module


def gates(module: nn.Module) -> list[nn.Module]:
    """Return the routers of a mixture, in order."""
    return [each for path, each in module.named_modules() if path.endswith(".mlp.gate")]


def _replayed(router: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, weights and experts as a router does; the choice is given."""
    weight: Tensor = attrgetter("weight")(router)  # no parameter while a schedule holds it
    chosen: Tensor = vars(router)["chosen"]
    logits = nn.functional.linear(tokens.view(-1, tokens.shape[-1]), weight)
    wide, scale = logits.float(), vars(router).get("routed_scaling_factor")
    scores = wide.softmax(-1) if scale is None else wide.sigmoid()
    weights = scores.gather(1, chosen)
    if vars(router).get("norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * (scale or 1.0), chosen


def replaying(module: nn.Module) -> nn.Module:
    """Return `module` with routers whose choice each micro-batch gives."""
    for each in gates(module):
        vars(each)["forward"] = partial(_replayed, each)
    return module


def loss_of_replay(module: nn.Module, batch: object) -> Tensor:
    """Return the loss of a micro-batch with the experts of its tokens."""
    assert isinstance(batch, dict)
    for gate, chosen in zip(gates(module), batch["chosen"], strict=True):
        vars(gate)["chosen"] = chosen
    found: Tensor = module(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    return found


@dataclass(frozen=True, slots=True)
class MixtureCase:
    """Which mixture to train on which ranks, from a checkpoint and to one."""

    name: str
    expert: int
    data: int
    stage: int = 1
    precision: Precision = Precision.FP64
    emulate: RuntimeOptions | None = None
    full: bool = False
    meta: bool = False
    start: int = 0
    stop: int = 2
    loaded: Path | None = None
    saved: Path | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy of the case."""
        full = Activations(checkpointing=Checkpointing.FULL)
        return Strategy(
            parallel=Parallel(data=self.data, expert=self.expert),
            zero=Zero(stage=self.stage, emulate=self.emulate),
            activations=full if self.full else Activations(),
            train=Train(
                precision=self.precision, optimizer=Adam(learning_rate=RATE, epsilon=EPSILON)
            ),
        )


@dataclass(frozen=True, slots=True)
class MixtureResult:
    """What a rank has at the end."""

    parameters: Parameters
    losses: tuple[float, ...]
    evaluated: float
    routed: list[list[Tensor]]
    proved: bool
    simulated_s: float


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    """Return a micro-batch of tokens."""
    generator = torch.Generator().manual_seed(1 + step + 100 * rank)
    ids = torch.randint(0, TOKENS, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def by_trainer(
    case: MixtureCase, replay: Sequence[Sequence[Sequence[Tensor]]] | None = None
) -> MixtureResult:
    """Train on this rank; `replay` has the experts of tokens by step, rank and layer."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    module = made(case.name, case.precision)
    option = Option()
    if replay is not None:
        replaying(module)
    if case.meta:
        values = {name: each.detach() for name, each in module.named_parameters()}
        module, option = _on_meta(module), Option(initial=values.__getitem__)
    first = _batch(case.start, rank, replay)
    batches = [_batch(step, rank, replay) for step in range(case.start, case.stop)]
    routed: list[list[Tensor]] = []
    loss = loss_of if replay is None else loss_of_replay
    with Trainer(module, case.strategy, batch=first, loss=loss, option=option) as trainer:
        if case.loaded is not None:
            trainer.load(case.loaded)
        losses: list[float] = []
        with _recorded() as found:
            for batch in batches:
                losses.append(trainer.average(trainer.step(batch)))
                routed.append([*found])
                found.clear()
        evaluated = trainer.average(trainer.evaluate(first))
        if case.saved is not None:
            trainer.save(case.saved)
        proved = zsim.check(trainer.schedule, model=trainer.model).is_right
        parameters = trainer.full_parameters()
        simulated_s = trainer.simulate(cluster(case.data)).step_time_s
    if not case.meta:
        parameters = {name: each.detach().clone() for name, each in module.named_parameters()}
    return MixtureResult(
        parameters, tuple(losses), evaluated, routed, proved=proved, simulated_s=simulated_s
    )


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no values."""
    memo = {
        id(each): nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
        for each in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _batch(
    step: int, rank: int, replay: Sequence[Sequence[Sequence[Tensor]]] | None
) -> dict[str, Tensor]:
    found = batch_of(step, rank)
    return found if replay is None else {**found, "chosen": torch.stack([*replay[step][rank]])}


class _recorded:  # noqa: N801  (a context manager)
    """Record the experts of tokens that segments on this rank choose, in the order of layers."""

    def __enter__(self) -> list[Tensor]:
        found: list[Tensor] = []

        def noted(chosen: Tensor, experts: int) -> SentRows:
            found.append(chosen.clone())
            return in_order(chosen, experts)

        expert_unit.in_order = noted  # type: ignore[attr-defined]
        return found

    def __exit__(self, *_: object) -> None:
        expert_unit.in_order = in_order  # type: ignore[attr-defined]


class PlainResult(NamedTuple):
    """Parameters, mean losses, and experts and scores of tokens by step, rank and layer."""

    before: Parameters
    after: Parameters
    losses: tuple[float, ...]
    routed: list[list[list[Tensor]]]
    scores: list[list[list[Tensor]]]


def by_plain_loop(
    name: str, ranks: int, steps: int, precision: Precision = Precision.FP64
) -> PlainResult:
    """Train in one process, the micro-batches of all ranks one after the other."""
    module = made(name, precision)
    before = {key: each.detach().clone() for key, each in module.named_parameters()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=EPSILON, weight_decay=0)
    losses: list[float] = []
    routed: list[list[list[Tensor]]] = []
    scores: list[list[list[Tensor]]] = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        routed.append([])
        scores.append([])
        for rank in range(ranks):
            with _watched(module) as found:
                loss: Tensor = module(**batch_of(step, rank)).loss / ranks
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            total += float(loss.detach())
            routed[-1].append([chosen for chosen, _ in found])
            scores[-1].append([score for _, score in found])
        optimizer.step()
        losses.append(total)
    after = {key: each.detach() for key, each in module.named_parameters()}
    return PlainResult(before, after, tuple(losses), routed, scores)


class _watched:  # noqa: N801  (a context manager)
    """Record choices and scores of the routers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []

        def note(router: nn.Module, _: object, made: tuple[Tensor, Tensor, Tensor]) -> None:
            logits, _weights, chosen = made
            wide = logits.detach().float()
            is_sigmoid = hasattr(router, "routed_scaling_factor")
            found.append((chosen.clone(), wide.sigmoid() if is_sigmoid else wide.softmax(-1)))

        self.hooks = [each.register_forward_hook(note) for each in gates(self.module)]
        return found

    def __exit__(self, *_: object) -> None:
        for each in self.hooks:
            each.remove()


class Flip(NamedTuple):
    """A token that another process sends to other experts, and how close their scores are."""

    step: int
    rank: int
    layer: int
    token: int
    margin: float


def flips(plain: PlainResult, results: Sequence[MixtureResult]) -> Iterator[Flip]:
    """Yield the tokens whose experts differ, with the largest difference of exchanged scores."""
    for step, ranks in enumerate(plain.routed):
        for rank, layers in enumerate(ranks):
            for layer, chosen in enumerate(layers):
                other = results[rank].routed[step][layer]
                score = plain.scores[step][rank][layer]
                for token, (one, two) in enumerate(
                    zip(chosen.tolist(), other.tolist(), strict=True)
                ):
                    lost, won = set(one) - set(two), set(two) - set(one)
                    if lost:
                        high = max(float(score[token, each]) for each in lost)
                        low = min(float(score[token, each]) for each in won)
                        yield Flip(step, rank, layer, token, high - low)
