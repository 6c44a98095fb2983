"""Delayed updates in one process, from the paper alone: no schedule, no shard, no thread.

Ren et al. 2021, section 5.2. What decides the last bit is the same as on ranks: gradients are
divided, added up and reduced in the format of the module, masters are fp32, torch's fused Adam goes
over whole vectors, and each rank's sum of squares is rounded once before these are added up.
"""

from collections.abc import Mapping, Sequence

import torch
from tiny_training import Case, Parameters, Tiny
from torch.func import functional_call

from zsim.strategy.optimizer_rule import Adam
from zsim_torch.ground.torch_dtype import TORCH_DTYPE

VECTOR = 64
"""Elements of whole vectors, in every format and on every processor."""


class Training:
    """Masters, padded to whole vectors, PyTorch's own optimizer of them, and what is computed with.

    `owners` has of each parameter the rank that owns each of its elements.
    """

    def __init__(self, case: Case, owners: Mapping[str, torch.Tensor]) -> None:
        rule = case.strategy.train.optimizer
        assert isinstance(rule, Adam)
        assert isinstance(rule.learning_rate, float)
        self.case = case
        self.owners = owners
        self.compute = TORCH_DTYPE[case.strategy.train.precision.compute]
        self.module = Tiny(case.strategy.train.precision)
        self.masters = {
            name: _whole_vectors(value) for name, value in self.module.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=rule.learning_rate,
            betas=(rule.beta1, rule.beta2),
            eps=rule.epsilon,
            weight_decay=rule.weight_decay,
            fused=True,
        )
        self.losses: list[float] = []
        self.now = self.cast()

    def whole(self, name: str) -> torch.Tensor:
        """The master of a parameter, in its shape."""
        shape = self.module.get_parameter(name).shape
        return self.masters[name][: shape.numel()].view(shape)

    def cast(self) -> Parameters:
        """What the masters are in the format of the module."""
        return {name: self.whole(name).to(self.compute) for name in self.masters}

    def gradients(self, step: int) -> Parameters:
        """The mean gradients of a step; its mean loss is noted."""
        ranks = range(self.case.strategy.replicas)
        micro_batches = range(self.case.strategy.train.gradient_accumulation_steps)
        shares: list[list[Parameters]] = []
        losses: list[list[float]] = []
        for rank in ranks:
            found = [self._micro_batch(step, micro_batch, rank) for micro_batch in micro_batches]
            shares.append([share for share, _ in found])
            losses.append([loss for _, loss in found])
        self.losses.append(sum(sum(own) / len(own) for own in losses) / len(losses))
        if self.case.strategy.zero.stage >= 2:  # reduced after each micro-batch
            return _sum([_sum(each) for each in zip(*shares, strict=True)])
        return _sum([_sum(own) for own in shares])

    def _micro_batch(self, step: int, micro_batch: int, rank: int) -> tuple[Parameters, float]:
        used = {name: value.clone().requires_grad_() for name, value in self.now.items()}
        batch = self.case.batch(step, micro_batch, rank)
        loss = functional_call(self.module, used, (batch,))
        loss.backward()
        count = self.case.strategy.replicas * self.case.strategy.train.gradient_accumulation_steps
        found: Parameters = {}
        for name, value in used.items():
            assert value.grad is not None
            found[name] = value.grad / count
        return found, float(loss.detach())

    def update(self, gradients: Parameters) -> None:
        """Clip and apply; what is computed with stays as it is."""
        maximum = self.case.strategy.train.clip_norm
        factor = torch.ones(())
        if maximum is not None:
            squares = torch.zeros(())
            for rank in range(self.case.strategy.replicas):
                parts = [
                    value.flatten()[self.owners[name] == rank].double().square().sum()
                    for name, value in gradients.items()
                ]
                squares = squares + torch.stack(parts).sum().float()
            factor = (maximum / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for name, value in gradients.items():
            self.masters[name].grad = _whole_vectors(value.float() * factor)
        self.optimizer.step()


def _sum(parts: Sequence[Parameters]) -> Parameters:
    found = dict(parts[0])
    for part in parts[1:]:
        found = {name: value + part[name] for name, value in found.items()}
    return found


def _whole_vectors(value: torch.Tensor) -> torch.Tensor:
    count = value.numel()
    made = torch.zeros(count + -count % VECTOR)
    made[:count] = value.detach().flatten()
    return made


def by_delayed_loop(
    case: Case, owners: Mapping[str, torch.Tensor]
) -> tuple[Parameters, tuple[float, ...]]:
    """The masters once all gradients are applied, and the mean loss of each step."""
    training, offload = Training(case, owners), case.strategy.offload
    late: Parameters | None = None
    for step in range(case.steps):
        gradients = training.gradients(step)
        if late is not None:
            training.update(late)
            training.now, late = training.cast(), None
        if step < offload.warm_up_steps:
            training.update(gradients)
            training.now = training.cast()
        else:
            late = gradients
    if late is not None:
        training.update(late)
    return {name: training.whole(name) for name in training.masters}, tuple(training.losses)
