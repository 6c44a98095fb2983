"""Options of a runtime that is emulated: what it can do, and what follows from them for a strategy.

Runtimes are found by the entry points "zsim.runtimes" of installed packages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Protocol, cast

from pydantic import AfterValidator

from zsim.dtype import DType
from zsim.entry_point import entries
from zsim.strategy.config_table import Table
from zsim.strategy.execution import ContextExchange, TokenFusion
from zsim.strategy.offload import FileAccess, MemoryTier
from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods

GROUP = "zsim.runtimes"


def _floating(value: DType) -> DType:
    if value in (DType.INT8, DType.INT64):
        raise ValueError("must be fp16, bf16, fp32 or fp64")  # gradients are averaged in it
    return value


FloatFormat = Annotated[DType, AfterValidator(_floating)]
"""A format of fractions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats on the way from a gradient to an update.

    Attributes:
        compute: of parameters, activations, and the gradients that backward makes.
        reduction: in which gradients are summed over ranks that see different data.
        whole: in which gradients of several micro-batches are summed before their reduction.
        reduced: in which they are summed after it.
        optimizer: of what the update reads and writes.
    """

    compute: DType
    reduction: DType
    whole: DType
    reduced: DType
    optimizer: DType


class RuntimeOptions(Table):
    """Base of the options of every runtime: a table of a scenario.

    Class attributes:
        stages: ZeRO stages that the runtime is or has.
        usual_stage: the one that a scenario has if it names none; None asks for one.
        has_replicas: whether states may be sharded over some ranks and replicated over others.
        has_pipeline: whether units can be split over stages of a pipeline.
        ties_ends: whether the first and the last stage may have one embedding, which is tied.
        checkpoints_every_nth: whether of several blocks in a row one alone can be checkpointed.
        takes_frozen: whether there may be parameters that are not trained.
        trains_narrow: whether parameters in bf16 are trained themselves (`pure_bf16`).
        has_context: whether it has ranks that share a sequence in the way that is modelled here; a
            search asks no other for them.
        context_exchange: how ranks that share a sequence exchange keys and values by default.
        merges_context: whether attention to what was gathered of them is one rank after the other.
        checkpoint_option: the option, a flag, with which checkpoints go to the host's memory; None
            if there is none.
        layers_option: the option with which all that some first layers keep for their backward goes
            there; None if there is none.
        stored_least: elements from which on a tensor of such a layer does.
    """

    stages: ClassVar[tuple[int, ...]] = ()
    usual_stage: ClassVar[int | None] = None
    has_replicas: ClassVar[bool] = True
    has_pipeline: ClassVar[bool] = False
    ties_ends: ClassVar[bool] = False
    checkpoints_every_nth: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    trains_narrow: ClassVar[bool] = False
    has_context: ClassVar[bool] = False
    context_exchange: ClassVar[ContextExchange] = ContextExchange.ALL_GATHER
    merges_context: ClassVar[bool] = False
    checkpoint_option: ClassVar[str | None] = None
    layers_option: ClassVar[str | None] = None
    stored_least: ClassVar[int] = 0

    @staticmethod
    def kinds() -> tuple[type["RuntimeOptions"], ...]:
        """Return the options of all runtimes that are installed."""
        return _kinds()

    @property
    def moves_checkpoints(self) -> bool:
        """True if checkpoints are in the host's memory from forward until they are run again."""
        return self.checkpoint_option is not None and bool(getattr(self, self.checkpoint_option))

    @property
    def layers_on_host(self) -> int:
        """Return of how many first layers the host's memory has what they keep for backward."""
        return 0 if self.layers_option is None else int(getattr(self, self.layers_option))

    @property
    def cuts_tokens(self) -> bool:
        """True if ranks of the tensor axis hold different tokens of the hidden state."""
        return False

    @property
    def keeps_whole(self) -> bool:
        """True if what was gathered of such a state is kept for backward."""
        return False

    @property
    def whole_logits(self) -> bool:
        """True if ranks of the tensor axis gather logits of the whole vocabulary for the loss."""
        return False

    @property
    def composes_loss(self) -> bool:
        """True if the loss over parts of the vocabulary is one operator after the other."""
        return False

    @property
    def whole_embedding(self) -> bool:
        """True if each rank of the tensor axis has the whole token embedding."""
        return False

    @property
    def gathers_each(self) -> bool:
        """True if each linear layer gathers the tokens that it reads, by itself."""
        return False

    @property
    def gathers_float8(self) -> bool:
        """True if weights of 8-bit linear layers are cast before they are gathered."""
        return False

    @property
    def gathers_float8_tokens(self) -> bool:
        """True if tokens that 8-bit linear layers read are cast before they are gathered."""
        return False

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return what fuses products with collectives of the tokens that they read or make."""
        return None

    @property
    def overlap_methods(self) -> OverlapMethods:
        """Return how products run beside these collectives in userbuffers."""
        return DEFAULT_METHODS

    @property
    def splits_outputs(self) -> bool:
        """True if what userbuffers scatter is made in parts."""
        return True

    @property
    def rearranges(self) -> bool:
        """True if collectives along tokens copy what is whole, since sequences come first."""
        return False

    @property
    def in_place_loss(self) -> bool:
        """True if the gradient of the logits takes the place of their softmax, on any rank."""
        return False

    @property
    def file_access(self) -> FileAccess:
        """The way files are read and written, where something is in files."""
        return FileAccess()

    @property
    def splits_backward(self) -> bool:
        """True if stages of a pipeline make gradients of inputs first, those of weights later."""
        return False

    @property
    def stages_in_v(self) -> bool:
        """True if the second of two chunks of stages goes back from the last stage to the first."""
        return False

    @property
    def collects_stage(self) -> bool:
        """True if whole gradients of a stage of a pipeline collect until its last backward."""
        return False

    def keeps_stage_whole(self, *, chunks: int) -> bool:
        """Return whether all parameters of a stage are gathered from its first forward on."""
        del chunks
        return False

    def layers_of_stages(self, *, layers: int, stages: int) -> tuple[int, ...] | None:
        """Return how many layers each virtual stage of a pipeline has, in the order of the model.

        So many as a multiple of `stages` are there, since each stage has as many. None if blocks
        are dealt out by what they cost.

        Raises:
            ValueError: layers cannot be dealt out so; the message starts with the field.
        """
        del layers, stages
        return None

    @property
    def head_is_whole(self) -> bool:
        """Return whether what follows the layers is on one stage, if blocks are dealt out."""
        return False

    def cuts_messages(self, *, tensor: int) -> bool:
        """Return whether of `tensor` ranks each sends a part of what all hand on in a pipeline."""
        del tensor
        return False

    def inner(self, *, stage: int, data: int) -> tuple[str, int | None]:
        """Return the option that splits the data axis, and its inner ranks; None if it does not."""
        del stage, data
        return "", None

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return in which formats gradients are reduced and accumulated."""
        del stage
        return Formats(
            compute=compute,
            reduction=compute,
            whole=compute,
            reduced=compute,
            optimizer=optimizer,
        )

    def gradient_bytes(self, *, stage: int, compute: DType, data: int) -> int:
        """Return the bytes for gradients that each element of a parameter takes all the time."""
        del stage, compute, data
        return 0

    def alignment(self, *, stage: int, data: int) -> int:
        """Return at multiples of how many elements the shards of model states begin."""
        del stage, data
        return 1

    def tiers(self, *, stage: int) -> dict[str, MemoryTier]:
        """Return by option the tier of memory that it moves something to, beyond the device."""
        del stage
        return {}

    def without_replicas(self, *, stage: int) -> str | None:
        """Return where there are no replicas of shards, after its name; None if there are."""
        if not self.has_replicas:
            return ""
        return None if stage else " in stage 0"

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield options that cannot be in a stage, with their value and what is allowed.

        `moments` is how many the optimizer keeps of each parameter.
        """
        del stage, moments
        yield from ()

    def smaller_buckets(self, elements: int) -> str | None:
        """Return the option with which buckets hold at most so many elements; None if they do."""
        del elements
        return None

    def fewer_gathered(self) -> str | None:
        """Return the option with which fewer parameters are gathered at once, if there is one."""
        return None

    @classmethod
    def offloads(cls, *, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return options that move states off the device, those that move least first."""
        del stage
        return ()


def names() -> tuple[str, ...]:
    """Return the names of all runtimes that are installed; imports none of them."""
    return tuple(sorted({entry.name for entry in entries(GROUP)}))


class Registered(Protocol):
    """Object behind an entry point: `zsim.runtimes.registry.Runtime` has the rest of it."""

    @property
    def options(self) -> type[RuntimeOptions]:
        """Class of the options that the runtime takes."""
        ...


@cache
def registered() -> dict[str, Registered]:
    """Return every runtime that is installed, by name.

    Raises:
        ValueError: two packages register one name.
    """
    found: dict[str, Registered] = {}
    for entry in entries(GROUP):
        if entry.name in found:
            raise ValueError(f"runtime {entry.name!r} is registered more than once")
        found[entry.name] = cast("Registered", entry.load())
    return found


@cache
def _kinds() -> tuple[type[RuntimeOptions], ...]:
    return tuple(each.options for each in registered().values())
