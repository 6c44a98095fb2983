"""Shapes of the models that zsim can build by itself, in the words of their configuration files."""

from dataclasses import dataclass


class ArchitectureError(ValueError):
    """A shape that cannot exist; the message starts with the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT:
    """A decoder-only transformer as GPT-2 (Radford et al. 2019): pre-norm, biases.

    `sequence_length` and `vocab_size` are in tokens. With `tied_embeddings` the output projection
    is the token embedding.
    """

    layers: int
    hidden_size: int
    attention_heads: int
    sequence_length: int
    vocab_size: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "attention_heads", "sequence_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise ArchitectureError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.hidden_size % self.attention_heads:
            raise ArchitectureError(
                f"attention_heads: {self.attention_heads} must divide hidden_size "
                f"{self.hidden_size}"
            )
