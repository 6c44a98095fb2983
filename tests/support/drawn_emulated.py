"""What Hypothesis draws of other runtimes: any options, and a model that goes with them."""

from drawn import chains, in_groups, models
from fitting import fitting
from hypothesis import assume
from hypothesis import strategies as st

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.execution import Execution
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.ddp.options import DDP, CommunicationHook
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule, Sync
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.nanotron.options import Nanotron, TensorMode

FORMATS = st.sampled_from([None, DType.FP32])
SIZES = st.sampled_from([1, 30, 200, 10**4])


@st.composite
def fsdp1(draw: st.DrawFn) -> FSDP1:
    """Any options of FSDP1."""
    return FSDP1(
        sharding_strategy=draw(st.sampled_from(ShardingStrategy)),
        backward_prefetch=draw(st.sampled_from(BackwardPrefetch)),
        forward_prefetch=draw(st.booleans()),
        limit_all_gathers=draw(st.booleans()),
        reduce_dtype=draw(FORMATS),
        no_sync=draw(st.booleans()),
    )


@st.composite
def fsdp2(draw: st.DrawFn) -> FSDP2:
    """Any options of FSDP2."""
    return FSDP2(
        reshard_after_forward=draw(st.sampled_from([True, False, 2])),
        reshard_after_backward=draw(st.booleans()),
        reduce_dtype=draw(FORMATS),
        gradient_sync=draw(st.sampled_from(Sync)),
        all_reduce=draw(st.sampled_from(Sync)),
        forward_prefetch=draw(st.integers(0, 2)),
        reduce_scatter_max_input_buffers=draw(st.integers(1, 3)),
        enable_sequence_parallel=draw(st.booleans()),
    )


@st.composite
def fsdp2_stages(draw: st.DrawFn) -> FSDP2:
    """Any options of FSDP2 that go with a pipeline."""
    schedule = draw(st.sampled_from(PipelineSchedule))
    is_interleaved = schedule is not PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    in_turns = is_interleaved and schedule is not PipelineSchedule.ZERO_BUBBLE_IN_V
    return FSDP2(
        reshard_after_forward=not is_interleaved and draw(st.booleans()),
        reduce_dtype=draw(FORMATS),
        reduce_scatter_max_input_buffers=draw(st.integers(1, 3)),
        enable_sequence_parallel=draw(st.booleans()),
        pipeline_schedule=schedule,
        pipeline_stages_per_rank=draw(st.integers(2, 4)) if in_turns else None,
    )


@st.composite
def deepspeed(draw: st.DrawFn) -> DeepSpeed:
    """Any options of DeepSpeed."""
    return DeepSpeed(
        reduce_bucket_size=draw(SIZES),
        overlap_comm=draw(st.sampled_from([None, True, False])),
        communication_data_type=draw(FORMATS),
        sub_group_size=draw(SIZES),
        stage3_prefetch_bucket_size=draw(SIZES),
        stage3_max_live_parameters=draw(SIZES),
        stage3_max_reuse_distance=draw(SIZES),
        stage3_param_persistence_threshold=draw(st.sampled_from([0, 5, 50])),
        zero_hpz_partition_size=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def megatron(draw: st.DrawFn) -> Megatron:
    """Any options of Megatron-LM."""
    overlaps = draw(st.booleans())
    return Megatron(
        bucket_size=draw(st.sampled_from([None, 1, 100, 1000])),
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and draw(st.booleans()),
        grad_reduce_in_fp32=draw(st.booleans()),
        average_in_collective=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        scatter_gather_tensors_in_pipeline=draw(st.booleans()),
    )


@st.composite
def nanotron(draw: st.DrawFn) -> Nanotron:
    """Any options of nanotron."""
    return Nanotron(
        tp_mode=draw(st.sampled_from(TensorMode)),
        tp_recompute_allgather=draw(st.booleans()),
    )


HOOKS = [each for each in CommunicationHook if each is not CommunicationHook.POWER_SGD]


@st.composite
def ddp(draw: st.DrawFn) -> DDP:
    """Any options of DistributedDataParallel."""
    return DDP(
        bucket_cap_mb=draw(st.sampled_from([None, 0.0001, 0.001])),
        gradient_as_bucket_view=draw(st.booleans()),
        find_unused_parameters=draw(st.booleans()),
        static_graph=draw(st.booleans()),
        no_sync=draw(st.booleans()),
        broadcast_buffers=draw(st.sampled_from([0, 0, 3])),
        comm_hook=draw(st.sampled_from(HOOKS)),
    )


RUNTIMES: list[st.SearchStrategy[RuntimeOptions]] = [
    ddp(),
    fsdp1(),
    fsdp2(),
    deepspeed(),
    megatron(),
    nanotron(),
]


@st.composite
def staged(draw: st.DrawFn, runtime: RuntimeOptions) -> tuple[RuntimeOptions, int]:
    """A stage that a runtime has, and the runtime with what goes with it."""
    stage = draw(st.sampled_from(runtime.stages))
    if isinstance(runtime, Megatron) and stage == 0:
        return runtime.but(overlap_param_gather=False), stage
    if isinstance(runtime, Megatron) and draw(st.booleans()):
        return summed_whole(runtime, draw(st.sampled_from([1, 100, 1000]))), stage
    return runtime, stage


def summed_whole(runtime: Megatron, elements: int) -> Megatron:
    """Return the options with gradients that are summed in fp32, in buckets of such a size."""
    return runtime.but(
        allreduce_in_float32=True,
        allreduce_bucket_size=elements,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_reduce_in_fp32=False,
        average_in_collective=False,
    )


def replicas(runtime: RuntimeOptions, stage: int) -> st.SearchStrategy[int]:
    """Every number of replicas of shards that a runtime may have in a stage, up to two."""
    return st.integers(1, 2 if runtime.without_replicas(stage=stage) is None else 1)


def precisions(runtime: RuntimeOptions) -> st.SearchStrategy[Precision]:
    """Every precision that a runtime has."""
    narrow = runtime.trains_narrow
    return st.sampled_from([each for each in Precision if narrow or each != Precision.PURE_BF16])


def unmodelled(runtime: RuntimeOptions, stage: int, precision: Precision) -> bool:
    """Return True for masters in bf16 without ZeRO, which DeepSpeed refuses."""
    return isinstance(runtime, DeepSpeed) and not stage and precision is Precision.PURE_BF16


def hook_for(runtime: DDP, precision: Precision) -> CommunicationHook:
    """The drawn hook, or the one of the 16-bit format that gradients have."""
    compressed = CommunicationHook.BF16_COMPRESS, CommunicationHook.FP16_COMPRESS
    narrow = precision.compute in (DType.BF16, DType.FP16)
    if narrow and runtime.comm_hook in compressed:
        return compressed[precision.compute is DType.FP16]
    return runtime.comm_hook


@st.composite
def emulated_jobs(draw: st.DrawFn) -> tuple[Model, Strategy]:
    """A model and a strategy that emulates another runtime."""
    runtime = draw(st.one_of(RUNTIMES))
    optimizers: list[SGD | Adam] = [
        SGD(),
        SGD(momentum=0.875),
        Adam(),
        Adam(learning_rate=LEARNING_RATE),
    ]
    data = draw(st.integers(1, 5))
    runtime, stage = draw(staged(runtime))
    if isinstance(runtime, DeepSpeed) and (stage < 3 or data % runtime.zero_hpz_partition_size):
        runtime = runtime.but(zero_hpz_partition_size=1)
    if isinstance(runtime, FSDP2) and runtime.reshard_after_forward == 2 and data % 2:
        runtime = runtime.but(reshard_after_forward=True)
    checkpointing = draw(st.sampled_from(Checkpointing))
    tensor = 1 if isinstance(runtime, DDP) else draw(st.integers(1, 2))
    full = checkpointing is Checkpointing.FULL
    if full and runtime.checkpoint_option is not None and draw(st.booleans()):
        moves = {runtime.checkpoint_option: True}
        if isinstance(runtime, DeepSpeed):
            moves["checkpoint_stream"] = draw(st.booleans())
        runtime = runtime.but(**moves)
    precision = draw(precisions(runtime))
    assume(not unmodelled(runtime, stage, precision))
    if isinstance(runtime, DDP):
        runtime = runtime.but(comm_hook=hook_for(runtime, precision))
    may_skip = full and runtime.checkpoints_every_nth
    strategy = Strategy(
        parallel=Parallel(
            data=data,
            tensor=tensor,
            replicate=draw(
                st.integers(1, 2 if runtime.without_replicas(stage=stage) is None else 1)
            ),
        ),
        zero=Zero(stage=stage, emulate=runtime),
        activations=Activations(
            checkpointing=checkpointing,
            every_nth=draw(st.sampled_from([1, 2])) if may_skip else 1,
            partition=checkpointing is Checkpointing.FULL
            and not (tensor > 1 and runtime.cuts_tokens)
            and draw(st.booleans()),
        ),
        train=Train(
            gradient_accumulation_steps=draw(st.integers(1, 3)),
            precision=precision,
            optimizer=draw(st.sampled_from(optimizers)),
            clip_norm=draw(st.sampled_from([None, 1.0])),
        ),
    )
    drawn = st.one_of(models(strategy), chains(strategy))
    model = draw(drawn.filter(lambda model: bool(model.parameters)))
    return model, draw(in_groups(model, strategy))


@st.composite
def split_layers(draw: st.DrawFn, runtime: Megatron, stages: int) -> tuple[Megatron, int]:
    """Options that split layers over stages evenly or not, and how many layers there are."""
    is_interleaved = runtime.num_layers_per_virtual_pipeline_stage is not None
    chunks = draw(st.integers(2, 2 if stages > 2 else 3)) if is_interleaved else 1
    kind = draw(st.sampled_from(["even", "ends", "counted", "laid out"]))
    if kind == "even":
        return runtime, stages * draw(st.integers(1, 2))
    if kind == "counted":
        embedding, loss = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        each = draw(st.integers(1 if is_interleaved else 2, 2))
        if is_interleaved:
            each *= chunks
        counted = runtime.but(
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
        )
        return counted, stages * each - embedding - loss
    plain = runtime.but(num_layers_per_virtual_pipeline_stage=None)
    if kind == "laid out":
        ends = st.integers(0, 2)
        between = draw(
            st.lists(st.integers(1, 2), min_size=stages * chunks - 2, max_size=stages * chunks - 2)
        )
        sizes = [draw(ends), *between, draw(ends)]
        assume(sum(sizes))
        layout = "|".join("t" * size for size in sizes)
        return plain.but(pipeline_model_parallel_layout=f"E{layout}L"), sum(sizes)
    first, each = (draw(st.integers(1, 2)) * chunks for _ in range(2))
    unlike = plain.but(num_layers_in_first_pipeline_stage=first)
    if is_interleaved:
        unlike = unlike.but(num_virtual_stages_per_pipeline_rank=chunks)
    return unlike, first + each * (stages - 1)


@st.composite
def pipelined_jobs(draw: st.DrawFn) -> tuple[Model, Strategy]:
    """A transformer and a strategy that splits it over the stages of a pipeline."""
    optimizers: list[SGD | Adam] = [SGD(), Adam(), Adam(learning_rate=LEARNING_RATE)]
    runtime: RuntimeOptions = draw(st.one_of(nanotron(), megatron(), fsdp2_stages()))
    stages, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    if isinstance(runtime, FSDP2):
        micro_batches = max(stages, micro_batches)
        if runtime.is_interleaved:  # also a round of fewer than there are stages
            micro_batches = draw(st.sampled_from([1, stages, stages + 1, 2 * stages]))
    is_interleaved = isinstance(runtime, Megatron) and draw(st.booleans())
    if is_interleaved:
        micro_batches = stages * draw(st.integers(1, 2))
        overlaps = stages == 2 or draw(st.booleans())
        scatters = isinstance(runtime, Megatron) and runtime.scatter_gather_tensors_in_pipeline
        runtime = runtime.but(
            num_layers_per_virtual_pipeline_stage=1,
            overlap_p2p_comm=overlaps,
            scatter_gather_tensors_in_pipeline=scatters and not overlaps,
        )
    runtime, stage = draw(staged(runtime))
    layers = st.integers(stages, stages + 2)
    if isinstance(runtime, Megatron):
        runtime, count = draw(split_layers(runtime, stages))
        layers = st.just(count)
    elif isinstance(runtime, FSDP2) and runtime.is_interleaved:
        layers = st.integers(chunks := stages * runtime.chunks_of_stage, chunks + 1)
    splits = runtime.splits_backward
    checkpointing = Checkpointing.NONE if splits else draw(st.sampled_from(Checkpointing))
    if checkpointing is Checkpointing.FULL and isinstance(runtime, FSDP2) and draw(st.booleans()):
        runtime = runtime.but(offload_wrapper=True)
    strategy = Strategy(
        parallel=Parallel(
            pipeline=stages,
            data=draw(st.integers(1, 3)),
            tensor=draw(st.integers(1, 2)),
            replicate=draw(
                st.integers(1, 2 if runtime.without_replicas(stage=stage) is None else 1)
            ),
        ),
        zero=Zero(stage=stage, emulate=runtime),
        activations=Activations(checkpointing=checkpointing),
        train=Train(
            gradient_accumulation_steps=micro_batches,
            precision=draw(precisions(runtime)),
            optimizer=draw(st.sampled_from(optimizers)),
            clip_norm=draw(st.sampled_from([None, 1.0])),
        ),
    )
    if splits and isinstance(runtime, FSDP2):
        known = (None, DType.FP32, strategy.train.precision.compute)
        assume(runtime.reduce_dtype in known)
    heads = 2 * strategy.parallel.tensor
    shape = GPT(
        layers=draw(layers),
        hidden_size=heads * draw(st.integers(1, 2)),
        attention_heads=heads,
        sequence_length=2 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(2, 13)),
        tied_embeddings=runtime.ties_ends and draw(st.booleans()),
        execution=Execution(splits=splits and draw(st.booleans())),
    )
    model = fitting(shape, strategy)
    made = in_blocks(model)
    return made, draw(in_groups(made, strategy))
