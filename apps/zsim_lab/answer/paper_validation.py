"""Compare predicted figures of papers with the published values."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

from zsim.analysis.memory_footprint import footprint
from zsim.analysis.simulated_footprint import footprint_of
from zsim.analysis.summary import Summary, summary
from zsim.api.forecast import accumulating, forecast, settled_source
from zsim.api.run_forecast import RunForecast
from zsim.api.scenario import load
from zsim.api.topology_result import ONE_SWITCH
from zsim.backend.backend import BackendError, Job, NoRouteError
from zsim.closed_form import offload_formulas
from zsim.closed_form.offload_formulas import TransformerSize
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files import TopologyError
from zsim.files.installed import topology
from zsim.files.shipped_files import published_papers
from zsim.files.source import resolved
from zsim.mistake import MistakeError
from zsim.scenario.tables import ScenarioError, from_tables
from zsim.schedule.schedule import Place
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND
from zsim_lab.answer.validation import Validation
from zsim_lab.rows.csv_rows import NotModelledError
from zsim_lab.rows.host_figures import (
    copy_gb_per_s,
    drive_gb_per_s,
    formula_value,
    kernel_s,
    rounded,
)
from zsim_lab.verdict.paper_figures import (
    PIECE_BYTES,
    FigureQuantity,
    Paper,
    PaperRun,
    parse,
    verdict,
)
from zsim_lab.verdict.verdict import Verdict
from zsim_plan.answer.largest_result import largest

NARROWEST = 4096
"""Hidden size from which widths are doubled."""

FAULTS = (
    MistakeError,
    ScenarioError,
    BackendError,
    NoRouteError,
    ClusterError,
    TopologyError,
    NotModelledError,
)
"""Exceptions for which a row has no prediction."""

TERA = 10**12

Asked = tuple[float, int] | str
"""Predicted value and index of the scenario that fits, or the reason why there is no prediction."""


def validate_papers(*, pipelines: bool = False) -> Validation:
    """Predict every figure that ships, on all processors.

    Args:
        pipelines: predict only publications of pipelines on many nodes, where each row is a run.
    """
    papers = [parse(text) for text in published_papers().values()]
    found = {each.publication: verdicts_of(each) for each in papers if each.pipelines == pipelines}
    return Validation(verdicts=found, more={}, is_paper=True)


def verdicts_of(paper: Paper) -> list[Verdict]:
    """Return every figure of `paper`, predicted on all processors."""
    asked = [(figure.quantity, run) for figure in paper.figures for run in figure.runs]
    with ProcessPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:
        answers = iter(list(pool.map(_answer, *zip(*asked, strict=True))))
    return [verdict(figure, [next(answers) for _ in figure.runs]) for figure in paper.figures]


def _answer(quantity: FigureQuantity, run: PaperRun) -> Asked:
    """Predict `run` by its first scenario that fits, else by the last."""
    try:
        if not quantity.needs_scenario:
            return _of_hardware(quantity, run), 0
        if quantity in {FigureQuantity.LARGEST, FigureQuantity.STATES}:
            return _largest(quantity, run.alternatives[0])
        if quantity is FigureQuantity.LARGEST_SHAPE:
            return _largest_shape(run)
        if quantity is FigureQuantity.WIDEST:
            return _widest(run.alternatives[0])
        if quantity is FigureQuantity.PLANNED:
            return _planned(run), 0
        if quantity is FigureQuantity.STEP_TIME_RATIO:
            plain, changed = (_simulated(tables)[-1].step_time_s for tables in run.alternatives)
            return changed / plain, 0
        for alternative, tables in enumerate(run.alternatives):
            rate, fits = _of_run(quantity, tables)
            if fits or alternative == len(run.alternatives) - 1:
                return rate, alternative
    except FAULTS as error:
        return str(error)
    raise AssertionError("a run has a scenario")


def _of_hardware(quantity: FigureQuantity, run: PaperRun) -> float:
    (values,) = run.alternatives
    match quantity:
        case FigureQuantity.FORMULA:
            found = formula_value(values)
        case FigureQuantity.COPY:
            found = copy_gb_per_s(values, _node)
        case FigureQuantity.KERNEL:
            found = kernel_s(values, _node)
        case _:
            found = drive_gb_per_s(values, _node)
    return found if run.decimals is None else rounded(found, run.decimals)


def _node(name: str) -> Cluster:
    return topology(name, ONE_SWITCH, 1)


def _largest(quantity: FigureQuantity, tables: Mapping[str, object]) -> Asked:
    answer = largest(tables)
    found = answer.states if quantity is FigureQuantity.STATES else answer.found
    if found is None or found.fits is None:
        return "no size fits"
    return float(found.fits.parameters), 0


def _largest_shape(run: PaperRun) -> Asked:
    """Return the parameters of the largest shape that fits, and its index."""
    fitting: list[tuple[float, int]] = []
    for alternative, tables in enumerate(run.alternatives):
        job = resolved("scenario", from_tables(tables)).job()
        if footprint(job).fits:
            fitting.append(
                (float(sum(each.elements for each in job.model.parameters)), alternative)
            )
    return max(fitting, default="none of the shapes fits")


def _widest(tables: Mapping[str, object]) -> Asked:
    """Double the hidden size until the model does not fit; buffers are at most `PIECE_BYTES`."""
    scenario, width, fits = from_tables(tables), NARROWEST, 0
    while True:
        model = scenario.model.model_copy(update={"hidden_size": width})
        job = resolved("scenario", scenario.model_copy(update={"model": model})).job()
        if not (_largest_buffer(job) <= PIECE_BYTES and footprint_of(job).fits):
            return (float(fits), 0) if fits else "no size fits"
        width, fits = 2 * width, width


def _largest_buffer(job: Job) -> int:
    """Return the bytes of the largest buffer in device memory."""
    device = {pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE}
    return max(
        buffer.size_bytes
        for program in job.schedule.programs
        for buffer in program.buffers
        if buffer.pool in device
    )


def _planned(run: PaperRun) -> float:
    """Return the number at the key `run.of` of the plan, or the sum of the table there."""
    found: object = load(run.alternatives[0]).plan().to_dict()
    for key in run.of.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, dict):
        return float(sum(found.values()))
    if not isinstance(found, int):
        raise NotModelledError(f"of: {run.of!r} is no number of the plan")
    return float(found)


def _of_run(quantity: FigureQuantity, tables: Mapping[str, object]) -> tuple[float, bool]:
    """Return the value of a simulated run, and True if the run fits."""
    if quantity is FigureQuantity.RESERVED:
        run = forecast_of(tables)
        return float(run.peak_reserved_bytes), run.fits
    if quantity is FigureQuantity.BACKWARD:
        _, trace, found = _simulated(tables)
        return _backward_s(trace), found.fits
    if quantity is FigureQuantity.STEP_TIME:
        run = forecast_of(tables)
        return run.step_time_s, run.fits
    rate, summed = throughput(quantity, tables)
    return rate, summed.fits


def throughput(
    quantity: FigureQuantity, tables: Mapping[str, object]
) -> tuple[float, Summary | RunForecast]:
    """Return the TFLOP/s per GPU of a simulated run, with FLOPs by `quantity`, and the run.

    Few of many micro-batches are simulated; the rest are extrapolated.

    Raises:
        MistakeError: there is no prediction.
        NotModelledError: the model has no architecture to count FLOPs of.
    """
    if quantity is FigureQuantity.THROUGHPUT:
        _, _, summed = _simulated(tables)
        return summed.model_tflops_per_gpu, summed
    found = forecast_of(tables)
    job = settled_source(accumulating(tables, 1)).job()
    steps = from_tables(tables).train.gradient_accumulation_steps or 1
    tokens = steps * job.schedule.contract.loss_divisor * job.model.tokens
    if quantity is FigureQuantity.BLOCK_THROUGHPUT:
        flops = offload_formulas.step_flops(_transformer_size(job), tokens=tokens)
    else:
        flops = _formula_flops(job, tokens=tokens)
    return flops / found.step_time_s / job.schedule.mesh.size / TERA, found


def forecast_of(tables: Mapping[str, object]) -> RunForecast:
    """Return the forecast of the run in `tables`.

    Raises:
        MistakeError: there is no forecast.
    """
    found = forecast(tables)
    if isinstance(found, str):
        raise MistakeError(found)
    return found


def _formula_flops(job: Job, *, tokens: int) -> float:
    """Return the FLOPs of a step of `tokens` by `FigureQuantity.FORMULA_THROUGHPUT`."""
    shape = job.model.architecture
    if shape is None:
        raise NotModelledError("model: its layers and width must be given")
    layers, width = shape.layers, shape.hidden_size
    more = 1 + shape.sequence_length / (6 * width) + shape.vocab_size / (16 * layers * width)
    return 96 * tokens * layers * width**2 * more


def _simulated(tables: Mapping[str, object]) -> tuple[Job, Trace, Summary]:
    source = resolved("scenario", from_tables(tables))
    job = source.job()
    trace = source.simulation().run(job, seed=0)
    return job, trace, summary(job, trace)


def _backward_s(trace: Trace) -> float:
    """Return the seconds from the first to the last backward operation of the last step."""
    events = [
        each
        for each in trace.ranks[0].events
        if each.step == trace.steps - 1 and each.operation.startswith("step/backward/")
    ]
    took_ps = max(each.end_ps for each in events) - min(each.start_ps for each in events)
    return took_ps / PICOSECONDS_PER_SECOND


def _transformer_size(job: Job) -> TransformerSize:
    shape = job.model.architecture
    if shape is None:
        raise NotModelledError("model: its layers and width must be given")
    return TransformerSize(
        layers=shape.layers, hidden=shape.hidden_size, heads=shape.attention_heads
    )
