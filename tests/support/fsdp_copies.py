"""Operations of PyTorch's FSDP2 that offloads: collectives, copies to the host and back.

Recorded on the pretended device of `zsim record`, since on a CPU no copy crosses anything.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from fully_sharded import KINDS, leaves, tell
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._python_dispatch import TorchDispatchMode

from zsim.model.architecture import GPT
from zsim.schedule.host_traffic import copied_bytes, leaves_device
from zsim.schedule.operation import AllGather, Copy, ReduceScatter
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_record.record.recording import recording
from zsim_record.record.script_surroundings import register_device
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.transformer import transformer

# Autograd counts devices at the first backward of a process, which other tests may run.
register_device()


class Issued(NamedTuple):
    """A collective with the elements of the whole, or neighbouring copies one way with bytes."""

    kind: str
    size: int


def joined(seen: Iterable[Issued]) -> list[Issued]:
    """Neighbouring copies one way as one: FSDP2 copies parameters, schedules groups of them."""
    found: list[Issued] = []
    for kind, group in groupby(seen, key=lambda each: each.kind):
        same = list(group)
        found += [Issued(kind, sum(each.size for each in same))] if kind.startswith("to_") else same
    return found


def issued(made: Schedule, stage: int | None = None) -> Iterator[Issued]:
    """Yield the operations that a step of ours issues, or one of a `stage` of a pipeline."""
    (program,) = made.programs if stage is None else made.programs[stage : stage + 1]
    places = {pool.name: pool.place for pool in made.pools}
    for operation in program.step:
        match operation:
            case AllGather(target=view):
                yield Issued("all_gather", view.size)
            case ReduceScatter(source=view):
                yield Issued("reduce_scatter", view.size)
            case Copy() if (out := leaves_device(operation, program, places)) is not None:
                yield Issued("to_host" if out else "to_device", copied_bytes(operation, program))
            case _:
                pass


class CopiesSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes collectives, and copies between the CPU and the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.seen: list[Issued] = []

    def __torch_dispatch__(  # any operator passes here
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run the operator; note it if it is one of these."""
        made = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func._opname in KINDS:
            kind, position = KINDS[func._opname]
            self.seen.append(Issued(kind, sum(each.numel() for each in leaves(args[position]))))
        elif func._opname in {"_to_copy", "copy_"} and isinstance(made, torch.Tensor):
            source = args[1] if func._opname == "copy_" else args[0]
            if made.device.type != source.device.type:
                kind = "to_host" if made.device.type == "cpu" else "to_device"
                self.seen.append(Issued(kind, made.nbytes))
        return made


def recorded(shape: GPT, strategy: Strategy) -> list[Issued]:
    """Return what rank 0 issues in the second step of a GPT with each block sharded alone.

    Shards are offloaded, or what blocks are given that are run again.
    """
    options, precision = strategy.options(FSDP2), strategy.train.precision
    with recording(world=strategy.parallel.data):
        torch.distributed.init_process_group("nccl")
        mesh = init_device_mesh("zsim", (strategy.parallel.data,))
        policy = MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE[precision.compute] if precision.has_master else None,
            cast_forward_inputs=False,
        )
        on_host = CPUOffloadPolicy(pin_memory=options.pin_memory)
        offload = on_host if options.on_host else OffloadPolicy()
        with torch.device("cpu" if options.on_host else "zsim"):
            module = transformer(shape)
        for name in module.units:
            if name.startswith("block"):
                block = module.get_submodule(name)
                if options.offload_wrapper:
                    block = offload_wrapper(checkpoint_wrapper(block, preserve_rng_state=False))
                    setattr(module, name, block)
                fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        root = cast("FSDPModule", module)
        batch = torch.zeros(1, shape.sequence_length + 1, dtype=torch.int64, device="zsim")
        mode = CopiesSeen()
        micro_batches = strategy.train.gradient_accumulation_steps
        for _ in range(2):
            mode.seen.clear()
            with mode:
                for micro_batch in range(micro_batches):
                    tell(root, options, last=micro_batch == micro_batches - 1)
                    loss: torch.Tensor = module(batch)
                    torch.autograd.backward(loss)
            module.zero_grad()
        torch.distributed.destroy_process_group()
    return joined(mode.seen)
