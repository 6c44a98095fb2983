"""A block in plain torch modules whose linear layers are cut into tiles, each a unit.

As in `zsim.model.transformer.tiling`, a tile computes some rows of a layer's output, and the next
module concatenates the tiles. A block's units are its children and the children of its layers.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from zsim.model.architecture import Activation, Transformer
from zsim.model.transformer.tiling import tile_rows
from zsim_torch.module.block_layers import activate, linear_layers, projections
from zsim_torch.module.causal_attention import attend_to
from zsim_torch.module.norm import norm


class _Joined(torch.autograd.Function):
    """Concatenates tiles along the last dimension.

    Each gradient is a separate copy: a view would keep those of all tiles alive.
    """

    @staticmethod
    def forward(ctx: Any, *tiles: Tensor) -> Tensor:  # noqa: ANN401  (torch's own)
        """Return all tiles, concatenated."""
        ctx.widths = [tile.shape[-1] for tile in tiles]
        return torch.cat(tiles, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the gradient of each tile."""
        parts = torch.split(gradients[0], ctx.widths, -1)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    made: Tensor = _Joined.apply(*tiles)  # type: ignore[no-untyped-call]
    return made


class TiledLinear(nn.ModuleList):
    """A linear layer cut along its outputs; its children are linear layers."""

    def __init__(
        self, name: str, size: tuple[int, int, bool], tiles: int, dtype: torch.dtype
    ) -> None:
        rows, columns, biased = size
        super().__init__(
            nn.Linear(columns, each, bias=biased, dtype=dtype)
            for each in tile_rows(name, rows, tiles)
        )

    def tiles(self, source: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each tile."""
        return tuple(tile(source) for tile in self)


class _Sum(nn.Module):
    """Adds the outputs of tiles of one or several layers to the residual."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles

    def forward(self, residual: Tensor, *summands: Tensor) -> Tensor:
        """Return the sum."""
        for first in range(0, len(summands), self.tiles):
            residual = residual + _joined(summands[first : first + self.tiles])
        return residual


class _Attention(nn.Module):
    """Attention to the outputs of the projections' tiles."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, *made: Tensor) -> Tensor:
        """Return the attention output, [sequences, tokens, heads x head size]."""
        tiles = self.shape.execution.tiles
        starts = range(0, len(made), tiles)
        return attend_to(self.shape, [_joined(made[first : first + tiles]) for first in starts])


class _Activation(nn.Module):
    """The activation of an MLP on outputs of tiles; those of the gate come first."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.is_gated = shape.activation is Activation.SWIGLU

    def forward(self, *made: Tensor) -> Tensor:
        """Return the input of the MLP's last layer."""
        if not self.is_gated:
            return activate(None, _joined(made))
        half = len(made) // 2
        return activate(_joined(made[:half]), _joined(made[half:]))


class TiledBlock(nn.Module):
    """Causal self-attention and an MLP in tiles, each with a norm before it and a residual."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        tiles, layers = shape.execution.tiles, linear_layers(shape)
        made: dict[str, nn.Module] = {
            name: TiledLinear(name, size, tiles, dtype) for name, size in layers.items()
        }
        made |= {"ln1": norm(shape, dtype), "ln2": norm(shape, dtype), "output": _Sum(tiles)}
        made |= {"attention": _Attention(shape), "activation": _Activation(shape)}
        if not shape.parallel_residual:
            made["sum"] = _Sum(tiles)
        for name in _parts(shape):
            self.add_module(name, made[name])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        normed = self._run("ln1", hidden)
        attended = self._run("attention", *self._tiles(normed, *projections(self.shape)))
        middle, summands = hidden, self._tiles(attended, "proj")
        if not self.shape.parallel_residual:
            middle, summands = self._run("sum", hidden, *summands), ()
        gated = self.shape.activation is Activation.SWIGLU
        up = self._tiles(self._run("ln2", middle), *(("gate", "up") if gated else ("up",)))
        down = self._tiles(self._run("activation", *up), "down")
        return self._run("output", middle, *summands, *down)

    def _run(self, name: str, *inputs: Tensor) -> Tensor:
        made: Tensor = self.get_submodule(name)(*inputs)
        return made

    def _tiles(self, source: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Return the outputs of the tiles of some layers, layer by layer."""
        layers = (self.get_submodule(name) for name in names)
        return tuple(
            tile
            for layer in layers
            if isinstance(layer, TiledLinear)
            for tile in layer.tiles(source)
        )


def _parts(shape: Transformer) -> tuple[str, ...]:
    """Return the children of a block in the order of forward."""
    gate = ("gate",) if shape.activation is Activation.SWIGLU else ()
    sum_ = () if shape.parallel_residual else ("sum",)
    mlp = ("ln2", *gate, "up", "activation", "down", "output")
    return ("ln1", *projections(shape), "attention", "proj", *sum_, *mlp)


def tiled_units(shape: Transformer) -> tuple[str, ...]:
    """Return the units of a block in the order of forward, as path suffixes."""
    layers = linear_layers(shape)
    tiles = [f".{number}" for number in range(shape.execution.tiles)]
    return tuple(
        f".{part}{tile}" for part in _parts(shape) for tile in (tiles if part in layers else [""])
    )


def layer_of_tile(shape: Transformer, name: str) -> tuple[str, slice]:
    """Return a tile parameter's name in the untiled layer, and its rows there."""
    block, layer, number, kind = name.split(".")
    rows = tile_rows(layer, linear_layers(shape)[layer][0], shape.execution.tiles)
    starts = (0, *accumulate(rows))
    return f"{block}.{layer}.{kind}", slice(starts[int(number)], starts[int(number) + 1])
