"""A step by hand of a unit whose two gradients autograd makes in one storage, one of them added to.

The gradient of a sum is the gradient of each summand: the same tensor, if shapes agree.
"""

import torch
from torch import nn

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Role
from zsim.schedule.schedule import Kind, Schedule
from zsim_torch.train import Option, train

WIDTH = 4
ADDED = 5.0
NAMES = ("low", "high")


class Summed(nn.Module):
    """The sum of two parameters, weighted by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.ones(WIDTH)) for _ in NAMES)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.low + self.high).tanh() * batch).sum()


def adding() -> Schedule:
    """Parameters are replaced by their gradients, of which the first has something added to it."""
    build = ScheduleBuilder.of("adding", data=1)
    low, high = (
        build.buffer(
            name,
            WIDTH,
            kind=Kind.PARAMETER,
            layout=build.layout(
                Layout(
                    name=name, pieces=(Piece(parameter=name, start=0, size=WIDTH),), elements=WIDTH
                )
            ),
            persistent=True,
        )
        for name in NAMES
    )
    build.setup.allocate(low, high)
    for each in (low, high):
        build.setup.compute(f"begin {each.name}", Action.INITIALIZE, [(Role.PARAMETER, each.all)])
    step = build.step
    batch = build.buffer("batch", WIDTH, produced=True)
    loss, saved = (build.buffer(name, 1, produced=True) for name in ("loss", "saved"))
    slope, extra = build.buffer("slope", 1), build.buffer("extra", WIDTH)
    gradients = [build.buffer(f"{name} gradient", WIDTH, produced=True) for name in NAMES]
    step.allocate(batch)
    step.compute("load", Action.LOAD, [(Role.OUTPUT, batch.all)])
    step.allocate(loss, saved)
    parameters = [(Role.PARAMETER, each.all) for each in (low, high)]
    inputs = [(Role.INPUT, batch.all), *parameters]
    step.compute(
        "forward", Action.FORWARD, [*inputs, (Role.OUTPUT, loss.all), (Role.SAVED, saved.all)]
    )
    step.free(loss)
    step.allocate(slope, extra, *gradients)
    step.fill("one", slope.all, 1.0)
    step.fill("five", extra.all, ADDED)
    operands = [*inputs, (Role.SAVED, saved.all), (Role.OUTPUT_GRADIENT, slope.all)]
    operands += [(Role.GRADIENT, each.all) for each in gradients]
    step.compute("backward", Action.BACKWARD, operands)
    step.free(batch, saved, slope)
    step.copy("add", extra.all, gradients[0].all, accumulate=True)
    for gradient, parameter in zip(gradients, (low, high), strict=True):
        step.copy(f"keep {gradient.name}", gradient.all, parameter.all)
    step.free(extra, *gradients)
    return build.schedule()


def by_adding() -> str:
    """Judge what the step leaves in the parameters."""
    weights = torch.arange(float(WIDTH))
    option = Option(write_back=False)
    trained = train(Summed(), ("",), adding(), [weights], steps=1, option=option)
    found = trained.full_parameters()
    module = Summed()
    module(weights).backward()
    for name, added in zip(NAMES, (ADDED, 0.0), strict=True):
        gradient = module.get_parameter(name).grad
        assert gradient is not None
        if not torch.equal(found[name], gradient + added):
            return f"values: gradient of {name} is {found[name].tolist()}"
    return ""
