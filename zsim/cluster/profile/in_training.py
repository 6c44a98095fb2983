"""Factors of kernel speed in training relative to kernels alone, fitted to whole runs.

Benchmarks time one kernel after a pause. In training the GPU is warm and near its power limit,
operands come from memory and not from the cache, and libraries choose kernels for other shapes; so
each class of kernels has one factor. `zsim calibrate` fits these constants. It also predicts runs
that were not fitted, and stores the errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date

from zsim.model.kernel import Kernel, KernelKind


class InTrainingError(ValueError):
    """Invalid constant; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence for training constants.

    Attributes:
        gpu: the kind of GPU of the fitted and judged runs.
        fitted: number of fitted runs.
        publications: short names of the publications of the runs.
        judged: number of runs in sweeps that were not fitted.
        median, p90: absolute relative errors of their step times.
        rows: the judged runs by table: line numbers, where the header is line 1.
        date: date of their prediction.
    """

    gpu: str
    fitted: int
    publications: tuple[str, ...]
    judged: int
    median: float
    p90: float
    rows: tuple[str, ...]
    date: date


@dataclass(frozen=True, slots=True, kw_only=True)
class InTraining:
    """Speed of each class of kernels in training relative to kernels alone; may exceed 1.

    Attributes:
        product: matrix products.
        attention_forward, attention_backward: fused attention.
        flash2: FlashAttention-2 and cuDNN's attention, relative to their published speed.
        memory: all other kernels, which are memory-bound.
        evidence: the runs that were fitted and judged; None if nothing was fitted.
    """

    product: float = 1.0
    attention_forward: float = 1.0
    attention_backward: float = 1.0
    flash2: float = 1.0
    memory: float = 1.0
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        for name in SHARES:
            if getattr(self, name) <= 0:
                raise InTrainingError(f"{name}: {getattr(self, name)} must be more than 0")

    def constant(self, name: str) -> float:
        """Return the constant called `name`."""
        found: float = getattr(self, name)
        return found

    def changed(self, name: str, value: float) -> "InTraining":
        """Return a copy with another value of the constant called `name`."""
        constants = {each: self.constant(each) for each in SHARES} | {name: value}
        return InTraining(**constants, evidence=self.evidence)

    def share(self, kernel: Kernel) -> float:
        """Return the speed of `kernel` in training relative to its speed alone."""
        return self.constant(share_of(kernel))


def share_of(kernel: Kernel) -> str:
    """Return the name of the constant of `kernel`."""
    if kernel.kind in (KernelKind.MATMUL, KernelKind.GROUPED_MATMUL):
        return "product"
    if kernel.kind is KernelKind.ATTENTION and kernel.version > 1:
        return "flash2"
    if kernel.kind is KernelKind.ATTENTION:
        return "attention_backward" if kernel.backward else "attention_forward"
    return "memory"


MATRIX: tuple[str, ...] = ("product", "attention_forward", "attention_backward", "flash2")
"""Names of the constants of kernels on matrix units."""

SHARES: tuple[str, ...] = (*MATRIX, "memory")

ALONE = InTraining()
"""Constants of kernels as fast as alone."""


def text(training: InTraining) -> list[str]:
    """Return the lines of a file, in TOML; empty if nothing was fitted."""
    evidence = training.evidence
    if evidence is None:
        return []
    lines = ["", "[training]", *(f"{name} = {getattr(training, name):.4g}" for name in SHARES)]
    lines += ["", "[training.evidence]", f'gpu = "{evidence.gpu}"']
    lines += [f"fitted = {evidence.fitted}", _words_line("publications", evidence.publications)]
    lines += [f"judged = {evidence.judged}"]
    lines += [f"median = {evidence.median:.4f}", f"p90 = {evidence.p90:.4f}"]
    return [*lines, _words_line("rows", evidence.rows), f"date = {evidence.date.isoformat()}"]


def _words_line(name: str, words: Sequence[str]) -> str:
    quoted = ", ".join(f'"{word}"' for word in words)
    return f"{name} = [{quoted}]"


def parse(table: Mapping[str, object]) -> InTraining:
    """Return the constants from a table that `text` wrote.

    Raises:
        InTrainingError: a key is missing, unknown or of the wrong kind.
    """
    _keys(table, {*SHARES, "evidence"}, "training")
    found = table["evidence"]
    if not isinstance(found, dict):
        raise InTrainingError("evidence: must be a table")
    names = {field.name for field in fields(Evidence)}
    _keys(found, names, "evidence")
    evidence = Evidence(
        gpu=str(found["gpu"]),
        fitted=int(_number("fitted", found["fitted"])),
        publications=_words("publications", found["publications"]),
        judged=int(_number("judged", found["judged"])),
        median=_number("median", found["median"]),
        p90=_number("p90", found["p90"]),
        rows=_words("rows", found["rows"]),
        date=_date("date", found["date"]),
    )
    constants = {name: _number(name, table[name]) for name in SHARES}
    return InTraining(**constants, evidence=evidence)


def _words(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InTrainingError(f"{name}: must be a list of words")
    return tuple(value)


def _date(name: str, value: object) -> date:
    if not isinstance(value, date):
        raise InTrainingError(f"{name}: must be a date, such as 2026-01-31")
    return value


def _keys(table: Mapping[str, object], known: set[str], what: str) -> None:
    for key in (*sorted(set(table) - known), *sorted(known - set(table))):
        state = "missing" if key in known else f"not a key of {what}"
        raise InTrainingError(f"{key}: {state}")


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InTrainingError(f"{name}: must be a number")
    return float(value)
