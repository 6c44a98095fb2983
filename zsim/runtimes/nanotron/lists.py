"""ZeRO-1's collectives in nanotron: they take lists of tensors, which are copied one by one.

`reduce_scatter_coalesced` and `all_gather_coalesced` are given a part of each parameter for each
rank. PyTorch copies each part into a flat tensor before the collective, or out of one after it.
"""

from zsim.dtype import DType
from zsim.schedule.operation import (
    AllGather,
    Copy,
    FreeMode,
    ReduceScatter,
    Reduction,
    Together,
)
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.state import BucketState, own_view
from zsim.zero.writer import COMMUNICATION, COMPUTE, DATA, Draft

GATHER = "step/update/gather"


class Lists:
    """Writes these collectives into a draft."""

    def __init__(
        self, draft: Draft, strategy: Strategy, buckets: Buckets, states: tuple[BucketState, ...]
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.buckets = buckets
        self.states = states

    def reduce_scatter(self, bucket: Bucket, gradient: str, after: tuple[str, ...]) -> str:
        """Average `gradient` over the data axis into the rank's own part; the operation's id.

        The flat tensor comes back when the reduction is done.
        """
        draft, wire = self.draft, self.draft.buffers[gradient].dtype
        flat, path = self._flat(bucket, "flat", wire), draft.path(f"reduce/{bucket.name}")
        draft.allocate(flat)
        flattened = draft.add(
            Copy(
                id=draft.path(f"flatten/{bucket.name}"),
                stream=COMPUTE,
                after=after,
                source=draft.all(gradient),
                target=draft.all(flat),
                launches=self._pieces(bucket),
            )
        )
        member = ReduceScatter(
            id=f"{path}/member",
            stream=COMMUNICATION,
            group=DATA,
            source=draft.all(flat),
            target=own_view(draft, bucket, gradient),
            reduction=Reduction.AVERAGE,
            wire=wire,
            accumulate=wire,
        )
        draft.add(Together(id=path, stream=COMMUNICATION, after=(flattened,), members=(member,)))
        draft.free(flat, (path,), mode=FreeMode.DEFERRED)
        return path

    def all_gather(self, draft: Draft, after: str) -> str:
        """Gather what the ranks have updated, as one; the last operation that puts it in place."""
        compute, last = self.strategy.precision.compute, ""
        pairs = tuple(zip(self.buckets.all, self.states, strict=True))
        members: list[AllGather] = []
        for bucket, state in pairs:
            flat = self._flat(bucket, "gathered", compute)
            draft.allocate(flat)
            members.append(
                AllGather(
                    id=f"{GATHER}/{bucket.name}",
                    stream=COMMUNICATION,
                    group=DATA,
                    source=own_view(draft, bucket, state.parameter),
                    target=draft.all(flat),
                    wire=compute,
                )
            )
        draft.add(Together(id=GATHER, stream=COMMUNICATION, after=(after,), members=tuple(members)))
        for bucket, state in pairs:
            flat = self._flat(bucket, "gathered", compute)
            last = draft.add(
                Copy(
                    id=f"step/update/put/{bucket.name}",
                    stream=COMPUTE,
                    after=() if last else (GATHER,),
                    source=draft.all(flat),
                    target=draft.all(state.parameter),
                    launches=self._pieces(bucket),
                )
            )
            draft.free(flat, (GATHER,))
        return last

    def _flat(self, bucket: Bucket, name: str, dtype: DType) -> str:
        return self.draft.buffer(
            f"{bucket.name}/{name}",
            bucket.padded,
            dtype,
            Kind.COMMUNICATION,
            layout=bucket.name,
        )

    def _pieces(self, bucket: Bucket) -> int:
        return len(bucket.layout.pieces) * self.strategy.data
