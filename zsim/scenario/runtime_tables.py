"""The runtime that `[zero]` of a scenario selects, with its options."""

from zsim.runtimes.lookup import runtimes
from zsim.scenario.tables import ScenarioError, ZeroTable
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import STAGES


def emulated(zero: ZeroTable) -> RuntimeOptions | None:
    """Return the runtime that `emulate` names, with the options in its table; None if none.

    Raises:
        ScenarioError: options are given without their runtime, or a trainer's file was not read.
    """
    if (key := zero.file_key) is not None:
        raise ScenarioError(f"zero.{key}: {getattr(zero, key)!r} was not read")
    for name in runtimes():
        if getattr(zero, name) is not None and zero.emulate != name:
            raise ScenarioError(f'zero.{name}: stands with emulate = "{name}"')
    if zero.emulate is None:
        return None
    kind = runtimes()[zero.emulate].options
    return kind(**(getattr(zero, zero.emulate) or {}))


def stage_of(zero: ZeroTable, runtime: RuntimeOptions | None) -> int:
    """Return the ZeRO stage: the given one, or else the runtime's only or usual one.

    Raises:
        ScenarioError: it is required and missing.
    """
    if zero.stage is not None:
        return zero.stage
    stages = STAGES if runtime is None else runtime.stages
    if len(stages) == 1:
        return stages[0]
    if runtime is not None and runtime.usual_stage is not None:
        return runtime.usual_stage
    raise ScenarioError(f"zero.stage: missing; must be {', '.join(map(str, stages))}")
