"""A `Model` of equal units, for when only the number of parameters is known."""

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import BATCH, Model, ModelError, Parameter, Segment, Unit, Value
from zsim.strategy.precision import Precision

EQUAL_UNITS = 32
"""Number of units of such a model."""


def equal_units(
    *,
    parameters: int,
    units: int = EQUAL_UNITS,
    tokens: int = 1024,
    tensor: int = 1,
    precision: Precision = Precision.FP32,
) -> Model:
    """Return a model with `parameters` parameters: `units` layers of one matrix each.

    Each costs 2 FLOPs per parameter and token in forward and twice that in backward (Kaplan et al.
    2020, section 2.1). Activations are not modelled: one element per token flows.

    Raises:
        ModelError: there are fewer parameters than units and ranks of the tensor axis.
    """
    if parameters < units * tensor:
        raise ModelError(f"model.parameters: {parameters} must be at least {units * tensor}")
    local = -(-parameters // tensor)
    dtype = precision.compute
    made: list[Unit] = []
    source, products = BATCH, 0
    for index in range(units):
        elements = local * (index + 1) // units - local * index // units
        weight = Parameter(
            name=f"unit{index}.weight", shape=(elements, 1), tensor_sharded=tensor > 1
        )
        forward = Kernel(
            kind=KernelKind.MATMUL,
            flops=2 * elements * tokens,
            bytes=elements * dtype.size_bytes,
            dtype=dtype,
        )
        last = index == units - 1
        output = Value(
            name=f"unit{index}/output",
            elements=1 if last else tokens,
            dtype=precision.wide if last else dtype,
        )
        segment = Segment(
            inputs=(source,),
            outputs=(output,),
            parameters=(weight.name,),
            forward=(forward,),
            backward=(forward, forward),
        )
        made.append(Unit(name=f"unit{index}", parameters=(weight,), segments=(segment,)))
        source, products = output.name, products + forward.flops
    return Model(
        name=f"{parameters} parameters",
        units=tuple(made),
        batch=Value(name=BATCH, elements=tokens, dtype=DType.INT64, requires_gradient=False),
        tokens=tokens,
        tensor=tensor,
        forward_flops=products * tensor,
        backward_flops=2 * products * tensor,
    )
