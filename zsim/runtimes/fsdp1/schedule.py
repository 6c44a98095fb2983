"""PyTorch's first FSDP: one flat parameter for every block and one for the root.

As `torch/distributed/fsdp/_runtime_utils.py` does it (torch 2.13). A flat parameter is gathered on
the unshard stream and handed to the compute stream; its memory and that of gradients returns when
the streams that used it are done (`record_stream`). So that the host does not run away with
gathers, it waits until the second last that was freed is really free. The root is kept through
forward.
"""

from collections import deque

from zsim.memory.ledger import book
from zsim.memory.peak import peak_bytes
from zsim.model.model import Model
from zsim.runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy
from zsim.runtimes.fsdp1.reduce import ALL_REDUCE, POST_BACKWARD, Reductions
from zsim.runtimes.fsdp1.volume import VOLUME
from zsim.runtimes.wrapping import Wrapping, groups, write_ending
from zsim.schedule.operation import AllGather, Copy, Edge, FreeMode, Previous
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import framed, need_fitting, need_single_calls, whole
from zsim.zero.bucket import Bucket, Buckets, numbered, one_after_the_other
from zsim.zero.forward_backward import Passes
from zsim.zero.state import BucketState, Holding, write_setup
from zsim.zero.visit_order import UnitVisit, visits
from zsim.zero.writer import COMPUTE, DATA, POOL, Draft

PRE_UNSHARD = "pre_unshard"
UNSHARD = "unshard"

SETTLED = 4
"""Steps after which those that follow are alike: what one leaves unfinished, the next waits for."""
STEPS = 2
"""Steps after which the book repeats: what a step leaves to be freed, the next one frees."""
GATHERS_IN_FLIGHT = 2
"""Freed gathers that may be unfinished before the host waits (`_limiter_utils.py`)."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What FSDP does to train `model` on `strategy.data` ranks, times the replicas.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    options = strategy.options(FSDP1)
    need_fitting(model, strategy)
    need_single_calls(model, "FSDP1")
    place = one_after_the_other(strategy.data)
    buckets = numbered(model, groups(model), place=place, ranks=strategy.data)
    left: tuple[str, ...] = ()
    for _ in range(SETTLED - 1):
        found = _written(model, strategy, options, buckets=buckets, left=left).gathers.unfinished
        if found == left:
            break
        left = found
    step = _written(model, strategy, options, buckets=buckets, left=left)
    streams = (COMPUTE, PRE_UNSHARD, UNSHARD, POST_BACKWARD)
    return framed(
        "FSDP1",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=whole(step.draft, step.setup),
        streams=streams if strategy.replicate == 1 else (*streams, ALL_REDUCE),
        layouts=buckets.layouts,
        peak_of=_worst_case if options.limit_all_gathers else _nothing,
    )


def _written(
    model: Model, strategy: Strategy, options: FSDP1, *, buckets: Buckets, left: tuple[str, ...]
) -> "_Step":
    """A step that begins with what the one before `left` unfinished."""
    draft, precision = Draft(), strategy.precision
    holding = Holding(
        parameter=precision.optimizer,
        parameter_sharded=True,
        optimizer=precision.optimizer,
        optimizer_sharded=True,
        has_master=False,
        moments=strategy.moments,
    )
    states = write_setup(draft, buckets, holding)
    step = _Step(draft, model, strategy, options=options, buckets=buckets, states=states)
    step.gathers.begin(left)
    step.write()
    return step


def _worst_case(program: Program) -> int | None:
    """The largest book if memory returns as late as waits of the host allow.

    With fewer gathers in a step than may be in flight the host never waits: it may be any number of
    steps ahead, and no peak can be promised.
    """
    peak = peak_bytes(book(program, STEPS), POOL)
    return peak if peak_bytes(book(program, 2 * STEPS), POOL) == peak else None


def _nothing(_program: Program) -> None:
    """Without a limit the host may run ahead as far as it likes: no peak can be promised."""


class _Step:
    """Forward and backward of every micro-batch, then the update."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        options: FSDP1,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.setup, draft.operations = draft.operations, []
        self.model = model
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.states = states
        self.wrapping = Wrapping(model, buckets)
        self.passes = Passes(draft, model, strategy, buckets=buckets, held=self._held)
        self.gathers = Gathers(draft, strategy, options=options, buckets=buckets, states=states)
        self.reductions = Reductions(draft, strategy, options, buckets=buckets, passes=self.passes)
        self._last = False

    def _held(self, bucket: int, _visit: UnitVisit) -> str:
        return self.gathers.whole(self.buckets.all[bucket])

    def write(self) -> None:
        """Append the step to the draft."""
        once = visits(self.model, self.strategy)
        micro_batches = self.strategy.gradient_accumulation_steps
        for micro_batch in range(micro_batches):
            self.passes.micro_batch = micro_batch
            self._last = micro_batch == micro_batches - 1
            self._forward(micro_batch, [visit for visit in once if not visit.backward])
            self._backward(micro_batch, [visit for visit in once if visit.backward])
        write_ending(
            self.draft,
            self.strategy,
            buckets=self.buckets,
            states=self.states,
            reduced=self.reductions.reduced,
        )

    def _forward(self, micro_batch: int, sequence: list[UnitVisit]) -> None:
        draft, gathers, root = self.draft, self.gathers, self.wrapping.root
        draft.prefix = f"step/forward/mb{micro_batch}"
        self.passes.load()
        ahead = [*self.wrapping.order]
        after: tuple[Edge, ...] = self.reductions.finished
        if root is not None:
            draft.prefix = f"step/forward/mb{micro_batch}/root"
            after += gathers.need(root)
            self._prefetch_forward(ahead)
        for visit in sequence:
            draft.prefix = f"step/forward/mb{micro_batch}/{self.model.units[visit.unit].name}"
            block = self.wrapping.block(visit.unit)
            if block is not None:
                after += gathers.need(block)
                ahead.remove(block)
                self._prefetch_forward(ahead)
            used = self.passes.forward(visit, after)
            gathers.used(used)
            after = ()
            if block is not None and (
                self.options.sharding_strategy is ShardingStrategy.FULL_SHARD
            ):
                gathers.free(block)

    def _prefetch_forward(self, ahead: list[int]) -> None:
        if self.options.forward_prefetch and ahead:
            self.gathers.gather(ahead[0])

    def _backward(self, micro_batch: int, sequence: list[UnitVisit]) -> None:
        draft, gathers, root = self.draft, self.gathers, self.wrapping.root
        prefetch = self.options.backward_prefetch
        draft.prefix = f"step/backward/mb{micro_batch}"
        self.passes.seed()
        ahead = [*self.wrapping.order]
        if root is not None:
            draft.prefix = f"step/backward/mb{micro_batch}/root"
            gathers.limit(root)
            if prefetch is BackwardPrefetch.PRE and ahead:
                gathers.gather(ahead[-1])
        late: list[int] = []
        for visit in sequence:
            draft.prefix = f"step/backward/mb{micro_batch}/{self.model.units[visit.unit].name}"
            block = self.wrapping.block(visit.unit)
            after: tuple[Edge, ...] = ()
            if block is not None:
                after = gathers.need(block)
                ahead.pop()
                if prefetch is BackwardPrefetch.PRE and ahead:
                    gathers.gather(ahead[-1])
            gathers.used(self.passes.backward(visit, after))
            self.reductions.collect(visit.unit)
            if block is not None:
                late.append(block)
                while len(late) > self._late(block):
                    self._after_backward(late.pop(0), ahead)
        draft.prefix = f"step/backward/mb{micro_batch}/end"
        for bucket in late + ([] if root is None else [root]):
            self._after_backward(bucket, [])

    def _late(self, block: int) -> int:
        """Blocks whose gradients autograd leaves until it is through with the one before them.

        It takes the latest nodes of the graph first. What forward gathered ahead has its views made
        before the block that comes before it ran, and so comes after that one in backward.
        """
        first = self.wrapping.root is None and block == self.wrapping.order[0]
        return 1 if self.options.forward_prefetch and not first else 0

    def _after_backward(self, bucket: int, ahead: list[int]) -> None:
        """Free whole parameters (without a reduction SHARD_GRAD_OP keeps them), and reduce."""
        if self._syncs or self.options.sharding_strategy is ShardingStrategy.FULL_SHARD:
            self.gathers.free(bucket)
        if self.options.backward_prefetch is BackwardPrefetch.POST:
            order = self.wrapping.order
            before = order[order.index(bucket) - 1 :][:1] if bucket in order[1:] else []
            if before and before[0] in ahead:
                self.gathers.gather(before[0])
        self.reductions.take(self.buckets.all[bucket])
        if self._syncs:
            self.reductions.reduce(self.buckets.all[bucket])

    @property
    def _syncs(self) -> bool:
        return self._last or not self.options.no_sync


class Gathers:
    """Flat parameters that are whole or on their way, and the limit of gathers."""

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        *,
        options: FSDP1,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.options = options
        self.buckets = buckets
        self.states = states
        self._prefetched: set[int] = set()
        self._freed: deque[Edge] = deque()
        self._latest = ""
        self._gathered = ""
        self._fresh = False
        self._updated = f"step/update/{buckets.all[-1].name}/update"

    def begin(self, left: tuple[str, ...]) -> None:
        """Start with frees that the step before left unfinished."""
        self._freed = deque(Previous(operation) for operation in left)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Frees for which the host has not waited, by what they wait for."""
        return tuple(edge.operation if isinstance(edge, Previous) else edge for edge in self._freed)

    def whole(self, bucket: Bucket) -> str:
        """The buffer of the bucket's whole flat parameter."""
        return self.draft.buffer(
            f"{bucket.name}/whole",
            bucket.padded,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=UNSHARD,
            layout=bucket.layout.name,
        )

    def need(self, number: int) -> tuple[Edge, ...]:
        """Gather unless that was done ahead; what the compute stream waits for."""
        if number not in self._prefetched:
            self._unshard(number)
        self._prefetched.discard(number)
        return (self._gathered,)

    def gather(self, number: int) -> None:
        """Gather ahead, unless that is done or the parameter is whole."""
        if number in self._prefetched or self.whole(self.buckets.all[number]) in self.draft.alive:
            return
        self._unshard(number)
        self._prefetched.add(number)

    def used(self, operation: str) -> None:
        """`operation` is the last on the compute stream that may have read parameters."""
        self._latest = operation

    def limit(self, number: int) -> None:
        """Before bucket `number` the host waits for the oldest of too many unfinished frees."""
        if self.options.limit_all_gathers and len(self._freed) >= GATHERS_IN_FLIGHT:
            self.draft.host_wait(self._freed.popleft(), f"limit/bucket{number}")

    def _unshard(self, number: int) -> None:
        draft, bucket = self.draft, self.buckets.all[number]
        whole = self.whole(bucket)
        if whole in draft.alive:
            self.limit(number)
            return
        source, after = self.states[number].parameter, self._after_update()
        if self.strategy.precision.has_master:
            source, after = self._cast(bucket, after)
        self.limit(number)
        draft.allocate(whole)
        self._gathered = draft.add(
            AllGather(
                id=draft.path(f"gather/{bucket.name}"),
                stream=UNSHARD,
                after=after,
                group=DATA,
                source=draft.all(source),
                target=draft.all(whole),
                wire=self.strategy.precision.compute,
            )
        )
        if self.strategy.precision.has_master:
            self._free_deferred(source, self._gathered)

    def _cast(self, bucket: Bucket, after: tuple[Edge, ...]) -> tuple[str, tuple[Edge, ...]]:
        """The shard in the format of the gather, and what completes it."""
        draft = self.draft
        cast = draft.buffer(
            f"{bucket.name}/cast_shard",
            bucket.shard,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=PRE_UNSHARD,
            layout=bucket.layout.name,
            shard=DATA,
        )
        draft.allocate(cast)
        copied = draft.add(
            Copy(
                id=draft.path(f"cast/{bucket.name}"),
                stream=PRE_UNSHARD,
                after=after,
                source=draft.all(self.states[bucket.index].parameter),
                target=draft.all(cast),
            )
        )
        return cast, (copied,)

    def _after_update(self) -> tuple[Edge, ...]:
        """The first read of shards in a step waits for the last update."""
        if self._fresh:
            return ()
        self._fresh = True
        return (Previous(self._updated),)

    def free(self, number: int) -> None:
        """Give the whole parameter back once the compute stream is done with it."""
        self._free_deferred(self.whole(self.buckets.all[number]), self._latest)
        if self.options.limit_all_gathers:
            self._freed.append(self._latest)

    def _free_deferred(self, name: str, use: str) -> None:
        self.draft.free(name, (use,), mode=FreeMode.DEFERRED)
