"""A transformer as segments of its model on one tensor parallel rank, in plain torch.

A segment is a module: the part of a unit between two collectives of the tensor axis, or a unit of a
pipeline stage. It reads and returns flat tensors of tokens, as buffers hold them. Linear layers
hold only this rank's rows or columns; parameters have the names of `zsim.model.transformer`.
"""

from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import Transformer
from zsim.model.model import BATCH, Model, Segment, Unit, Value
from zsim.model.transformer.ends import PLACES, TOKENS
from zsim.schedule.mesh import Mesh
from zsim.zero.names import PIPELINE
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.context_place import ALONE, ContextPlace
from zsim_torch.module.mixture_maker import MixtureMaker
from zsim_torch.module.norm import norm
from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.shared_segment import (
    AttendedSegment,
    OwnEmbedding,
    QueriesAndKeysSegment,
    own_loss,
    own_shape,
)
from zsim_torch.module.tensor_part import PartBox, TensorPlace
from zsim_torch.module.transformer import (
    Embedding,
    NextTokenLoss,
    TransformerBlock,
    add_perceptron,
    add_projections,
    attention,
    next_token_loss,
    perceptron,
)
from zsim_torch.module.unit import SegmentChoice
from zsim_torch.module.vocabulary_parallel import (
    OwnVocabulary,
    mean_cross_entropy,
    statistics,
    words,
)


class SegmentedDecoder(nn.Module):
    """Parameters of this rank under the model's names; `units` are its segments in order.

    All are on the device "meta", without values.
    """

    def __init__(
        self,
        model: Model,
        place: TensorPlace,
        context: ContextPlace = ALONE,
        experts: ExpertPlace = ExpertPlace(),  # noqa: B008  (constant)
    ) -> None:
        super().__init__()
        shape = model.architecture
        assert shape is not None
        maker = _SegmentMaker(model, place, context, experts)
        self.units = tuple(
            SegmentChoice(unit.name, number, maker.make(unit, segment))
            for unit in model.units
            for number, segment in enumerate(unit.segments)
        )
        for name, parameter in maker.held.items():
            _register(self, name, parameter)
        self._shape, self._place, self._experts = shape, place, experts

    def part_of(self, name: str) -> tuple[tuple[int, ...], tuple[PartBox, ...]]:
        """Return the shape of the full parameter `name`, and the boxes of this rank's part."""
        place, shape = self._place, self._shape
        if is_of_experts(name):
            return self._experts.part_of(self.get_parameter(name).shape)
        whole = place.whole_shape(shape, name, self.get_parameter(name).shape)
        return whole, place.boxes(shape, name, whole)


def is_segmented(model: Model, mesh: Mesh) -> bool:
    """Return True if units of `model` are cut into segments, or run in pipeline stages.

    Blocks whose router has a bias are segments, too, since they return the rows of each expert.
    """
    staged = any(axis.name == PIPELINE and axis.size > 1 for axis in mesh.axes)
    return staged or any(len(unit.segments) > 1 or unit.biases for unit in model.units)


def _register(whole: nn.Module, path: str, parameter: nn.Parameter) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in dict(whole.named_children()):
            whole.add_module(folder, nn.Module())
        whole = whole.get_submodule(folder)
    whole.register_parameter(name, parameter)


class _SegmentMaker:
    """Makes the modules of segments; a parameter used in several is shared, through `held`."""

    def __init__(
        self, model: Model, place: TensorPlace, context: ContextPlace, experts: ExpertPlace
    ) -> None:
        shape = model.architecture
        assert shape is not None
        self.shape = replace(
            own_shape(shape, context),
            attention_heads=shape.attention_heads // place.ranks,
            key_value_heads=shape.shared_heads // place.ranks,
            head_size=shape.head_width,
            intermediate_size=shape.wide // place.ranks,
        )
        self.place = place
        self.context = context
        self.mixtures = MixtureMaker(model, self.shape, place, experts)
        self.held: dict[str, nn.Parameter] = {}
        rows = -(-shape.vocab_size // place.ranks)
        start = min(place.number * rows, shape.vocab_size)
        self.rows = rows
        self.own = OwnVocabulary(start, min(start + rows, shape.vocab_size))

    def make(self, unit: Unit, segment: Segment) -> nn.Module:
        """Return the module of a segment and register its parameters."""
        with torch.device("meta"):
            made = self._module(unit, segment)
        for name in segment.parameters:
            self._hold(made, name)
        return made

    def _hold(self, part: nn.Module, name: str) -> None:
        """Replace the parameter of `part` by the shared one called `name` in the full model."""
        *path, last = _local(name).split(".")
        owner = part.get_submodule(".".join(path))
        own = owner.get_parameter(last)
        setattr(owner, last, self.held.setdefault(name, own))

    def _module(self, unit: Unit, segment: Segment) -> nn.Module:
        shape, dtype = self.shape, torch.float32
        made = self.mixtures.make(unit, segment, dtype) or self._shared(segment, dtype)
        if made is not None:
            return made
        (output,) = segment.outputs
        kind = output.name.rpartition("/")[2]
        match kind:
            case "words":
                return _WordsSegment(self, dtype)
            case "output" if PLACES in segment.parameters and TOKENS not in segment.parameters:
                return _PlacesSegment(self, output, dtype)
            case "output" if TOKENS in segment.parameters:
                return (
                    _WordsSegment(self, dtype) if self.place.ranks > 1 else Embedding(shape, dtype)
                )
            case "output" if len(unit.segments) == 1:
                return _BlockSegment(shape, dtype)
            case "ln" | "ln1" | "ln2":
                return _NormSegment(shape, kind, dtype)
            case "proj":
                return _AttentionSegment(shape, dtype)
            case "down":
                return _PerceptronSegment(shape, dtype)
            case "sum" | "output":
                return _SumSegment(shape, segment, dtype)
            case "logits":
                whole = len(segment.parameters) > 1  # with the norm
                return (_HeadSegment if whole else _LogitsSegment)(self, segment, dtype)
            case "wide":
                return _WidenedLogits(TORCH_DTYPE[output.dtype])
            case "statistics" if segment.parameters:
                return _ScoresSegment(self, segment, dtype)
            case "statistics":
                return _StatisticsSegment(self.own)
            case "loss" if not segment.parameters:
                return NextTokenLoss() if BATCH in segment.inputs else _LossSegment()
            case "loss" if len(unit.segments) == 1:
                return _HeadSegment(self, segment, dtype)
            case _:
                raise ValueError(f"unit {unit.name}: no module makes {output.name}")

    def _shared(self, segment: Segment, dtype: torch.dtype) -> nn.Module | None:
        """Return the module of a segment that differs in a context group, else None."""
        if self.context.ranks == 1:
            return None
        if segment.shared_input is not None:
            return AttendedSegment(self.shape, self.context, dtype)
        names = [output.name for output in segment.outputs]
        if len(names) > 1:
            return QueriesAndKeysSegment(self.shape, self.context, dtype)
        if TOKENS in segment.parameters and names[0].endswith("/output"):
            return OwnEmbedding(self.shape, self.context, dtype)
        return None


def is_of_experts(name: str) -> bool:
    """Return True if the parameter `name` stacks matrices of routed experts."""
    return ".experts." in name


def _local(name: str) -> str:
    """Return the name of a parameter in its segment, without the unit's name."""
    return name.partition(".")[2]


class _RowSegment(nn.Module):
    """A segment that reads rows of the hidden state."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape

    def _rows(self, hidden: Tensor) -> Tensor:
        """Return `hidden` as [tokens, hidden size]."""
        return hidden.view(-1, self.shape.hidden_size)

    def _sequences(self, hidden: Tensor) -> Tensor:
        """Return `hidden` as [sequences, tokens, hidden size]."""
        return hidden.view(-1, self.shape.sequence_length, self.shape.hidden_size)


class _HeldMatrix(nn.Module):
    """A weight matrix without a forward."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype))


class _WordsSegment(nn.Module):
    """This rank's summand of the embeddings of tokens."""

    def __init__(self, maker: _SegmentMaker, dtype: torch.dtype) -> None:
        super().__init__()
        self.own = maker.own
        self.token = _HeldMatrix(maker.rows, maker.shape.hidden_size, dtype)

    def forward(self, batch: Tensor) -> Tensor:
        """Look up all tokens but the last of each sequence."""
        return words(batch, self.token.weight, self.own)


class _PlacesSegment(_RowSegment):
    """Learned positions, added to the embeddings of this rank's tokens."""

    def __init__(self, maker: _SegmentMaker, output: Value, dtype: torch.dtype) -> None:
        super().__init__(maker.shape)
        tokens = output.elements // maker.shape.hidden_size
        self.first = maker.place.number * tokens if output.tensor_sharded else 0
        self.position = _HeldMatrix(maker.shape.places, maker.shape.hidden_size, dtype)

    def forward(self, found: Tensor) -> Tensor:
        """Return the hidden state."""
        rows, length, weight = self._rows(found), self.shape.sequence_length, self.position.weight
        if not self.first and not len(rows) % length:
            return (rows.view(-1, length, rows.shape[1]) + weight[:length]).flatten(0, 1)
        places: list[Tensor] = []
        start, left = self.first % length, len(rows)
        while left:
            places.append(weight[start : min(start + left, length)])
            start, left = 0, left - len(places[-1])
        return rows + torch.cat(places)


class _BlockSegment(TransformerBlock):
    """A whole block."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state."""
        return super().forward(hidden.view(-1, self.shape.sequence_length, self.shape.hidden_size))


class _NormSegment(_RowSegment):
    """A norm of this rank's tokens, under its name in the unit."""

    def __init__(self, shape: Transformer, name: str, dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.add_module(name, norm(shape, dtype))
        self._name = name

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalized rows."""
        made: Tensor = self.get_submodule(self._name)(self._rows(hidden))
        return made


class _AttentionSegment(_RowSegment):
    """Attention of this rank's heads; returns summands of its output, without the bias."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__(shape)
        add_projections(self, shape, dtype, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        """Return summands for all tokens."""
        return attention(self, self.shape, self._sequences(normed))


class _PerceptronSegment(_RowSegment):
    """An MLP of this rank's hidden units; returns summands of its output, without the bias."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__(shape)
        add_perceptron(self, shape, dtype, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        """Return summands for all tokens."""
        return perceptron(self, self.shape, self._rows(normed))


class _HeldBias(nn.Module):
    """A bias without a forward."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype))


class _SumSegment(_RowSegment):
    """Residual sum, including the biases that were omitted from the summands."""

    def __init__(self, shape: Transformer, segment: Segment, dtype: torch.dtype) -> None:
        super().__init__(shape)
        self._names = [_local(name) for name in segment.parameters]
        for name in self._names:
            self.add_module(name.partition(".")[0], _HeldBias(shape.hidden_size, dtype))

    def forward(self, *summands: Tensor) -> Tensor:
        """Return the sum of all rows."""
        first, *others = map(self._rows, summands)
        made = first + others[0]
        for each in (*others[1:], *(attrgetter(name)(self) for name in self._names)):
            made += each
        return made


class _LogitsSegment(_RowSegment):
    """Logits of this rank's part of the vocabulary."""

    def __init__(self, maker: _SegmentMaker, segment: Segment, dtype: torch.dtype) -> None:
        super().__init__(maker.shape)
        self._name = _local(segment.parameters[-1])
        table = _HeldMatrix(maker.rows, maker.shape.hidden_size, dtype)
        if self._name == "weight":
            self.weight = table.weight
        else:  # tied to the embedding
            self.token = table

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        """Return logits [tokens, rows of this rank] of normalized hidden states."""
        weight: Tensor = attrgetter(self._name)(self)
        return functional.linear(self._rows(hidden), weight)


class _HeadSegment(_LogitsSegment):
    """A whole head, or a head without the loss."""

    def __init__(self, maker: _SegmentMaker, segment: Segment, dtype: torch.dtype) -> None:
        super().__init__(maker, segment, dtype)
        self.context = maker.context
        self.ln = norm(maker.shape, dtype)

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the loss, a scalar; without a batch, return the logits."""
        logits = super().forward(self.ln(self._sequences(hidden)))
        if not others:
            return logits
        (batch,) = others
        if self.context.ranks > 1:
            return own_loss(logits, batch, self.context)
        return next_token_loss(logits, batch)


class _WidenedLogits(nn.Module):
    """A cast to the data type of the loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, logits: Tensor) -> Tensor:
        """Return a copy of `logits` in that data type."""
        return logits.to(self.dtype, copy=True)


class _StatisticsSegment(nn.Module):
    """Summands of the loss."""

    def __init__(self, own: OwnVocabulary) -> None:
        super().__init__()
        self.own = own

    def forward(self, logits: Tensor, batch: Tensor) -> Tensor:
        """Return the statistics, [3, tokens]."""
        return statistics(logits.view(batch.shape[0] * (batch.shape[1] - 1), -1), batch, self.own)


class _ScoresSegment(_LogitsSegment):
    """Logits, reduced to the summands of the loss."""

    def __init__(self, maker: _SegmentMaker, segment: Segment, dtype: torch.dtype) -> None:
        super().__init__(maker, segment, dtype)
        self.own = maker.own

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the statistics, [3, tokens]."""
        (batch,) = others
        logits = super().forward(hidden)
        if logits.dtype is not torch.float64:
            logits = logits.float()
        return statistics(logits, batch, self.own)


class _LossSegment(nn.Module):
    """The loss from statistics summed over the ranks."""

    def forward(self, summed: Tensor) -> Tensor:
        """Return the mean cross entropy, a scalar."""
        return mean_cross_entropy(summed)
