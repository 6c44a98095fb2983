"""Options of an emulated runtime: its features, and their effects on a strategy.

Runtimes are found by the entry points "zsim.runtimes" of installed packages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Protocol, cast

from pydantic import AfterValidator

from zsim.dtype import DType
from zsim.entry_point import EntryPointError, duplicate, entries, load
from zsim.strategy.config_table import Table
from zsim.strategy.cuda_graphs import CudaGraphs
from zsim.strategy.execution import (
    ContextExchange,
    Float8,
    Quantizer,
    Recipe,
    Recomputed,
    TokenDispatch,
    TokenFusion,
)
from zsim.strategy.offload import FileAccess, MemoryTier
from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods

GROUP = "zsim.runtimes"


def _floating(value: DType) -> DType:
    if value in (DType.INT8, DType.INT64):
        raise ValueError("must be fp16, bf16, fp32 or fp64")  # gradients are averaged in this dtype
    return value


FloatFormat = Annotated[DType, AfterValidator(_floating)]
"""A floating-point dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Dtypes of a gradient from backward to the update.

    Attributes:
        compute: of parameters, activations, and the gradients that backward produces.
        reduction: of sums of gradients over ranks that see different data.
        whole: of sums of gradients over micro-batches before their reduction.
        reduced: of sums of gradients over micro-batches after their reduction.
        optimizer: of the tensors that the update reads and writes.
        applied, master, moment: of its gradients, masters and moments, if narrower; None is that
            of the optimizer.
    """

    compute: DType
    reduction: DType
    whole: DType
    reduced: DType
    optimizer: DType
    applied: DType | None = None
    master: DType | None = None
    moment: DType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFormats:
    """Formats of the states of an optimizer, and of the gradients that it reads."""

    gradient: DType
    master: DType
    moments: tuple[DType, ...]


class RuntimeOptions(Table):
    """Base class of the options of every runtime: a table of a scenario.

    Class attributes:
        stages: ZeRO stages that the runtime supports.
        usual_stage: the default stage of a scenario; None if it must be set.
        has_replicas: True if states may be sharded over some ranks and replicated over others.
        has_pipeline: True if units can be split over pipeline stages.
        ties_ends: True if the first and the last stage may share a tied embedding.
        checkpoints_every_nth: True if only every n-th block can be checkpointed.
        takes_frozen: True if frozen parameters are supported.
        sums_copies: True if partial gradients of parameters that tensor ranks hold copies of are
            summed over the ranks, as of norms of each rank's heads.
        takes_quantized: True if optimizers with 8-bit states take its parameters: plain tensors.
        keeps_quantized: True if frozen weights may be in 4 bits, in stages below 3.
        trains_narrow: True if bf16 parameters can be updated directly (`pure_bf16`).
        has_experts: True if experts are distributed over expert ranks.
        sums_loads: True if auxiliary losses of experts depend on tokens of several ranks.
        shards_experts: True if several ranks may hold parts of the same experts.
        cuts_latent: True if latent attention is modelled with a tensor axis, whose ranks compress
            their own tokens.
        has_context: True if its context parallelism is modeled here; a search tries context degrees
            only for these runtimes.
        context_exchange: default exchange of keys and values among ranks that share a sequence.
        merges_context: True if attention to gathered keys runs rank by rank.
        checkpoint_option: the flag that moves checkpoints to host memory; None if there is none.
        layers_option: the option that moves the activations of some first layers to host memory;
            None if there is none.
        stored_least: least elements of a tensor of such a layer to be moved.
        execution_options: options with their values by the flag of an `Execution` that they set.
        quantizer: library that casts operands of narrow GEMMs.
        captures_compiled: True if `torch.compile` captures its CUDA graphs.
        casts_tokens_with: scalings of tokens that can be cast before they are gathered.
        receives_separately: True if a pipeline stage receives each micro-batch into separate
            memory.
    """

    stages: ClassVar[tuple[int, ...]] = ()
    usual_stage: ClassVar[int | None] = None
    has_replicas: ClassVar[bool] = True
    has_pipeline: ClassVar[bool] = False
    ties_ends: ClassVar[bool] = False
    checkpoints_every_nth: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    sums_copies: ClassVar[bool] = False
    takes_quantized: ClassVar[bool] = False
    keeps_quantized: ClassVar[bool] = False
    trains_narrow: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    sums_loads: ClassVar[bool] = False
    shards_experts: ClassVar[bool] = True
    cuts_latent: ClassVar[bool] = False
    has_context: ClassVar[bool] = False
    context_exchange: ClassVar[ContextExchange] = ContextExchange.ALL_GATHER
    merges_context: ClassVar[bool] = False
    checkpoint_option: ClassVar[str | None] = None
    layers_option: ClassVar[str | None] = None
    stored_least: ClassVar[int] = 0
    execution_options: ClassVar[Mapping[str, str]] = {}
    quantizer: ClassVar[Quantizer] = Quantizer.TORCHAO
    captures_compiled: ClassVar[bool] = False
    casts_tokens_with: ClassVar[tuple[Recipe, ...]] = (Float8.TENSORWISE,)
    receives_separately: ClassVar[bool] = False

    @staticmethod
    def kinds() -> tuple[type["RuntimeOptions"], ...]:
        """Return the options of all installed runtimes."""
        return _kinds()

    @classmethod
    def table(cls) -> str:
        """Return the name of the runtime, which is also that of its table in `[zero]`."""
        names = (name for name, each in registered().items() if each.options is cls)
        return next(names, cls.__name__.lower())

    @classmethod
    def has_chunks(cls, options: Mapping[str, object], *, stages: int) -> bool:
        """Return True if pipeline stages have several chunks with these given options."""
        del options, stages
        return False

    @property
    def moves_checkpoints(self) -> bool:
        """True if checkpoints are in host memory from forward until recompute."""
        return self.checkpoint_option is not None and bool(getattr(self, self.checkpoint_option))

    @property
    def delays_updates(self) -> bool:
        """True if a step computes with parameters that are one update old."""
        return False

    @property
    def layers_on_host(self) -> int:
        """Return the number of first layers whose activations are kept in host memory."""
        return 0 if self.layers_option is None else int(getattr(self, self.layers_option))

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """Return the parts of a step in CUDA graphs; None if there are none."""
        return None

    @property
    def recomputes(self) -> tuple[Recomputed, ...]:
        """Parts of blocks that selective checkpointing runs again in backward."""
        return (Recomputed.ATTENTION,)

    @property
    def token_dispatch(self) -> TokenDispatch | None:
        """Return the library that exchanges tokens of experts; None if NCCL does."""
        return None

    @property
    def gathers_experts(self) -> bool:
        """True if expert ranks gather all tokens in place of sending copies."""
        return False

    @property
    def merges_micro_batches(self) -> bool:
        """True if a forward overlaps the backward of the micro-batch before it."""
        return False

    @property
    def overlaps_shared(self) -> bool:
        """True if shared experts run on a side stream while tokens are exchanged."""
        return False

    @property
    def weighs_at_source(self) -> bool:
        """True if weights of expert copies stay with their tokens and multiply the results."""
        return False

    @property
    def loops_experts(self) -> bool:
        """True if a rank runs its experts in sequence."""
        return False

    @property
    def cuts_tokens(self) -> bool:
        """True if ranks of the tensor axis hold different tokens of the hidden state."""
        return False

    @property
    def keeps_gathered(self) -> bool:
        """True if the gathered hidden state is kept for backward."""
        return False

    @property
    def gathers_logits(self) -> bool:
        """True if ranks of the tensor axis gather logits of the whole vocabulary for the loss."""
        return False

    @property
    def composes_loss(self) -> bool:
        """True if the loss over parts of the vocabulary runs as separate operators."""
        return False

    @property
    def replicates_embedding(self) -> bool:
        """True if each rank of the tensor axis has the whole token embedding."""
        return False

    @property
    def writes_rotary(self) -> bool:
        """True if rotary positions are written in PyTorch operators, as in torchtitan's models."""
        return False

    @property
    def repeats_keys(self) -> bool:
        """True if shared keys and values are copied for each query head before attention."""
        return bool(getattr(self, "repeat_kv", False))

    @property
    def gathers_each(self) -> bool:
        """True if each linear layer gathers its input tokens separately."""
        return False

    @property
    def gathers_float8(self) -> bool:
        """True if weights of float8 linear layers are cast before they are gathered."""
        return False

    @property
    def keeps_float8(self) -> bool:
        """True if weights of linear layers with 8-bit GEMMs are kept in 8 bits alone."""
        return False

    @property
    def gathers_float8_tokens(self) -> bool:
        """True if input tokens of float8 linear layers are cast before they are gathered."""
        return False

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return the mechanism that fuses GEMMs with collectives of their tokens, or None."""
        return None

    @property
    def overlap_methods(self) -> OverlapMethods:
        """Return how GEMMs overlap these collectives in userbuffers."""
        return DEFAULT_METHODS

    @property
    def splits_outputs(self) -> bool:
        """True if scattered outputs in userbuffers are computed in parts."""
        return True

    @property
    def rearranges(self) -> bool:
        """True if collectives along tokens copy the whole tensor, because sequences come first."""
        return False

    @property
    def in_place_loss(self) -> bool:
        """True if the gradient of the logits overwrites their softmax, on every rank."""
        return False

    @property
    def file_access(self) -> FileAccess:
        """How files are read and written, if anything is kept in files."""
        return FileAccess()

    @property
    def splits_backward(self) -> bool:
        """True if pipeline stages compute gradients of inputs first, those of weights later."""
        return False

    @property
    def stages_in_v(self) -> bool:
        """True if the second of two chunks runs from the last stage to the first (V shape)."""
        return False

    def layers_of_stages(self, *, layers: int, stages: int) -> tuple[int, ...] | None:
        """Return the number of layers of each virtual pipeline stage, in the order of the model.

        The result has a multiple of `stages` entries, because each stage has equally many virtual
        stages. None if blocks are distributed by their cost.

        Raises:
            ValueError: layers cannot be distributed so; the message starts with the field.
        """
        del layers, stages
        return None

    @property
    def head_is_on_one_stage(self) -> bool:
        """Return True if the units after the layers are on one stage, if blocks are distributed."""
        return False

    def cuts_messages(self, *, tensor: int) -> bool:
        """Return True if each of `tensor` ranks sends only a part of pipeline messages."""
        del tensor
        return False

    def inner(self, *, stage: int, data: int) -> tuple[str, int | None]:
        """Return the option that splits the data axis, and its inner ranks; None if it does not."""
        del stage, data
        return "", None

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return the dtypes in which gradients are reduced and accumulated."""
        del stage
        return Formats(
            compute=compute,
            reduction=compute,
            whole=compute,
            reduced=compute,
            optimizer=optimizer,
        )

    def kept_formats(
        self, *, compute: DType, optimizer: DType, moments: int, recipe: Recipe | None
    ) -> KeptFormats:
        """Return the formats of masters, of `moments` moments, and of gradients to apply."""
        del compute, recipe
        return KeptFormats(gradient=optimizer, master=optimizer, moments=(optimizer,) * moments)

    def alignment(self, *, stage: int, data: int) -> int:
        """Return the alignment of the starts of the shards of model states, in elements."""
        del stage, data
        return 1

    def tiers(self, *, stage: int) -> dict[str, MemoryTier]:
        """Return the memory tier of each offload option that is not the device."""
        del stage
        return {}

    def without_experts(self) -> str | None:
        """Return the option that excludes expert ranks; None if there is none."""
        return None

    def without_replicas(self, *, stage: int) -> str | None:
        """Return None if replicas of shards are supported, else the condition for the message."""
        if not self.has_replicas:
            return ""
        return None if stage else " in stage 0"

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield (option, value, allowed values) of options that are invalid in a stage.

        `moments` is the number of moments that the optimizer keeps for each parameter.
        """
        del stage, moments
        yield from ()

    def smaller_buckets(self, elements: int) -> str | None:
        """Return the option that limits buckets to `elements`; None if they are limited already."""
        del elements
        return None

    def fewer_gathered(self) -> str | None:
        """Return the option that limits the parameters gathered at once, if there is one."""
        return None

    @classmethod
    def offloads(cls, *, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return options that move states off the device, from the least to the most moved."""
        del stage
        return ()


def names() -> tuple[str, ...]:
    """Return the names of all installed runtimes, without importing them."""
    return tuple(sorted({entry.name for entry in entries(GROUP)}))


class Registered(Protocol):
    """Object behind an entry point; `zsim.runtimes.runtime.Runtime` has all attributes."""

    @property
    def options(self) -> type[RuntimeOptions]:
        """Class of the options of the runtime."""
        ...


@cache
def registered() -> dict[str, Registered]:
    """Return every installed runtime by name.

    Raises:
        EntryPointError: a name is registered twice, or an object does not exist or has no options.
    """
    found: dict[str, Registered] = {}
    for entry in entries(GROUP):
        if entry.name in found:
            raise duplicate(entry)
        loaded = load(entry)
        options = getattr(loaded, "options", None)
        if not (isinstance(options, type) and issubclass(options, RuntimeOptions)):
            raise EntryPointError(
                f"{GROUP}: {entry.name}.options: {options!r} must be a subclass of RuntimeOptions; "
                "import the class"
            )
        found[entry.name] = cast("Registered", loaded)
    return found


@cache
def _kinds() -> tuple[type[RuntimeOptions], ...]:
    return tuple(each.options for each in registered().values())
