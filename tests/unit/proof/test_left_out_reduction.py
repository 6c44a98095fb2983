"""A reduction left out where all ranks are meant to hold the same, and each owns a piece."""

from faults.schedules import without

from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import ReduceScatter
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep

RANKS = 5
"""More than there are elements, so that some ranks own padding alone."""


def _unit(number: int, inputs: tuple[str, ...], parameters: int = 0) -> Unit:
    """Return a unit of one segment whose parameters and output have one element each."""
    output = f"unit{number}/output"
    held = tuple(Parameter(name=f"unit{number}.{each}", shape=(1,)) for each in range(parameters))
    segment = Segment(
        inputs=inputs,
        outputs=(Value(name=output, elements=1, dtype=DType.BF16, requires_gradient=True),),
        parameters=tuple(each.name for each in held),
        saved_bytes=0,
        saves_input=False,
    )
    return Unit(name=f"unit{number}", parameters=held, segments=(segment,))


def test_a_reduction_left_out_of_one_element_on_many_ranks_is_found() -> None:
    units = (_unit(0, inputs=(BATCH,)), _unit(1, inputs=("unit0/output", BATCH), parameters=1))
    batch = Value(name=BATCH, elements=4, dtype=DType.INT64, requires_gradient=False)
    model = Model(name="one", units=units, batch=batch, micro_batch_size=1, tokens=1)
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(
            stage=2,
            reductions_in_flight=0,
            prefetch_units=0,
            host_ahead_units=1,
            keep_after_forward=Keep.NOTHING,
        ),
        offload=Offload(optimizer=MemoryTier.NVME, gradients=MemoryTier.HOST, sub_group_elements=7),
        train=Train(precision=Precision.BF16, optimizer=SGD(learning_rate=0.01)),
    )
    made = make_schedule(model, strategy)
    (program,) = made.programs
    (name,) = (each.id for each in program.step if isinstance(each, ReduceScatter))
    found = {each.invariant for each in check(without(made, name))}
    assert found >= {"values", "volume"}
