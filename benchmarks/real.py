"""Real steps beside those of PyTorch: the same module, data and optimizer on ranks of this machine.

    python -m benchmarks.real [RANKS [SIZE...]]

Stage 0 stands beside DistributedDataParallel, stage 1 beside ZeroRedundancyOptimizer, stages 2 and
3 beside FSDP2, which keeps gathered parameters or not. All are made in one process of each rank and
take turns, so what else the machine does meets all alike. All have the buckets that they have by
default. A ratio below 1 is zsim's gain. Memory is the largest sum of storages that live in a step,
seen by a dispatch mode in a round of its own. Then the host's share, with units so small that their
kernels take next to nothing: microseconds of CPU time of all threads for each operation of a step.
Beside it stands what of that is not zsim's, as many operations sharing it: the module alone,
forward, backward and Adam as users of PyTorch write them, and the step's collectives alone, by the
calls that zsim makes of Gloo. What is left is zsim's own, with what it costs that each unit is a
call of autograd and each bucket an update.
"""

import gc
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zsim.schedule.operation import AllGather, AllReduce, Operation, ReduceScatter, View, walk
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch import Trainer
from zsim_torch.execute.flights import PendingWork
from zsim_torch.execute.gloo_exchange import GlooExchange, all_reduced
from zsim_torch.supervise.ranks import run_ranks

WARM_UP, ROUNDS, STEPS = 2, 6, 2
VOCABULARY, TOKENS = 512, 64
RATE = 1e-3
HOST_STEPS = 30
TIMEOUT_S = 900.0
"""Seconds in which a comparison must end; one of 100 million parameters takes a minute."""

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Size:
    """A stack of residual layers."""

    layers: int
    width: int


SIZES = {"tiny": Size(4, 64), "10M": Size(4, 512), "100M": Size(12, 1024)}


class Layer(nn.Module):
    """Norm, two products, and what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 4 * width)
        self.fall = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add what the layer makes of `hidden`."""
        made: torch.Tensor = self.fall(functional.gelu(self.rise(self.norm(hidden))))
        return hidden + made


class Head(nn.Module):
    """The loss: each token is to be found again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, VOCABULARY)

    def forward(self, hidden: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.linear(hidden), batch)


class Model(nn.Module):
    """An embedding, layers and the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList([Layer(size.width) for _ in range(size.layers)])
        self.head = Head(size.width)

    @property
    def units(self) -> list[str]:
        """Names of what is gathered as one."""
        return ["table", *(f"layers.{number}" for number in range(len(self.layers))), "head"]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        hidden = self.table(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        loss: torch.Tensor = self.head(hidden, batch)
        return loss


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """The most bytes of storages that operators were given or have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(  # any operator passes here
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run the operator, and look at its tensors."""
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, made)):
            if isinstance(each, torch.Tensor):
                self._see(getattr(each, "_local_tensor", each).untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        number, size = id(storage), storage.nbytes()
        if number not in self._seen:

            def gone(_: object) -> None:
                del self._seen[number]
                self.live -= size

            self._seen[number] = weakref.ref(storage, gone)
            self.live += size


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused Adam."""
    return torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=True)


def loop(module: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Step:
    """Return a step as users of PyTorch write it."""

    def step() -> None:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()

    return step


def by_ddp(size: Size, batch: torch.Tensor) -> Step:
    """Return a step of DistributedDataParallel."""
    module = DistributedDataParallel(Model(size), gradient_as_bucket_view=True)
    return loop(module, adam(module), batch)


def by_zero_redundancy(size: Size, batch: torch.Tensor) -> Step:
    """Return a step with a sharded optimizer."""
    module = DistributedDataParallel(Model(size), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=RATE, weight_decay=0.0, fused=True
    )
    return loop(module, optimizer, batch)


def by_fsdp(size: Size, batch: torch.Tensor, *, reshards: bool) -> Step:
    """Return a step of FSDP2."""
    module = Model(size)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for unit in (module.table, *module.layers, module.head, module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshards)
    return loop(module, adam(module), batch)


def by_zsim(size: Size, batch: torch.Tensor, *, stage: int) -> Step:
    """Return a step of the trainer."""
    module = Model(size)
    strategy = Strategy(
        parallel=Parallel(data=distributed.get_world_size()),
        zero=Zero(stage=stage),
        train=Train(optimizer=Adam(learning_rate=RATE)),
    )
    trainer = Trainer(module, strategy, units=module.units, batch=batch)
    return lambda: trainer.step(batch)


def makers(stage: int) -> dict[str, Callable[[Size, torch.Tensor], Step]]:
    """Return what is compared at a stage: PyTorch's, then zsim's."""
    theirs: dict[int, tuple[str, Callable[[Size, torch.Tensor], Step]]] = {
        0: ("DDP", by_ddp),
        1: ("ZeroRedundancyOptimizer", by_zero_redundancy),
        2: ("FSDP2, kept", lambda size, batch: by_fsdp(size, batch, reshards=False)),
        3: ("FSDP2", lambda size, batch: by_fsdp(size, batch, reshards=True)),
    }
    name, make = theirs[stage]
    return {name: make, "zsim": lambda size, batch: by_zsim(size, batch, stage=stage)}


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds and CPU seconds of each step, and the most bytes that lived."""

    wall_s: list[float]
    cpu_s: list[float]
    peak_bytes: int


def compared(size: Size, stage: int) -> dict[str, Timed]:
    """Time steps of both in turns, on this rank."""
    generator = torch.Generator().manual_seed(distributed.get_rank())
    batch = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    for name, make in makers(stage).items():
        steps[name] = make(size, batch)
        for _ in range(WARM_UP):
            steps[name]()
        gc.collect()
        with LiveBytes() as live:
            steps[name]()
            steps[name]()
        peaks[name] = live.peak
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            for _ in range(STEPS):
                distributed.barrier()
                start, used = time.perf_counter(), time.process_time()
                steps[name]()
                cpu[name].append(time.process_time() - used)
                wall[name].append(time.perf_counter() - start)
    return {name: Timed(wall[name], cpu[name], peaks[name]) for name in steps}


@dataclass(frozen=True, slots=True)
class HostTime:
    """CPU microseconds for each of so many operations, and of the same step's parts alone."""

    operations: int
    step: list[float]
    module: list[float]
    collectives: list[float]

    def __str__(self) -> str:
        alone = min(self.module), min(self.collectives)
        left = min(self.step) - sum(alone)
        shown = (min(self.step), median(self.step), *alone, left)
        return f"{self.operations:10} " + " ".join(f"{each:11.1f}" for each in shown)


def collectives_alone(operations: Sequence[Operation]) -> Step:
    """Return what hands the collectives of a step over to Gloo, as the executor does, and waits."""
    group, exchange = distributed.group.WORLD, GlooExchange()
    assert group is not None
    calls: list[Callable[[], PendingWork]] = []
    for each in operations:
        match each:
            case AllReduce(target=View(size=size)):
                calls.append(partial(all_reduced, torch.zeros(size), group, ReduceOp.SUM))
            case AllGather(source=View(size=size)):
                whole = torch.zeros(size * group.size())
                part = whole.chunk(group.size())[group.rank()]
                calls.append(partial(exchange.all_gather, whole, part, group))
            case ReduceScatter(target=View(size=size), reduction=how):
                whole, part = torch.zeros(size * group.size()), torch.zeros(size)
                calls.append(partial(exchange.reduce_scatter, part, whole, group, how))
            case _:
                pass

    def step() -> None:
        for work in [call() for call in calls]:
            work.wait()

    return step


def host_time(stage: int) -> HostTime:
    """Return CPU time of steps with the smallest units, and of their parts alone, in turns."""
    size, torch_threads = Size(8, 8), torch.get_num_threads()
    torch.set_num_threads(1)
    batch = torch.zeros(1, dtype=torch.int64)
    module, alone = Model(size), Model(size)
    strategy = Strategy(
        parallel=Parallel(data=distributed.get_world_size()),
        zero=Zero(stage=stage, bucket_elements=800),
        train=Train(optimizer=Adam(learning_rate=RATE)),
    )
    trainer = Trainer(module, strategy, units=module.units, batch=batch)
    operations = list(walk(trainer.schedule.programs[0].step))
    steps: tuple[Step, ...] = (
        lambda: trainer.step(batch),
        loop(alone, adam(alone), batch),
        collectives_alone(operations),
    )
    found: tuple[list[float], ...] = ([], [], [])
    for _ in range(HOST_STEPS):
        for times, step in zip(found, steps, strict=True):
            distributed.barrier()
            used = time.process_time()
            step()
            times.append((time.process_time() - used) / len(operations) * 1e6)
    torch.set_num_threads(torch_threads)
    return HostTime(len(operations), *found)


def ratios(found: dict[str, Timed]) -> str:
    """Return the other trainer's name, and zsim's times and memory over those of it."""
    (beside, theirs), (_, own) = found.items()
    each = (
        min(own.wall_s) / min(theirs.wall_s),
        median(own.wall_s) / median(theirs.wall_s),
        min(own.cpu_s) / min(theirs.cpu_s),
        own.peak_bytes / theirs.peak_bytes,
    )
    return f"{beside:24} " + " ".join(f"{ratio:8.2f}" for ratio in each)


def main() -> None:
    """Print the ratios of each size and stage."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    sizes = sys.argv[2:] or list(SIZES)
    print(f"{ranks} ranks, {ROUNDS * STEPS} steps of each; ratios are zsim's over PyTorch's")
    print(f"{'size':6} stage {'beside':24} {'lowest':>8} {'median':>8} {'CPU':>8} {'memory':>8}")
    for name in sizes:
        for stage in range(4):
            found = run_ranks(compared, SIZES[name], stage, ranks=ranks, timeout_s=TIMEOUT_S)[0]
            print(f"{name:6} {stage:5} {ratios(found)}", flush=True)
    print("host time of an operation with the smallest units, CPU microseconds")
    columns = ("lowest", "median", "module", "collectives", "left")
    print("stage operations " + " ".join(f"{each:>11}" for each in columns))
    for stage in range(4):
        print(f"{stage:5} {run_ranks(host_time, stage, ranks=ranks)[0]}", flush=True)


if __name__ == "__main__":
    main()
