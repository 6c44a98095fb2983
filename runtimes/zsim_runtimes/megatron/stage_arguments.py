"""Stages of a pipeline from arguments of Megatron-LM: their layers, chunks and messages.

Defaults and ignored arguments are those of `validate_args` (`training/arguments.py`, 2026-08).
"""

from collections.abc import Iterator

from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim_runtimes.megatron.layer_split import stages_in

Option = tuple[str, tuple[str, object]]
"""An option of the runtime, the argument that set it, and its value."""

BY_LAYERS = "num-layers-per-virtual-pipeline-stage"
BY_STAGES = "num-virtual-stages-per-pipeline-rank"
ENDS = {
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
"""Arguments whose option has another name (`argument_utils.py`)."""
COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
LAYOUT = "pipeline-model-parallel-layout"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
WAITS = "no-overlap-p2p-communication"


def stage_options(arguments: Arguments) -> Iterator[Option]:
    """Take the arguments that split layers over stages and chunks; yield them as options.

    Raises:
        TrainerFileError: they request something that is not modelled.
    """
    stages = arguments.origins["parallel.pipeline"].value
    for option, name in ENDS.items():
        if (layers := arguments.whole(name)) is not None:
            yield option, (name, layers)
    counted = [name for name in COUNTED if arguments.flag(name)]
    for name in counted if stages != 1 else ():  # otherwise without effect
        yield name.replace("-", "_"), (name, True)
    layout = arguments.word(LAYOUT, "")
    if layout:
        yield LAYOUT.replace("-", "_"), (LAYOUT, layout)
    chunks = list(_chunks(arguments, len(counted)))
    yield from chunks
    overlaps, group = not arguments.flag(WAITS), arguments.whole(GROUP)
    if not chunks and not (layout and _has_chunks(layout, stages)):
        return  # messages of one chunk never overlap
    if group is not None and group != stages:
        raise arguments.wrong(GROUP, f"{group} is not modelled, only {stages}")
    yield "overlap_p2p_comm", (WAITS, overlaps)


def _chunks(arguments: Arguments, counted: int) -> Iterator[Option]:
    """Yield options that give stages several chunks; nothing for a single chunk.

    `counted` is the number of ends (embedding, loss) that count as a layer.
    """
    stages = arguments.origins["parallel.pipeline"].value
    layers = (
        arguments.origins["model.layers"].value if "model.layers" in arguments.origins else None
    )
    each, many = arguments.whole(BY_LAYERS), arguments.whole(BY_STAGES)
    assert isinstance(stages, int)
    is_one = isinstance(layers, int) and each is not None and layers + counted == each * stages
    if each is not None and not (is_one and many is None):
        yield BY_LAYERS.replace("-", "_"), (BY_LAYERS, each)
    if many is not None and (many > 1 or each is not None):
        yield BY_STAGES.replace("-", "_"), (BY_STAGES, many)


def _has_chunks(layout: str, stages: object) -> bool:
    """Return True if a layout has another number of stages than the pipeline; False if invalid."""
    try:
        return len(stages_in(layout)) != stages
    except ValueError:  # the options refuse an invalid layout
        return False
