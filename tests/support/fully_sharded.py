"""What PyTorch's own FSDP hands to torch.distributed in a step, without ranks or data."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_torch.ground.torch_dtype import TORCH_DTYPE

KINDS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
}
"""Of each operator of torch.distributed the collective, and which argument is the whole tensor."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: its kind, ranks, elements and format of the whole tensor."""

    kind: str
    ranks: int
    elements: int
    dtype: str


def leaves(argument: object) -> list[torch.Tensor]:
    """The tensors of an argument: one, or those of a list, or of a list of lists."""
    return [each for each in tree_leaves(argument) if isinstance(each, torch.Tensor)]


def is_group(argument: object) -> bool:
    """Whether an argument of an operator is a process group."""
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes every collective in the order in which it is issued."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.seen: list[Collective] = []

    def __torch_dispatch__(  # any operator passes here
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run the operator; note it if it is a collective."""
        if func.namespace == "c10d" and func._opname in KINDS:
            kind, position = KINDS[func._opname]
            tensors = leaves(args[position])
            (group,) = (each for each in args if is_group(each))
            ranks = distributed.ProcessGroup.unbox(group).size()
            elements = sum(tensor.numel() for tensor in tensors)
            self.seen.append(Collective(kind, ranks, elements, str(tensors[0].dtype)))
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended(ranks: int) -> Generator[None]:
    """A world of `ranks` of which only rank 0 is here; collectives do nothing."""
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def mesh_of(strategy: Strategy, device: str = "cpu") -> DeviceMesh:
    """The mesh that `fully_shard` takes: two dimensions where there are replicas."""
    if strategy.parallel.replicate == 1:
        return init_device_mesh(device, (strategy.parallel.data,), mesh_dim_names=("data",))
    shape = (strategy.parallel.replicate, strategy.parallel.data)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "data"))


def sharded(
    module: nn.Module,
    names: Sequence[str],
    strategy: Strategy,
    options: FSDP2,
    device: str = "cpu",
) -> FSDPModule:
    """`module` with `fully_shard` on its blocks and on itself, as `options` say."""
    precision = strategy.train.precision
    reduce = options.reduce_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[precision.compute] if precision.has_master else None,
        reduce_dtype=None if reduce is None else TORCH_DTYPE[reduce],
        cast_forward_inputs=False,
    )
    mesh = mesh_of(strategy, device)
    blocks = [module.get_submodule(name) for name in names]
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward,
        )
    of_root = True if options.reshard_root_after_forward else None
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=of_root)
    cast("FSDPModule", module).set_reduce_scatter_max_input_buffers(
        options.reduce_scatter_max_input_buffers
    )
    if options.forward_prefetch:
        for index, block in enumerate(blocks):
            ahead = blocks[index + 1 : index + 1 + options.forward_prefetch]
            cast("FSDPModule", block).set_modules_to_forward_prefetch(
                [cast("FSDPModule", each) for each in ahead]
            )
    return cast("FSDPModule", module)


def tell(module: FSDPModule, options: FSDP2, *, last: bool) -> None:
    """Set what a training loop sets before each micro-batch."""
    module.set_requires_gradient_sync(last or options.gradient_sync is Sync.EVERY)
    module.set_requires_all_reduce(last or options.all_reduce is Sync.EVERY)
    module.set_reshard_after_backward(last or options.reshard_after_backward)
    module.set_is_last_backward(True)


def recorded(
    module: nn.Module,
    blocks: Sequence[str],
    batch: torch.Tensor,
    *,
    strategy: Strategy,
    options: FSDP1 | FSDP2,
) -> list[Collective]:
    """The collectives of the second step of training `module`, whose output is the loss."""
    micro_batches = strategy.train.gradient_accumulation_steps
    with pretended(strategy.replicas):
        root: nn.Module
        if isinstance(options, FSDP2):
            root = cast("nn.Module", sharded(module, blocks, strategy, options))
        else:
            root = wrapped(module, blocks, strategy, options)
        recorder = Recorder()
        for _ in range(2):
            recorder.seen.clear()
            with recorder:
                for micro_batch in range(micro_batches):
                    last = micro_batch == micro_batches - 1
                    with told(root, options, last=last):
                        loss: torch.Tensor = root(batch)
                        torch.autograd.backward(loss)
            root.zero_grad()
        return list(recorder.seen)


@contextmanager
def told(root: nn.Module, options: FSDP1 | FSDP2, *, last: bool) -> Generator[None]:
    """Set what a training loop sets around each micro-batch."""
    if isinstance(options, FSDP1):
        assert isinstance(root, FullyShardedDataParallel)
        with root.no_sync() if options.no_sync and not last else nullcontext():
            yield
        return
    tell(cast("FSDPModule", root), options, last=last)
    yield


def wrapped(
    module: nn.Module, blocks: Sequence[str], strategy: Strategy, options: FSDP1
) -> FullyShardedDataParallel:
    """`module` in FullyShardedDataParallel, its blocks in their own, as `options` say."""
    precision = strategy.train.precision
    compute = TORCH_DTYPE[precision.compute]
    policy = MixedPrecision(
        param_dtype=compute,
        reduce_dtype=None if options.reduce_dtype is None else TORCH_DTYPE[options.reduce_dtype],
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
    mesh = mesh_of(strategy)

    def wrap(part: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            part,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            sharding_strategy=STRATEGIES[
                options.sharding_strategy, strategy.parallel.replicate > 1
            ],
            backward_prefetch=PREFETCH[options.backward_prefetch],
            forward_prefetch=options.forward_prefetch,
            limit_all_gathers=options.limit_all_gathers,
            mixed_precision=policy if precision.has_master or options.reduce_dtype else None,
        )

    for name in blocks:
        setattr(module, name, wrap(module.get_submodule(name)))
    return wrap(module)


STRATEGIES = {
    (ShardingStrategy.FULL_SHARD, False): fsdp.ShardingStrategy.FULL_SHARD,
    (ShardingStrategy.FULL_SHARD, True): fsdp.ShardingStrategy.HYBRID_SHARD,
    (ShardingStrategy.SHARD_GRAD_OP, False): fsdp.ShardingStrategy.SHARD_GRAD_OP,
    (ShardingStrategy.SHARD_GRAD_OP, True): fsdp.ShardingStrategy["_HYBRID_SHARD_ZERO2"],
}
PREFETCH = {
    BackwardPrefetch.PRE: fsdp.BackwardPrefetch.BACKWARD_PRE,
    BackwardPrefetch.POST: fsdp.BackwardPrefetch.BACKWARD_POST,
    BackwardPrefetch.NONE: None,
}
