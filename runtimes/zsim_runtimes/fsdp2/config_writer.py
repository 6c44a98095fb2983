"""A setting of FSDP2 as code."""

from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion
from zsim_runtimes.torch_code import TORCH_DTYPE, checkpoint_lines, head_lines


def write(asked: ConfigQuestion) -> str:
    """Return the code that wraps a model as a setting does.

    Raises:
        MistakeError: experts have expert ranks, for which PyTorch has no public function.
    """
    options = asked.options
    if (ranks := asked.number("parallel.expert")) > 1:
        raise MistakeError(
            f"--config: {ranks} expert ranks need torchtitan; name a file that ends in .toml"
        )
    names = ["MixedPrecisionPolicy", "fully_shard"]
    arguments = ["mesh=mesh", "mp_policy=mp_policy"]
    if options.get("offload_policy") == "cpu":
        names.insert(0, "CPUOffloadPolicy")
        arguments.append("offload_policy=CPUOffloadPolicy()")
    after = options.get("reshard_after_forward", True)
    is_freed = options.get("reshard_root_after_forward", False)
    of_root = ["reshard_after_forward=True"] if is_freed else []
    lines = [
        *head_lines(asked, names),
        *checkpoint_lines(asked),
        f"mp_policy = MixedPrecisionPolicy(param_dtype={TORCH_DTYPE[asked.precision]})",
        "for block in model.layers:",
        f"    fully_shard(block, reshard_after_forward={after}, {', '.join(arguments)})",
        f"fully_shard(model, {', '.join([*of_root, *arguments])})",
    ]
    ahead = options.get("forward_prefetch", 0)
    if ahead:
        lines += [
            "for number, block in enumerate(model.layers):",
            f"    ahead = list(model.layers[number + 1 : number + 1 + {ahead}])",
            "    block.set_modules_to_forward_prefetch(ahead)",
        ]
    if asked.number("parallel.pipeline") > 1:
        return "\n".join([*lines, *_of_stages(asked)]) + "\n"
    if options.get("gradient_sync") == "last":
        lines += [
            "# Before each micro-batch:",
            "# model.set_requires_gradient_sync(micro_batch == micro_batches - 1)",
        ]
    return "\n".join(lines) + "\n"


def _of_stages(asked: ConfigQuestion) -> list[str]:
    """Return how the wrapped layers of a rank are a stage of a pipeline, or several."""
    count, options = asked.number("parallel.pipeline"), asked.options
    kind = str(options.get("pipeline_schedule", "1F1B"))
    chunks = options.get("pipeline_stages_per_rank", 1 if kind == "1F1B" else 2)
    assert isinstance(chunks, int)
    times = asked.number("train.gradient_accumulation_steps")
    lines = [
        "from torch.distributed.pipelining import PipelineStage",
        "from torch.distributed.pipelining.schedules import get_schedule_class",
        'pipeline = world["pipeline"]',
        'place, device = pipeline.get_local_rank(), torch.device("cuda")',
    ]
    many = "n_microbatches"
    if chunks == 1:
        return [
            *lines,
            "# model has the layers of this rank alone.",
            f"stage = PipelineStage(model, place, {count}, device, group=pipeline.get_group())",
            f'schedule = get_schedule_class("{kind}")(stage, {many}={times}, loss_fn=loss_fn)',
        ]
    places = f"[place + {count} * number for number in range({chunks})]"
    if kind == "ZBVZeroBubble":
        places = f"[place, {2 * count - 1} - place]"
    return [
        *lines,
        "# Each of chunks is wrapped as model is: the layers of a stage.",
        f"numbers = {places}",
        "stages = [",
        f"    PipelineStage(chunk, number, {count * chunks}, device,",
        "                  group=pipeline.get_group())",
        "    for number, chunk in zip(numbers, chunks)",
        "]",
        f'schedule = get_schedule_class("{kind}")(stages, {many}={times}, loss_fn=loss_fn)',
    ]
