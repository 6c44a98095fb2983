"""Small jobs that test every feature of schedules on a backend, and are fast to train."""

from zsim.backend.backend import Job
from zsim.files.installed import topology
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import FreeMode, Previous, Reduction
from zsim.schedule.schedule import Contract, Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim.strategy.zero_knobs import Keep

STEPS = 2
SHAPE = GPT(layers=2, hidden_size=6, attention_heads=2, sequence_length=4, vocab_size=11)

STRATEGIES = {
    "stage 0": Strategy(
        parallel=Parallel(data=2), zero=Zero(stage=0), train=Train(optimizer=SGD())
    ),
    "stage 1": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=1),
        train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
    ),
    "stage 2": Strategy(
        parallel=Parallel(data=3),
        zero=Zero(stage=2, bucket_elements=200),
        train=Train(gradient_accumulation_steps=2, clip_norm=1.0),
    ),
    "stage 3": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=3, bucket_elements=200, host_ahead_units=2),
        activations=Activations(checkpointing=Checkpointing.FULL),
        train=Train(gradient_accumulation_steps=2, optimizer=Adam(weight_decay=0.1)),
    ),
    "stage 3, fp16, kept": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(
            stage=3, keep_after_forward=Keep.EVERYTHING, prefetch_units=3, reductions_in_flight=0
        ),
        train=Train(precision=Precision.FP16, loss_scale=LossScale(initial=1.0)),
    ),
    "stage 2, checkpoints in host memory": Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=2, contiguous=True),
        activations=Activations(checkpointing=Checkpointing.FULL),
        offload=Offload(checkpoints=MemoryTier.HOST),
    ),
    # With a CUDA device the torch backend runs one rank on it, with NCCL.
    "one rank, stage 0": Strategy(zero=Zero(stage=0), train=Train(clip_norm=1.0)),
    "one rank, stage 1": Strategy(zero=Zero(stage=1), train=Train(precision=Precision.BF16)),
    "one rank, stage 2": Strategy(
        zero=Zero(stage=2, bucket_elements=200), train=Train(precision=Precision.FP16)
    ),
    "one rank, stage 3": Strategy(
        zero=Zero(stage=3),
        activations=Activations(checkpointing=Checkpointing.FULL),
        offload=Offload(checkpoints=MemoryTier.HOST),
        train=Train(gradient_accumulation_steps=2),
    ),
}


def by_hand() -> Schedule:
    """Return a job with features that zsim's stages do not use: rings of sends, all free modes."""
    build = ScheduleBuilder.of("by hand", data=2)
    data = build.group("data", "data")
    own = build.buffer("own", 4, persistent=True)
    others = [build.buffer(f"other{index}", 4, home="communication") for index in range(3)]
    build.setup.allocate(own)
    build.setup.fill("own", own.all, 1.0)
    step = build.step
    modes = (FreeMode.WAITED, FreeMode.DEFERRED, FreeMode.HOST)
    for index, (other, mode) in enumerate(zip(others, modes, strict=True)):
        step.allocate(other)
        step.send(f"send{index}", data, own.all, 1)
        step.receive(f"receive{index}", data, other.all, -1)
        before = Previous("step/add2") if index == 0 else f"step/add{index - 1}"
        moved = step.together(f"move{index}", 2, after=[before])
        added = step.copy(f"add{index}", other.all, own.all, accumulate=True, after=[moved])
        step.free(other, mode=mode, uses=[added])
        step.host_wait(f"wait{index}", added)
    step.broadcast("broadcast", data, own.all, root=1, after=["step/add2"])
    return build.schedule()


def in_blocks() -> Schedule:
    """Return blocks over a joined axis, replicas, windows and copies by parameter."""
    names = ("replicate", "far", "near")
    axes = tuple(Axis(name=name, size=size) for name, size in zip(names, (2, 2, 1), strict=True))
    mesh = Mesh(axes=axes, joined=(Joined(name="data", axes=("far", "near")),))
    build = ScheduleBuilder("in blocks", mesh)
    data, replicas = build.group("data", "far", "near"), build.group("replicas", "replicate")
    gather, reduce = build.stream("gather"), build.stream("reduce")
    pieces = (Piece(parameter="w", start=0, size=3), Piece(parameter="b", start=4, size=1))
    build.layout(Layout(name="blocks", pieces=pieces, elements=6, axis="data", blocks=(0, 4)))
    build.layout(Layout(name="flat", pieces=pieces, elements=6, axis="data"))
    own = build.buffer("own", 3, layout="blocks", shard="data", persistent=True)
    gathered = build.buffer("gathered", 6, layout="blocks", home=gather)
    whole = build.buffer("whole", 6, layout="flat")
    kept = build.buffer("kept", 3, layout="flat", shard="data")
    build.setup.allocate(own)
    build.setup.fill("own", own.all, 1.0)
    step, slot = build.step, gathered.own("data", 3)
    step.allocate(gathered, whole)
    placed = step.copy("in", own.all, slot, stream=gather, after=[Previous("step/back")])
    step.all_gather("gather", data, slot, gathered.all, stream=gather, after=[placed])
    out = step.copy(
        "out", gathered.all, whole.all, by_parameter=True, divisor=2, after=["step/gather"]
    )
    step.free(gathered, uses=[out])
    mean, window = Reduction.AVERAGE, whole.window("flat", 4, 1, origin=1)
    summed = step.all_reduce("sum", data, whole.all, reduction=mean, stream=reduce, after=[out])
    step.allocate(kept)
    step.copy("slices", window, kept.window("flat", 4, 1), after=[summed])
    both = step.all_reduce("replicas", replicas, whole.all, stream=reduce, after=["step/slices"])
    step.copy("back", whole.all, own.all, by_parameter=True, accumulate=True, after=[both])
    step.host_wait("updated", "step/back")
    step.free(whole, kept, mode=FreeMode.HOST, uses=[both])
    return build.schedule(Contract(data_axes=names))


BY_HAND = {"by hand": by_hand, "in blocks": in_blocks}


def job(name: str) -> Job:
    """Return one of the jobs."""
    cluster = topology("dgx_a100_infiniband", None, 1)
    if name in BY_HAND:
        model = gpt(SHAPE, micro_batch_size=1)
        return Job(schedule=BY_HAND[name](), model=model, cluster=cluster, steps=STEPS)
    strategy = STRATEGIES[name]
    model = gpt(SHAPE, micro_batch_size=2, precision=strategy.train.precision)
    return Job(schedule=make_schedule(model, strategy), model=model, cluster=cluster, steps=STEPS)


NAMES = (*STRATEGIES, *BY_HAND)
