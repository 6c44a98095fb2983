"""Search space of a runtime: the options that a search varies, and their effects.

Options are named without the prefix `zero.NAME.` of their runtime.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.strategy.strategy import Strategy

Options = Mapping[str, object]
"""Values of options by name."""

Knobs = Mapping[str, Sequence[object]]
"""Values that a search tries, by option; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedAxes:
    """The stage, the nodes and the degrees that settings have in common.

    Attributes:
        stage: the ZeRO stage.
        nodes: number of nodes.
        gpus_per_node: GPUs of a node.
        tensor: ranks of the tensor axis.
        pipeline: stages of the pipeline.
        replicate: replicas of each shard.
        context: ranks that share a sequence.
        experts: routed experts of a block; 0 for a dense model.
        expert: ranks that these are distributed over.
    """

    stage: int
    nodes: int
    gpus_per_node: int
    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    context: int = 1
    experts: int = 0
    expert: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """Lower bounds of device memory of a runtime, without states and activations.

    Numbers are bytes for each trained element of a rank, unless another size is stated.

    Attributes:
        gathered: sharded units that are whole when a backward starts: "blocks", "root"; and
            "ahead" if a backward gathers the next block.
        permanent: buffers of gradients.
        accumulated: whole gradients of earlier micro-batches.
        shard: in every backward, for each element of the rank's shard.
        begun: gradients of the whole model, as soon as a unit has run backward.
        done, done_shard: gradients of units that have run backward, whole or of the rank's shard.
        reducing: input of the reduction of the latest block.
        cast: casts of weights from the forward to the backward of a unit.
        bucket_bytes: bytes of buckets in every backward.
        bucket, copied: elements of a bucket that is copied to be reduced, and bytes for each.
        reduces_last: True if buckets are reduced after the last backward.
        update: gradients and casts during the update.
        reused: elements; a whole parameter that is used again within them is kept.
        ahead: elements that are gathered ahead of a unit.
        live: elements beyond which nothing is gathered ahead.
        collected: gradients of a pipeline stage until its last backward.
        chunks: a stage with at most this number of chunks stays gathered.
    """

    gathered: frozenset[str] = frozenset()
    permanent: int = 0
    accumulated: int = 0
    shard: int = 0
    begun: int = 0
    done: int = 0
    done_shard: int = 0
    reducing: int = 0
    cast: int = 0
    bucket_bytes: int = 0
    bucket: int = 0
    copied: int = 0
    reduces_last: bool = False
    update: int = 0
    reused: int = 0
    ahead: int = 0
    live: int = 0
    collected: int = 0
    chunks: int = 0


def _no_orders(pipeline: int, layers: int) -> Iterable[Options]:
    del pipeline, layers
    return ()


def _anywhere(options: Options, checkpointing: str, axes: SearchedAxes) -> bool:
    del options, checkpointing, axes
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The options that a search varies, and their effects. The default varies none.

    Attributes:
        kept: returns the memory that a strategy keeps, for lower bounds.
        knobs: returns the values of options to try.
        combines: returns True unless the knobs that are not at their defaults exclude each other.
        offloads: options that move states off the device, by stage; only used without a pipeline.
        choices: the same by the names that the page of `zsim serve` offers: `optimizer-host`,
            `all-host`, `optimizer-nvme`, `all-nvme`.
        checkpoints_on_host: options that move checkpoints of blocks to host memory. A search tries
            them without a pipeline and with default knobs.
        tensor_modes: modes of the tensor axis, each as its options.
        compiled_tensor_modes: modes that are only possible if blocks are compiled.
        order_option: the option that selects the order of a pipeline; None if there is one order.
        orders: returns the options of each order but the default, for a number of stages and of
            layers of the model.
        chunk_option: the option that sets the layers of a chunk of a stage. Fewer of them need no
            less memory.
        is_modeled: returns True if options are modeled with a kind of checkpointing and degrees.
        adds: options whose other values gather sooner or free later than the default does. If the
            default fills the memory, so do they.
        leaner: options with values that lower bounds of a step below those of the default: ranks
            send or copy less, or slow concurrent kernels for less time.
        gathers_less: options with values that lower them by collectives of the tensor axis.
        lighter: options with values that lower the bound of memory below that of the default.
        is_slow: True if schedules take several times as long to simulate as those of others.
        comes_first: True if its plain settings are simulated before those of others, and if it is
            selected in a form at first.
    """

    kept: "Callable[[Strategy], KeptBytes]" = lambda _: KeptBytes()
    knobs: Callable[[SearchedAxes], Knobs] = lambda _: {}
    combines: Callable[[Options], bool] = lambda _: True
    offloads: Mapping[int, Sequence[Options]] = field(default_factory=dict[int, Sequence[Options]])
    choices: Mapping[str, Options] = field(default_factory=dict[str, Options])
    checkpoints_on_host: Options = field(default_factory=dict[str, object])
    tensor_modes: Sequence[Options] = ({},)
    compiled_tensor_modes: Sequence[Options] = ()
    order_option: str | None = None
    orders: Callable[[int, int], Iterable[Options]] = _no_orders
    chunk_option: str | None = None
    is_modeled: Callable[[Options, str, SearchedAxes], bool] = _anywhere
    adds: frozenset[str] = frozenset()
    leaner: frozenset[str] = frozenset()
    lighter: frozenset[str] = frozenset()
    gathers_less: frozenset[str] = frozenset()
    is_slow: bool = False
    comes_first: bool = False
