"""Micro-batches of text: bytes are tokens, so that any file can be used without a vocabulary.

The sequences of a step depend only on the seed and the step. They are numbered within the step:
micro-batch m of the data-parallel rank d (of D, each taking B sequences) has the numbers (m * D +
d) * B to (m * D + d) * B + B - 1. So ranks read different text, and one process that takes D times
as many sequences, or D times as many micro-batches, reads the same text as D ranks.
"""

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zsim.limits import limits

VOCABULARY = 256
"""Number of values of a byte; a model needs at least as many tokens."""


class TextError(ValueError):
    """A text that cannot be read or is too short; the message is one line that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlace:
    """A micro-batch's place in the text.

    It has `size` sequences for the rank at `coordinate` of `ranks`.
    """

    step: int
    micro_batch: int
    coordinate: int
    ranks: int
    size: int


class Text:
    """A text that provides random sequences of `sequence_length` + 1 tokens.

    A byte is a token, modulo `vocab_size`.

    Raises:
        TextError: the text has fewer than `sequence_length` + 1 bytes.
    """

    def __init__(
        self,
        content: bytes,
        sequence_length: int,
        *,
        vocab_size: int = VOCABULARY,
        name: str = "text",
    ) -> None:
        needed = sequence_length + 1
        if not content:
            raise TextError(f"data: {name} is empty")
        if len(content) < needed:
            raise TextError(
                f"data: {name} has {len(content)} bytes, at least {needed} are needed "
                f"(model.sequence_length + 1)"
            )
        self._tokens: NDArray[np.uint8] = np.frombuffer(content, np.uint8)
        self._length = needed
        self._vocab_size = vocab_size

    def batch(self, which: BatchPlace, *, seed: int) -> Tensor:
        """Return tokens, int64 [size, sequence_length + 1]."""
        first = (which.micro_batch * which.ranks + which.coordinate) * which.size
        starts = [self._start(seed, which.step, first + index) for index in range(which.size)]
        rows = [self._tokens[start : start + self._length] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64) % self._vocab_size)

    def _start(self, seed: int, step: int, number: int) -> int:
        """Return the start of sequence `number` of a step."""
        generator = np.random.default_rng((seed, step, number))
        return int(generator.integers(len(self._tokens) - self._length + 1))


def read_text(path: Path | None, sequence_length: int, *, vocab_size: int = VOCABULARY) -> Text:
    """Return the text in the file at `path`, or the one that ships with the package.

    The package's text is mapped to a toy model's smaller vocabulary by a modulo. A file is not,
    since that would lose information.

    Raises:
        TextError: the file cannot be read, is empty, or shorter than a sequence, or the vocabulary
            does not hold its bytes.
    """
    if path is None:
        content = (files("zsim_torch") / "text.txt").read_bytes()
        if len(content) <= sequence_length:  # a toy text may repeat for a long sequence
            content *= -(-(sequence_length + 1) // len(content))
        return Text(content, sequence_length, vocab_size=vocab_size, name="the package's text")
    try:
        if path.exists() and not path.is_file() and path != Path(os.devnull):
            raise TextError(f"data: {path}: must be a regular file")
        size_bytes = path.stat().st_size
        if size_bytes > limits().file_bytes:
            raise TextError(
                f"data: {path} has {size_bytes} bytes, must have at most {limits().file_bytes}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise TextError(f"data: {path}: {(error.strerror or str(error)).lower()}") from None
    if vocab_size < VOCABULARY:
        raise TextError(
            f"model.vocab_size: {vocab_size} must be at least {VOCABULARY} to train on {path}, "
            "since bytes are tokens"
        )
    return Text(content, sequence_length, vocab_size=vocab_size, name=str(path))
