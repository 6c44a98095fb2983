"""Layers of each stage of Megatron-LM's pipeline, and of each of its virtual stages.

Functions named in comments are from `megatron/core` in August 2026 (d98e8a64). Configurations
that fail their assertions are rejected here with a message that names the field.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

LAYOUT = "zero.megatron.pipeline_model_parallel_layout"
VIRTUAL = "zero.megatron.num_virtual_stages_per_pipeline_rank"

LONGEST = 10_000
"""Largest number of characters of a layout with repeats expanded."""

EMBEDDING, LAYER, LOSS = "E", "t", "L"

# parse_str_to_list of transformer/pipeline_parallel_layer_layout.py: brackets are repeated first,
# then single characters, including bars
REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def stages_in(layout: str) -> list[str]:
    """Return the content of each virtual stage of a layout, a character for each layer.

    Raises:
        ValueError: it is invalid, or has parts that are not modeled.
    """
    text = layout.replace(",", "")
    for pattern in REPEATED:
        text = _without_repeats(pattern, text)
    known = {EMBEDDING, LAYER, LOSS, "|"}
    for each in text:
        if each == "m":
            raise ValueError("m: heads of several tokens are not modelled")
        if each not in known:
            raise ValueError(f"{each!r} must be E, t, L, | or a repeat such as (tt|)*3")
    return text.split("|")


def _without_repeats(pattern: re.Pattern[str], text: str) -> str:
    """Return `text` with repeats expanded.

    Raises:
        ValueError: it would be too long.
    """
    found: list[str] = []
    end = length = 0
    for match in pattern.finditer(text):
        digits = match[2]
        times = int(digits) if len(digits) < len(str(LONGEST)) else LONGEST + 1
        length += len(match[1]) * times
        if length > LONGEST:
            raise ValueError(f"must have at most {LONGEST:,} layers and bars")
        found += [text[end : match.start()], match[1] * times]
        end = match.end()
    return "".join([*found, text[end:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """Layers of stages, as the options set them.

    Attributes:
        first, last: layers of the first and of the last stage; None for as many as the others.
        embedding, loss: True if they count as a layer of the first and of the last stage.
        layers_of_chunk: layers of a virtual stage; None if `chunks` is set instead.
        chunks: virtual stages of a stage; None for one.
        layout: layers of each virtual stage; excludes the other options. None if they are used.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layers_of_chunk: int | None = None
    chunks: int | None = None
    layout: str | None = None

    def sizes(self, layers: int, stages: int) -> tuple[int, ...]:
        """Return the layers of each virtual stage, in the order of the model.

        Virtual stage c of stage s is number c * `stages` + s.

        Raises:
            ValueError: layers cannot be distributed so.
        """
        # get_num_layers_to_build of transformer/transformer_block.py, with the checks of
        # TransformerConfig.__post_init__ and validate_args
        if self.layout is not None:
            return _laid_out(self.layout, layers, stages)
        if self.first is None and self.last is None:
            each = self._even(layers, stages)
            of_stages, chunks = (
                [each] * stages,
                self.chunks or each // (self.layers_of_chunk or each),
            )
        else:
            of_stages, chunks = self._uneven(layers, stages), self.chunks or 1
        found = [size // chunks for _ in range(chunks) for size in of_stages]
        found[0] -= self.embedding
        found[-1] -= self.loss
        return tuple(found)

    def _even(self, layers: int, stages: int) -> int:
        """Return the layers of every stage, with embedding and loss if they count."""
        counted = layers + self.embedding + self.loss
        multiple = prod((stages, self.layers_of_chunk or 1, self.chunks or 1))
        if counted % multiple == 0 and layers > 0:
            return counted // stages
        names = [name for name in ("embedding", "loss") if getattr(self, name)]
        more = f" and {len(names)} for {' and '.join(names)}" if names else ""
        by = f" x {self.layers_of_chunk} of a virtual stage" if self.layers_of_chunk else ""
        by = f" x {self.chunks} virtual stages" if self.chunks else by
        raise ValueError(
            f"model.layers: {layers}{more} must be a multiple of parallel.pipeline = {stages}{by}"
        )

    def _uneven(self, layers: int, stages: int) -> list[int]:
        """Return the layers of each stage if the first or the last stage differs."""
        first = [] if self.first is None else [self.first]
        last = [] if self.last is None else [self.last]
        between = stages - len(first) - len(last)
        left = layers - sum(first) - sum(last)
        fits = left > 0 and left % between == 0 if between else left == 0
        if not fits:
            ends = " and ".join(
                f"{size[0]} of the {name} stage"
                for name, size in (("first", first), ("last", last))
                if size
            )
            must = f"a multiple of the {between} other stages" if between else "0"
            raise ValueError(f"model.layers: {layers} less {ends} is {left}, must be {must}")
        found = [*first, *[left // between if between else 0] * between, *last]
        for size in found:
            if size % (self.chunks or 1):
                raise ValueError(
                    f"{VIRTUAL}: {self.chunks} must divide the {size} layers of a stage"
                )
        return found


def _laid_out(layout: str, layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage of a layout.

    Raises:
        ValueError: it is invalid, or does not fit the layers or the stages.
    """
    found = stages_in(layout)
    _need_layout(found, layers, stages)
    return tuple(each.count(LAYER) for each in found)


def _need_layout(found: Sequence[str], layers: int, stages: int) -> None:
    # validate_layer_layout
    if len(found) % stages:
        raise ValueError(
            f"{LAYOUT}: {len(found)} stages must be a multiple of parallel.pipeline = {stages}"
        )
    whole = "".join(found)
    if not (whole.startswith(EMBEDDING) and whole.endswith(LOSS)):
        raise ValueError(f"{LAYOUT}: must begin with E and end with L")
    if (count := whole.count(LAYER)) != layers:
        raise ValueError(f"{LAYOUT}: its {count} layers must be model.layers = {layers}")
    if len(whole) != layers + 2:
        raise ValueError(f"{LAYOUT}: must have one E and one L")
    if not all(found):
        place = list(map(bool, found)).index(False)
        raise ValueError(f"{LAYOUT}: stage {place} of {len(found)} has nothing: is not modelled")
