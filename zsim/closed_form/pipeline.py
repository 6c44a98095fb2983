"""What a stage of a pipeline sends to its neighbors: activations on, and their gradients back."""

from zsim.model.pipeline_stages import Stage
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def handed_on(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Of every micro-batch, what it made and the gradient of what it was given."""
    size = sum(value.size_bytes for value in (stage.given, stage.sent) if value is not None)
    times = strategy.gradient_accumulation_steps
    return [WireBytes(group="pipeline", collective="send", bytes=times * size)]
