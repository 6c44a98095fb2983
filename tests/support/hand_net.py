"""The module of the example that is written by hand, its data, and its schedule in fp64."""

import torch
from torch import nn

from zsim.dtype import DType
from zsim.schedule.operation import CollectiveOperation, Operation, ReducingOperation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value.to(self.weight.dtype) * self.weight[:5] + self.weight[5])


class Loss(Layer):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value).square().sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer0, self.layer1, self.loss = Layer(), Layer(), Loss()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.layer1(self.layer0(batch)))
        return loss


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step + 100 * rank)
    return torch.randint(0, 9, (5,), generator=generator)


def in_fp64(schedule: Schedule) -> Schedule:
    """`schedule` with every fp32 buffer in fp64."""

    def widened(operation: Operation) -> Operation:
        if isinstance(operation, ReducingOperation):
            return replace(operation, wire=DType.FP64, accumulate=DType.FP64)
        if isinstance(operation, CollectiveOperation):
            return replace(operation, wire=DType.FP64)
        return operation

    (program,) = schedule.programs
    buffers = tuple(
        replace(buffer, dtype=DType.FP64) if buffer.dtype is DType.FP32 else buffer
        for buffer in program.buffers
    )
    step = tuple(widened(operation) for operation in program.step)
    return replace(schedule, programs=(replace(program, buffers=buffers, step=step),))
