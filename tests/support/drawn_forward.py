"""Drawn modules: repeated blocks, and something between them that no unit was told of."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 4

Step = tuple[str, int, int]


class Mixed(nn.Module):
    """A block with keywords and several results, one of which is an argument as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *, beside: dict[str, Tensor | None]) -> dict[str, Any]:
        other = beside["value"]
        mixed = self.one(x) if other is None else self.one(x) * torch.tanh(self.other(other))
        return {"results": (torch.tanh(mixed), mixed.detach().argmax(-1)), "beside": beside}


class DrawnForward(nn.Module):
    """Blocks and what stands between them, in an order that was drawn."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixed() for kind, *_ in steps if kind == "block")
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift: Tensor
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, batch: Tensor) -> Tensor:
        values, blocks = [batch, self.entry(batch)], iter(self.blocks)
        scale = self.scale[:WIDTH]  # a view of a parameter that crosses
        for kind, first, second in self.steps:
            one, other = values[first % len(values)], values[second % len(values)]
            if kind == "block":
                made = next(blocks)(one, beside={"value": None if first == second else other})
                found, places = made["results"]
                values.append(found + 0.1 * places[:, None])
                other = made["beside"]["value"]
                values += [] if other is None else [other]
            elif kind == "add":
                values.append((one + scale).add_(other))
            elif kind == "quiet":
                with torch.no_grad():
                    values.append(one * 2)
                values.append(values[-1] + self.shift)
            elif kind == "hook":
                values.append(one * 1.0)
                if values[-1].requires_grad:
                    values[-1].register_hook(lambda slope: slope * 2)
            else:
                values.append(torch.cat([one, other], -1)[:, 1 : WIDTH + 1])
        return torch.stack([each.square().mean() for each in values]).sum()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["block", "block", "add", "hook", "quiet", "cat"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=6,
)
