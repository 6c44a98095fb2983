"""A block whose linear layers are cut into tiles, each a unit: memory-centric tiling.

Rajbhandari et al. 2021, section 5.1.3: a large linear layer becomes a sequence of smaller ones;
stage 3 gathers, uses and frees each before the next. Here layers are cut along their outputs
(`out_splits` of DeepSpeed's `runtime/zero/tiling.py`): every tile computes some rows of the output
for all tokens, and the next operator joins them. So each output element is the same sum as in an
uncut layer; the gradient of the input is a sum over tiles.

With tensor ranks, each tile is a column- or row-parallel layer of Megatron-LM, which
`TiledLinearReturnBias` wraps (DeepSpeed 0.16): each tile of a column-parallel layer sums its input
gradient over the ranks, each tile of a row-parallel layer its output. The residual sum adds the
biases of the latter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from zsim.model.kernel import KernelKind, streaming
from zsim.model.model import ModelError, Unit, Value
from zsim.model.segment_exchange import SegmentExchange
from zsim.model.transformer.attention import attend, projections
from zsim.model.transformer.block import activate, add, norm
from zsim.model.transformer.linear import linear
from zsim.model.transformer.operator import Operator, Stretch, parameters_of, tensor_of
from zsim.model.transformer.segment import segments
from zsim.model.transformer.size import Size


def tile_rows(name: str, rows: int, tiles: int) -> tuple[int, ...]:
    """Return the rows of each tile of a layer, which differ by at most one.

    Raises:
        ModelError: there are fewer rows than tiles.
    """
    if rows < tiles:
        raise ModelError(f"zero.tiles: {tiles} must be at most the {rows} rows of {name}")
    cuts = [rows * number // tiles for number in range(tiles + 1)]
    return tuple(high - low for low, high in pairwise(cuts))


def tiled_block(size: Size, name: str, source: Value, *, local: bool = False) -> tuple[Unit, ...]:
    """Return the units of the block called `name`, which reads `source`, in order.

    If `local`, tokens see only a window.
    """
    block = _TilingBlock(size, name, local=local)
    normed = block.norm("ln1", source)
    parts = {
        part: block.linear(part, normed, width, biased=size.shape.biased_qkv)
        for part, width in projections(size).items()
    }
    attended = block.attention(parts)
    summands = block.summed("proj", attended, biased=size.shape.biased_output)
    middle = source
    if not size.shape.parallel_residual:
        middle, summands = block.add("sum", source, {"proj": summands}), ()
    normed = block.norm("ln2", middle)
    gate: tuple[Value, ...] = ()
    if size.shape.gated:
        gate = block.linear("gate", normed, size.inner_width, biased=size.shape.bias)
    up = block.linear("up", normed, size.inner_width, biased=size.shape.bias)
    wide = block.activation(gate, up)
    down = block.summed("down", wide, biased=size.shape.bias)
    block.add("output", middle, {"proj": summands, "down": down})
    return tuple(block.units)


class _TilingBlock:
    """Builds the units of a block in order."""

    def __init__(self, size: Size, name: str, *, local: bool) -> None:
        self.size = size
        self.name = name
        self.local = local
        self.units: list[Unit] = []

    def norm(self, part: str, source: Value) -> Value:
        """Add a norm."""
        target = self.size.value(f"{self.name}/{part}")
        return self._unit(part, norm(self.size, source, target, f"{self.name}.{part}"), (source,))

    def summed(self, part: str, source: Value, *, biased: bool) -> tuple[Value, ...]:
        """Add the tiles of a layer whose outputs are partial sums over the tensor axis."""
        own = biased and not self.size.cut
        return self.linear(part, source, self.size.hidden, biased=own, ends=self.size.token_sum)

    def linear(
        self,
        part: str,
        source: Value,
        width: int,
        *,
        biased: bool,
        ends: SegmentExchange | None = None,
    ) -> tuple[Value, ...]:
        """Add the tiles of a linear layer; without `ends`, each rank has its part of the output."""
        size, columns = self.size, source.elements // self.size.tokens
        layer = f"{self.name}.{part}"
        made: list[Value] = []
        for number, rows in enumerate(tile_rows(layer, width, size.shape.execution.tiles)):
            target = self._value(f"{part}/{number}", rows)
            operator = linear(
                size,
                tensor_of(source),
                tensor_of(target),
                size.part(f"{layer}.{number}.weight", rows, columns),
                bias=size.part(f"{layer}.{number}.bias", rows) if biased else None,
                narrow=size.narrow,
            )
            stretch = Stretch(
                inputs=(source.name,),
                outputs=(target,),
                operators=(operator,),
                begins=size.token_gather if ends is None else None,
                ends=ends,
            )
            made.append(self._unit(f"{part}.{number}", stretch, (source,)))
        return tuple(made)

    def attention(self, projected: dict[str, tuple[Value, ...]]) -> Value:
        """Add attention between its projections and the one of its output."""
        target = self._value("attended", self.size.query_width)
        joins = {part: self._join(part, tiles) for part, tiles in projected.items()}
        whole = {part: join.makes for part, join in joins.items()}
        core = attend(self.size, whole, tensor_of(target), self.name, local=self.local)
        given = tuple(tile for tiles in projected.values() for tile in tiles)
        return self._unit("attention", _stretch(given, target, (*joins.values(), *core)), given)

    def activation(self, gate: Sequence[Value], up: Sequence[Value]) -> Value:
        """Add the operators between the first layers of the MLP and its last one."""
        joins = [self._join(part, tiles) for part, tiles in (("gate", gate), ("up", up)) if tiles]
        gating = joins[0].makes if gate else None
        core = activate(self.size, gating, joins[-1].makes, self.name)
        target = self._value("wide", self.size.inner_width)
        made = (*core[:-1], replace(core[-1], makes=tensor_of(target)))
        given = (*gate, *up)
        return self._unit("activation", _stretch(given, target, (*joins, *made)), given)

    def add(self, part: str, source: Value, summands: Mapping[str, Sequence[Value]]) -> Value:
        """Add the sum of the residual and the outputs of tiles, by the name of their layer."""
        given = [tiles for tiles in summands.values() if tiles]
        joins = [self._join(f"{part}{number}", tiles) for number, tiles in enumerate(given)]
        whole = [
            Value(name=join.makes.name, elements=join.makes.elements, dtype=join.makes.dtype)
            for join in joins
        ]
        target = self.size.value(f"{self.name}/{part}")
        layers = [f"{self.name}.{layer}" for layer, tiles in summands.items() if tiles]
        core = add(self.size, (source, *whole), target, tuple(layers) if self.size.cut else ())
        read = (source, *(tile for tiles in given for tile in tiles))
        return self._unit(part, _stretch(read, target, (*joins, *core.operators)), read)

    def _join(self, part: str, tiles: Sequence[Value]) -> Operator:
        """Return the operator that concatenates the outputs of tiles, token by token."""
        tokens = self.size.tokens
        width = sum(tile.elements for tile in tiles) // tokens
        kind, dtype = KernelKind.ELEMENTWISE, self.size.dtype
        return Operator(
            reads=tuple(map(tensor_of, tiles)),
            makes=self.size.rows(f"{self.name}/{part}/joined", width),
            forward=(streaming(kind, (tokens, width), dtype, streams=2),),
            backward=(streaming(kind, (tokens, width), dtype, streams=2, backward=True),),
        )

    def _value(self, name: str, width: int) -> Value:
        size = self.size
        return Value(name=f"{self.name}/{name}", elements=size.tokens * width, dtype=size.dtype)

    def _unit(self, part: str, stretch: Stretch, given: Sequence[Value]) -> Value:
        """Add a unit of one segment; return its output."""
        made = segments((stretch,), given, self.size.shape.execution)
        self.units.append(
            Unit(
                name=f"{self.name}.{part}",
                parameters=parameters_of([stretch]),
                segments=made,
                block=self.name,
            )
        )
        return made[0].outputs[0]


def _stretch(given: Sequence[Value], target: Value, operators: tuple[Operator, ...]) -> Stretch:
    return Stretch(
        inputs=tuple(value.name for value in given), outputs=(target,), operators=operators
    )
