"""A tensor that this rank holds some boxes of, for torch.distributed.checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zsim_torch.checkpoint.flat_range import TensorBox


class HeldBox(NamedTuple):
    """A box, and the buffer that holds its elements contiguously from `position`."""

    box: TensorBox
    buffer: str
    position: int


class HeldTensor(torch.Tensor):
    """A tensor with a shape and data type, but with memory for this rank's boxes only.

    Planners of torch.distributed.checkpoint use such tensors through three methods, like `DTensor`
    (`torch.distributed._checkpointable`); no other operation is supported. A box is a view of its
    buffer, created when it is written or read.
    """

    held: Sequence[HeldBox]
    flat: Callable[[str], torch.Tensor]

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        held: Sequence[HeldBox],
        flat: Callable[[str], torch.Tensor],
    ) -> Self:
        """Return a new tensor; `flat` returns all elements of a buffer."""
        # Torch documents it only under this name (docs: "Extending PyTorch").
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
        made: Self = make(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        made.held = held
        made.flat = flat
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function
        cls,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (never)
        """Refuse every operator.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{func}: this rank has a part of the tensor; save and load it alone")

    def __repr__(self) -> str:  # type: ignore[override]  # no contents to show
        """Return shape, data type, and the number of elements on this rank."""
        here = sum(each.box.elements for each in self.held)
        return f"HeldTensor({tuple(self.shape)}, {self.dtype}, {here} of {self.numel()} elements)"

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return an item for each box."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes of this rank."""
        return [
            ChunkStorageMetadata(torch.Size(each.box.offsets), torch.Size(each.box.sizes))
            for each in self.held
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box at the offset of `index`."""
        (found,) = [each for each in self.held if each.box.offsets == tuple(index.offset or ())]
        end = found.position + found.box.elements
        return self.flat(found.buffer)[found.position : end].view(found.box.sizes)
