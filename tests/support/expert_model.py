"""A small model with experts, through which each rank sends its own tokens alone.

The last segment of each block reads parameters of experts. Nobody exchanges tokens, so only the
states of experts and their gradients are in question.
"""

from dataclasses import replace

from fitting import fitting
from token_ranks import LLAMA

from zsim.model.architecture import Llama
from zsim.model.model import Model, Parameter, Segment, Unit
from zsim.model.pipeline_stages import in_blocks
from zsim.strategy.strategy import Strategy

UP, DOWN = 12, 10
"""Elements of an expert's two tensors on one rank."""


def expert_model(strategy: Strategy, shape: Llama = LLAMA) -> Model:
    """Return the model of a shape with experts at the end of each block, one unit each."""
    execution = replace(strategy.execution, expert=1)  # its experts are added here
    fitted = fitting(replace(shape, execution=execution), strategy)
    return with_experts(in_blocks(fitted), strategy)


def with_experts(model: Model, strategy: Strategy) -> Model:
    """Return a model with experts at the end of each block."""
    units: list[Unit] = []
    renamed: dict[str, str] = {}
    for unit in model.units:
        segments = [
            replace(each, inputs=tuple(renamed.get(name, name) for name in each.inputs))
            for each in unit.segments
        ]
        own: tuple[Parameter, ...] = ()
        if unit.checkpoint:
            out = segments[-1].outputs[-1]
            own = tuple(
                Parameter(name=f"{unit.name}.experts.{name}", shape=(2, size // 2), experts=2)
                for name, size in (("up", UP), ("down", DOWN))
            )
            made = replace(out, name=f"{unit.name}/experts.out")
            segments.append(
                Segment(
                    inputs=(out.name,),
                    outputs=(made,),
                    parameters=tuple(each.name for each in own),
                    saved_bytes=16,
                )
            )
            renamed[out.name] = made.name
        units.append(replace(unit, segments=tuple(segments), parameters=(*unit.parameters, *own)))
    return replace(
        model,
        units=tuple(units),
        expert=strategy.parallel.expert,
        expert_tensor=strategy.expert_tensor,
    )
