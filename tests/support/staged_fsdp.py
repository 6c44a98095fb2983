"""Operations that PyTorch's FSDP issues in a stage of a pipeline, beside our schedule's."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from fsdp_copies import CopiesSeen, Issued, joined
from fsdp_copies import issued as issued_with_copies
from fsdp_order import issued
from fully_sharded import Collective, Recorder, pretended, sharded
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import PipelineStage

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.pipeline_stages import in_blocks
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_record.record.recording import recording
from zsim_record.record.script_surroundings import register_device
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.order import Action, Reshard, Unshard, WeightTask
from zsim_runtimes.fsdp2.pipeline import orders
from zsim_runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.transformer import transformer

# Autograd counts devices at the first backward of a process, which other tests may run.
register_device()

SHAPE = GPT(
    layers=6,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=19,
    tied_embeddings=False,
)


class Part(nn.Module):
    """Units of a transformer that follow each other; the last one reads the batch too."""

    def __init__(self, units: Mapping[str, nn.Module], batch: torch.Tensor) -> None:
        super().__init__()
        for name, unit in units.items():
            self.add_module(name, unit)
        self.batch = batch

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for name, unit in self.named_children():
            given = unit(given, self.batch) if name == "head" else unit(given)
        return given


class WrappedChunk:
    """A chunk of a stage as `fully_shard` and `PipelineStage` have it."""

    def __init__(self, part: Part, strategy: Strategy, options: FSDP2) -> None:
        self.names = [name for name, _ in part.named_children()]
        blocks = [name for name in self.names if name.startswith("block")]
        if options.offload_wrapper:
            for name in blocks:
                block = checkpoint_wrapper(part.get_submodule(name), preserve_rng_state=False)
                setattr(part, name, offload_wrapper(block))
        device = part.batch.device.type
        self.root = cast("nn.Module", sharded(part, blocks, strategy, options, device))
        self.stage: Any = SimpleNamespace(submod=self.root)
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.left: dict[int, dict[str, object]] = {}
        self.dtype = TORCH_DTYPE[strategy.train.precision.compute]
        self.splits = options.splits_backward
        self.handles: list[Any] = []

    @property
    def wrapped(self) -> list[FSDPModule]:
        return [each for each in self.root.modules() if isinstance(each, FSDPModule)]

    def forward(self, number: int, batch: torch.Tensor) -> None:
        given = batch
        if self.names[0] != "embedding":
            size = (1, SHAPE.sequence_length, SHAPE.hidden_size)
            given = torch.zeros(size, dtype=self.dtype, device=batch.device, requires_grad=True)
        self.made[number] = (self.root(given), given)

    def backward(self, number: int) -> None:
        """Run a backward, or the first part of one (`backward_one_chunk`)."""
        made, given = self.made.pop(number)
        is_loss = not made.dim()
        words: dict[str, Any] = {
            "stage_output": made if is_loss else (made,),
            "output_grads": None if is_loss else (torch.zeros_like(made),),
            "input_values": [given],
        }
        if not self.splits:
            PipelineStage.backward_maybe_with_nosync(self.stage, "full", words)
            return
        self.left[number] = words
        if self.names[0] != "embedding":
            words["stage_output"] = (made,)
            _, groups = PipelineStage.backward_maybe_with_nosync(self.stage, "input", words)
            words["param_groups"] = groups

    def weights(self, number: int) -> None:
        """Run the second part (`backward_weight_one_chunk`)."""
        words = self.left.pop(number)
        kind = "weight" if "param_groups" in words else "full"
        PipelineStage.backward_maybe_with_nosync(self.stage, kind, words)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles = []

    def follow(self, action: Action, batch: torch.Tensor) -> None:
        """Do what `_PipelineScheduleRuntime` does for an action."""
        match action:
            case Unshard():
                self.handles = [each.unshard(async_op=True) for each in self.wrapped]
            case Reshard():
                for each in self.wrapped:
                    each.reshard()
            case Reduce():
                PipelineStage.perform_reduce_grad(self.stage, 1)
            case Task(direction=Direction.FORWARD):
                self.wait()
                self.forward(action.micro_batch, batch)
            case Task():
                self.wait()
                self.backward(action.micro_batch)
            case WeightTask():
                self.wait()
                self.weights(action.micro_batch)
            case _:
                pass


def of_stage(strategy: Strategy, index: int) -> tuple[list[Collective], list[Collective]]:
    """Collectives over the data axes in a step of a stage: of our schedule, and of PyTorch."""
    options = strategy.options(FSDP2)
    model = in_blocks(gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision))
    made = make_schedule(model, strategy)
    batch = torch.zeros((1, SHAPE.sequence_length + 1), dtype=torch.int64)
    order = orders(strategy)[index]
    with pretended(strategy.replicas):
        chunks = [WrappedChunk(part, strategy, options) for part in parts(strategy, index, batch)]
        recorder = Recorder()
        for _ in range(2):
            recorder.seen.clear()
            with recorder:
                for action in order:
                    if not isinstance(action, Messages | Awaited):
                        chunks[action.chunk].follow(action, batch)
            for chunk in chunks:
                chunk.root.zero_grad()
    return list(issued(made, index)), list(recorder.seen)


def copies_of_stage(strategy: Strategy, index: int) -> tuple[list[Issued], list[Issued]]:
    """Collectives and copies to the host and back in a step of a stage: ours, and PyTorch's.

    Blocks are run again, and what they are given is in host memory as the strategy says.
    """
    model = in_blocks(gpt(SHAPE, micro_batch_size=1, precision=strategy.train.precision))
    made = make_schedule(model, strategy)
    mode = CopiesSeen()
    with recording(world=strategy.parallel.data):
        distributed.init_process_group("nccl")
        with torch.device("zsim"):
            batch = torch.zeros((1, SHAPE.sequence_length + 1), dtype=torch.int64)
            modules = parts(strategy, index, batch)
        chunks = [WrappedChunk(part, strategy, strategy.options(FSDP2)) for part in modules]
        for _ in range(2):
            mode.seen.clear()
            with mode:
                for action in orders(strategy)[index]:
                    if not isinstance(action, Messages | Awaited):
                        chunks[action.chunk].follow(action, batch)
            for chunk in chunks:
                chunk.root.zero_grad()
        distributed.destroy_process_group()
    return joined(issued_with_copies(made, index)), joined(mode.seen)


def parts(strategy: Strategy, index: int, batch: torch.Tensor) -> list[Part]:
    """The modules of the chunks of a stage, of equal sizes but for the ends."""
    options, stages = strategy.options(FSDP2), strategy.parallel.pipeline
    count = stages * options.chunks_of_stage
    units = dict(transformer(SHAPE).named_children())
    assert len(units) % count == 0
    names, each = list(units), len(units) // count
    found: list[Part] = []
    for chunk in range(options.chunks_of_stage):
        place = StagePlace(index=index, stages=stages, in_v=options.stages_in_v)
        first = place.virtual(chunk) * each
        found.append(Part({name: units[name] for name in names[first : first + each]}, batch))
    return found


def gradient_formats(strategy: Strategy, actions: Sequence[Action]) -> list[set[torch.dtype]]:
    """Formats of the whole gradients that PyTorch has after each action on the second stage."""
    batch = torch.zeros((1, SHAPE.sequence_length + 1), dtype=torch.int64)
    found: list[set[torch.dtype]] = []
    with pretended(strategy.replicas):
        part = parts(strategy, 1, batch)[0]
        chunk = WrappedChunk(part, strategy, strategy.options(FSDP2))
        for action in actions:
            chunk.follow(action, batch)
            held: list[Any] = [
                each
                for module in chunk.wrapped
                for group in cast("Any", module)._get_fsdp_state()._fsdp_param_groups
                for parameter in group.fsdp_params
                for each in (
                    parameter.unsharded_accumulated_grad,
                    getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
                )
            ]
            found.append({each.dtype for each in held if each is not None})
    return found
