"""Convert rules of a schedule to a torch optimizer and back: groups, constants, learning rates.

The torch optimizer updates nothing. Schedulers of `torch.optim.lr_scheduler` set the learning rates
of its groups, and each step reads them as host scalars.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import (
    LEARNING_RATE,
    Optimizer,
    ParameterGroup,
    constants_of,
    rules,
)
from zsim.strategy.strategy import Strategy
from zsim_torch.execute.optimizer_hooks import guard_state, is_seen, need_plain_step

RATE: Final = "lr"

TORCH_NAMES: Final[Mapping[str, str]] = {LEARNING_RATE: RATE, "epsilon": "eps"}
"""Constants of rules that torch calls otherwise; `beta1` and `beta2` are a pair, `betas`."""

BETAS: Final = ("beta1", "beta2")

IMPLEMENTED: Final = ("params", "foreach", "capturable", "fused", "decoupled_weight_decay")
"""Arguments of torch's optimizers that choose an implementation, or that rules test."""


def _torch_name(constant: str) -> str:
    """Return torch's name of a constant of a rule."""
    return "betas" if constant in BETAS else TORCH_NAMES.get(constant, constant)


def _torch_kinds(rule: type[Optimizer]) -> list[type[torch.optim.Optimizer]]:
    """Return the classes of torch whose step a rule is."""
    return [getattr(torch.optim, name) for name in rule.torch]


CONSTANTS: Final[tuple[str, ...]] = tuple(
    name
    for name in dict.fromkeys(
        _torch_name(each) for rule in rules().values() for each in constants_of(rule)
    )
    if name != RATE
)
"""Constants of torch's optimizers that rules support; they must not change during training."""

OFF: Final[tuple[str, ...]] = tuple(
    name
    for name in dict.fromkeys(
        each
        for rule in rules().values()
        for kind in _torch_kinds(rule)
        for each in signature(kind).parameters
    )
    if name not in (RATE, *CONSTANTS, *IMPLEMENTED)
)
"""Options of torch's optimizers that no rule supports; they must be false or zero."""


class Chosen(NamedTuple):
    """A strategy whose rules read their learning rates, and the initial rates."""

    strategy: Strategy
    rates: dict[str, float]


def with_optimizer(
    strategy: Strategy, module: nn.Module, given: torch.optim.Optimizer | Optimizer | None
) -> Chosen:
    """Return `strategy` with the rules of `given`, each with a learning rate that steps read.

    Raises:
        RefusedError: no rule matches the optimizer, or a parameter of the module is in no group.
    """
    train = strategy.train
    if train.learning_rates is not None and given is None:
        return Chosen(strategy, {})
    rules: list[tuple[tuple[str, ...], Optimizer]]
    if isinstance(given, torch.optim.Optimizer):
        need_plain_step(given)
        rules = _groups_of(given, module)
    elif isinstance(given, Optimizer):
        rules = [((), given)]
    elif given is not None:
        raise RefusedError(
            f"optimizer: a {type(given).__name__} must be AdamW, Adam or SGD of torch.optim, made "
            "with the module's parameters, or a rule of zsim"
        )
    else:
        rules = [((), train.optimizer), *((each.parameters, each.rule) for each in train.groups)]
    read = [
        replace(rule, learning_rate=_rate_name(number)) for number, (_, rule) in enumerate(rules)
    ]
    groups = [
        ParameterGroup(parameters=parameters, rule=rule)
        for (parameters, _), rule in zip(rules[1:], read[1:], strict=True)
    ]
    changed = {"train.optimizer": read[0], "train.groups": tuple(groups)}
    return Chosen(
        strategy.but(changed | {"train.learning_rates": None}),
        {_rate_name(number): _number(rule) for number, (_, rule) in enumerate(rules)},
    )


def _number(rule: Optimizer) -> float:
    return 0.0 if isinstance(rule.learning_rate, str) else rule.learning_rate


def _rate_name(group: int) -> str:
    return f"{LEARNING_RATE}/group{group}" if group else LEARNING_RATE


@dataclass(frozen=True, slots=True)
class RateGroups:
    """A torch optimizer, with the host scalar of each group's learning rate.

    `constants` are the constants of each group that steps use, and `members` the ids of its
    parameters.
    """

    optimizer: torch.optim.Optimizer | None
    scalars: tuple[str, ...]
    constants: tuple[Mapping[str, object], ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def _of(
        cls,
        optimizer: torch.optim.Optimizer | None,
        scalars: Iterable[str],
        fixed: Container[int] = (),
    ) -> "RateGroups":
        """Return groups of `optimizer`; those in `fixed` have a constant learning rate.

        From now on, using its state raises an error during and after the schedule's run.
        """
        if optimizer is not None:
            guard_state(optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        kept: list[Mapping[str, object]] = [
            {
                name: group[name]
                for name in (*CONSTANTS, *OFF, *([RATE] if number in fixed else []))
                if name in group
            }
            for number, group in enumerate(groups)
        ]
        return cls(optimizer, tuple(scalars), tuple(kept), _members(groups))

    @classmethod
    def of_torch(cls, optimizer: torch.optim.Optimizer) -> "RateGroups":
        """Return the groups of the user's optimizer, in the order of `with_optimizer`."""
        return cls._of(optimizer, map(_rate_name, range(len(optimizer.param_groups))))

    @classmethod
    def of_schedule(
        cls, schedule: Schedule, module: nn.Module, rates: Mapping[str, float]
    ) -> "RateGroups":
        """Return groups for the rules in `schedule`.

        `rates` are the initial values of host scalars.
        """
        parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        groups: dict[Optimizer, list[nn.Parameter]] = {}
        for name, rule in _rules_of(schedule, list(parameters)).items():
            groups.setdefault(rule, []).append(parameters[name])
        if not groups:
            return cls._of(None, ())
        options = [{"params": own} | _constants(rule, rates) for rule, own in groups.items()]
        return cls._of(
            _torch_optimizer(type(next(iter(groups))), options),
            [str(rule.learning_rate) for rule in groups],
            [number for number, rule in enumerate(groups) if isinstance(rule.learning_rate, float)],
        )

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each group, by host scalar."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {name: float(group["lr"]) for name, group in zip(self.scalars, groups, strict=False)}

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Set the learning rates of groups by host scalar, before a step.

        Raises:
            RefusedError: the optimizer has changed in a way that steps do not support.
        """
        if self.optimizer is None:
            return
        self._need_same(self.optimizer)
        for name, group in zip(self.scalars, self.optimizer.param_groups, strict=True):
            if name in rates:
                group[RATE] = rates[name]

    def _need_same(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RefusedError if groups or constants have changed, or a hook expects a real step."""
        need_plain_step(optimizer)
        groups = optimizer.param_groups
        if _members(groups) != self.members:
            raise RefusedError(
                "optimizer: its groups have other parameters than when the training began, and "
                "steps go on with those; make another trainer"
            )
        for number, (group, kept) in enumerate(zip(groups, self.constants, strict=True)):
            for name, value in kept.items():
                if group[name] != value:
                    raise RefusedError(
                        f"optimizer: {name} of group {number} is now {group[name]}, and steps go "
                        f"on with {value}: they read learning rates alone (cycle_momentum?)"
                    )

    def note_step(self) -> None:
        """Call `step` of the optimizer without parameters, if it is observed.

        Schedulers observe it: they wrap the step.
        """
        if self.optimizer is None or not is_seen(self.optimizer):
            return
        held = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = []
        try:
            self.optimizer.step()
        finally:
            for group, parameters in zip(self.optimizer.param_groups, held, strict=True):
                group["params"] = parameters

    def saved_groups(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return constants and parameter names of each group, as torch saves them.

        `names` has the name of each parameter by `id`.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            group | {"params": [names[id(each)] for each in group["params"]]} for group in groups
        ]

    def restore(self, number: int, name: str, value: object) -> None:
        """Set a group's learning rate or a value of a scheduler; parameters and constants stay."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if number < len(groups) and (name == "lr" or name not in groups[number]):
            groups[number][name] = value


def _members(groups: Iterable[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of the parameters of each group."""
    return tuple(tuple(map(id, group["params"])) for group in groups)


def _groups_of(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> list[tuple[tuple[str, ...], Optimizer]]:
    """Return parameter name patterns and the rule of each group of a torch optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
    found: list[tuple[tuple[str, ...], Optimizer]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RefusedError(
                    f"optimizer: group {number} has a parameter that is not one of the module"
                )
        own = tuple(names.pop(id(parameter)) for parameter in group["params"])
        found.append((tuple(map(_pattern, own)), _rule(optimizer, number, group)))
    if left := sorted(set(names.values()) - frozen):
        raise RefusedError(f"optimizer: parameter {left[0]} is in none of its groups")
    return found


def _pattern(name: str) -> str:
    """Return a pattern that matches only `name`."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _rule(optimizer: torch.optim.Optimizer, number: int, group: dict[str, Any]) -> Optimizer:
    """Return the rule of a group.

    Raises:
        RefusedError: no rule matches it.
    """
    kind = type(optimizer)
    rule = next((each for each in rules().values() if kind in _torch_kinds(each)), None)
    if rule is None:
        raise _no_rule(kind)
    supported = {_torch_name(name) for name in constants_of(rule)}
    for name in (each for each in (*OFF, *CONSTANTS) if each not in supported):
        if group.get(name):
            raise RefusedError(
                f"optimizer: {kind.__name__} with {name} = {group[name]} in group {number}; it "
                "must be off"
            )
    if not rule.reads(group):
        raise _no_rule(kind)
    given = {name: group[_torch_name(name)] for name in constants_of(rule) if name not in BETAS}
    given[LEARNING_RATE] = float(given[LEARNING_RATE])
    if BETAS[0] in constants_of(rule):
        given |= dict(zip(BETAS, map(float, group["betas"]), strict=True))
    return rule(**given)


def _torch_optimizer(rule: type[Optimizer], options: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of torch with these groups, whose step is never called."""
    for kind in _torch_kinds(rule):
        return kind(options, lr=0.0)  # type: ignore[call-arg]  # every class in `torch` takes it
    return torch.optim.Optimizer(options, {RATE: 0.0})


def _no_rule(kind: type[torch.optim.Optimizer]) -> RefusedError:
    """Return the error for an optimizer whose step a schedule would not call."""
    *words, last = (word for rule in rules().values() for word in rule.torch.values())
    wanted = f"must be {', '.join(words)}, or {last}"
    known = [each for rule in rules().values() for each in _torch_kinds(rule)]
    if kind in known or not issubclass(kind, tuple(known)):
        return RefusedError(f"optimizer: {kind.__name__} {wanted}")
    return RefusedError(
        f"optimizer: {kind.__module__}.{kind.__qualname__} {wanted} of torch.optim itself: a "
        "schedule never calls the step of a subclass"
    )


def moment_names(program: Program) -> tuple[str, ...]:
    """Return torch's names of the moments in updates of `program`, in order."""
    for rule in _updating(program):
        return rule.states
    return ()


def _updating(program: Program) -> list[Optimizer]:
    """Return the distinct rules of updates from gradients; biases of experts follow loads."""
    rules = [
        operation.rule
        for operation in walk(program.step)
        if isinstance(operation, Compute) and operation.action is Action.UPDATE
    ]
    distinct = (rule for rule in dict.fromkeys(rules) if isinstance(rule, Optimizer))
    return [rule for rule in distinct if not rule.of_loads]


def _rules_of(schedule: Schedule, names: Sequence[str]) -> dict[str, Optimizer]:
    """Return the rule that updates each parameter in `names`, as far as the schedule names it.

    The result is equal on all ranks, although the parameters of a pipeline stage may share one
    rule.
    """
    rules = [rule for program in schedule.programs for rule in _updating(program)]
    found = list(dict.fromkeys(rules))
    if len(found) == 1:
        return dict.fromkeys(names, found[0])
    strategy = schedule.contract.strategy
    return {} if strategy is None else {name: strategy.rule_of(name) for name in names}


def _constants(rule: Optimizer, rates: Mapping[str, float]) -> dict[str, Any]:
    own = rule.learning_rate
    rate = rates.get(own, 0.0) if isinstance(own, str) else own
    made: dict[str, Any] = {RATE: rate}
    for name in constants_of(rule):
        if name not in (LEARNING_RATE, *BETAS):
            made[_torch_name(name)] = getattr(rule, name)
    if BETAS[0] in constants_of(rule):
        made["betas"] = tuple(getattr(rule, name) for name in BETAS)
    return made
