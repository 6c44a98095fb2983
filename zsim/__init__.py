"""A simulation-first testbed for ZeRO training.

    import zsim

    scenario = zsim.load("llama2_7b", {"zero.stage": 3, "cluster.nodes": 8})
    result = zsim.run(scenario)
    print(result.step_time_s, result.peak_reserved_bytes)
    result.report("run.html")

This is the index. A name is imported when it is first used, so that `import zsim` costs nothing.
"""

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from zsim.api.comparison import compare as compare
    from zsim.api.launch import run as run
    from zsim.api.limited import limited as limited
    from zsim.api.proof_result import check as check
    from zsim.api.scenario import load as load
    from zsim.cluster.cluster import Cluster as Cluster
    from zsim.mistake import MistakeError as MistakeError
    from zsim.model.model import Model as Model
    from zsim.runtimes.registry import make_schedule as make_schedule
    from zsim.schedule.schedule import Schedule as Schedule
    from zsim.strategy.strategy import Strategy as Strategy
    from zsim.trace.trace import Trace as Trace
    from zsim_explain.answer.explanation import explain as explain
    from zsim_plan.answer.best_search import best as best
    from zsim_plan.answer.largest_result import largest as largest
    from zsim_record.machine_measurement import measure as measure
    from zsim_study.answer.sweep_result import sweep as sweep

    __version__: str

# No name may be that of a module in this folder: importing the module would replace it here.
_INDEX = {
    "Cluster": "zsim.cluster.cluster:Cluster",
    "MistakeError": "zsim.mistake:MistakeError",
    "Model": "zsim.model.model:Model",
    "Schedule": "zsim.schedule.schedule:Schedule",
    "Strategy": "zsim.strategy.strategy:Strategy",
    "Trace": "zsim.trace.trace:Trace",
    "best": "zsim_plan.answer.best_search:best",
    "compare": "zsim.api.comparison:compare",
    "explain": "zsim_explain.answer.explanation:explain",
    "largest": "zsim_plan.answer.largest_result:largest",
    "limited": "zsim.api.limited:limited",
    "load": "zsim.api.scenario:load",
    "measure": "zsim_record.machine_measurement:measure",
    "make_schedule": "zsim.runtimes.registry:make_schedule",
    "check": "zsim.api.proof_result:check",
    "run": "zsim.api.launch:run",
    "sweep": "zsim_study.answer.sweep_result:sweep",
}

__all__ = [
    "Cluster",
    "MistakeError",
    "Model",
    "Schedule",
    "Strategy",
    "Trace",
    "__version__",
    "best",
    "check",
    "compare",
    "explain",
    "largest",
    "limited",
    "load",
    "make_schedule",
    "measure",
    "run",
    "sweep",
]


def __getattr__(name: str) -> object:
    """Import what the index has under `name`, once."""
    if name == "__version__":
        from importlib.metadata import version

        found: object = version("zsim")
    elif name in _INDEX:
        module, _, attribute = _INDEX[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'zsim' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
