"""Columns that determine the error of a prediction: numbers by name, of one run or of two."""

from math import log2

from zsim.prediction.run_features import DEVICE, RunFeatures

NARROW = ("float8", "float4")
"""Names of formats of narrow GEMMs in `RunFeatures.precision`."""

OF_RUNTIME = "a pipeline of "
"""Beginning of the names of columns for pipelines of one runtime."""

Columns = dict[str, float]
"""Numbers by the name of their column; a missing column is 0."""


def time_columns(run: RunFeatures) -> Columns:
    """Return the columns for the error of a step time."""
    return {
        f"{OF_RUNTIME}{run.runtime}": float(run.pipeline > 1),
        "doublings of the pipeline": log2(run.pipeline),
        "several nodes": float(run.nodes > 1),
        "doublings of the nodes": log2(run.nodes),
        "tensor ranks": float(run.tensor > 1),
        "8-bit floats": float(any(each in run.precision for each in NARROW)),
        "states off the device": float(run.states != DEVICE),
        "context ranks": float(run.context > 1),
        "compiled blocks": float(run.compiled),
        f"GPU {run.gpu}": 1.0,
    }


def peak_columns(run: RunFeatures) -> Columns:
    """Return the columns for the error of a peak of memory."""
    return {"a pipeline": float(run.pipeline > 1), "tensor ranks": float(run.tensor > 1)}


def ratio_columns(one: RunFeatures, other: RunFeatures) -> Columns | None:
    """Return the columns for the error of the ratio of two step times.

    None unless both runs have the same model, runtime and GPU: other pairs share no error.
    """
    if _subject(one) != _subject(other):
        return None
    found = {f"another {name}": 1.0 for name in changed(one, other)}
    found |= {
        f"doublings of the {name}": far for name, far in _doublings(one, other).items() if far
    }
    found[f"{OF_RUNTIME}{one.runtime}"] = float(max(one.pipeline, other.pipeline) > 1)
    found["tensor ranks across nodes"] = float(one.spans or other.spans)
    found[f"GPU {one.gpu}"] = 1.0
    return found


def _doublings(one: RunFeatures, other: RunFeatures) -> dict[str, float]:
    """Return how many doublings lie between the degrees and sizes of two runs."""
    pairs = {
        "tensor degree": (one.tensor, other.tensor),
        "pipeline": (one.pipeline, other.pipeline),
        "micro-batch": (one.tokens, other.tokens),
        "GPUs": (one.gpus, other.gpus),
    }
    return {name: abs(log2(first / second)) for name, (first, second) in pairs.items()}


def changed(one: RunFeatures, other: RunFeatures) -> tuple[str, ...]:
    """Return the names of the choices in which two runs differ.

    On the same number of GPUs the data degree follows from the other degrees.
    """
    pairs = {
        "tensor degree": (one.tensor, other.tensor),
        "pipeline": (one.pipeline, other.pipeline),
        "context degree": (one.context, other.context),
        "micro-batch": (one.tokens, other.tokens),
        "checkpointing": (one.checkpointing, other.checkpointing),
        "ZeRO stage": (one.stage, other.stage),
        "precision": (one.precision, other.precision),
        "attention": (one.attention, other.attention),
        "compilation": (one.compiled, other.compiled),
        "tier of states": (one.states, other.states),
        "fabric": (_fabric(one), _fabric(other)),
    }
    found = [name for name, (first, second) in pairs.items() if first != second]
    is_data = (one.data, one.replicate) != (other.data, other.replicate)
    if is_data and (one.gpus != other.gpus or not found):
        found.append("data degree")
    return tuple(found)


def _subject(run: RunFeatures) -> tuple[object, ...]:
    """Return the features of the model, the runtime and the GPU."""
    return (run.runtime, run.constants, run.width, run.layers, run.architecture)


def _fabric(run: RunFeatures) -> tuple[int, float] | None:
    """Return the bandwidth and oversubscription; None on one node, where they do not matter."""
    return (run.gpu_bytes_per_s, run.oversubscription) if run.nodes > 1 else None
