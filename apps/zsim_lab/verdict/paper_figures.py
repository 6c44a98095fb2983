"""Figures of papers: published values of each run, and errors of predictions.

A file has tables that all runs share, and figures. Each row of a figure sets the keys that the
figure lists; `when` adds settings to rows with certain values. The compared quantity is throughput,
the largest model that fits, bytes of the plan, or a hardware figure. Hardware figures use the keys
of `zsim_lab.rows.host_figures` and need no scenario. A row without a published value serves claims
(`zsim_lab.verdict.claims`), which compare several rows with a sentence of the paper.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zsim.scenario.tables import ScenarioError
from zsim.scenario.toml import apply
from zsim.units import format_bytes
from zsim_lab.rows.published import GIB
from zsim_lab.verdict.claims import Claim
from zsim_lab.verdict.verdict import Fact, UnjudgedRow, Verdict, VerdictRow

PIECE_BYTES = 2 << 30
"""Size of the pieces that GPU memory was split into before figure 6b was measured, so that larger
allocations failed (Rajbhandari et al. 2021, section 8.5: 2 GB)."""


class PaperError(ValueError):
    """Invalid file of figures; the message has the field and the problem."""


class FigureQuantity(StrEnum):
    """Compared quantity."""

    THROUGHPUT = "throughput"
    """10^12 model FLOPs per second and GPU."""
    BLOCK_THROUGHPUT = "block throughput"
    """10^12 FLOPs per second and GPU as counted by ZeRO-Infinity (section 4): 8 for each parameter
    of the blocks (12 for each layer and squared width) and token, including recomputation."""
    FORMULA_THROUGHPUT = "formula throughput"
    """10^12 FLOPs per second and GPU as counted by Narayanan et al. 2021 (equation 3): a step has
    96 B s l h^2 (1 + s / 6h + V / 16lh), including recomputation."""
    STEP_TIME = "step time"
    """Seconds of an optimizer step."""
    BACKWARD = "backward"
    """Seconds from the first to the last operation of backward, including reductions and copies."""
    STEP_TIME_RATIO = "step time ratio"
    """Step time with `otherwise` divided by the step time without."""
    LARGEST = "largest"
    """Parameters of the largest model that fits, searched by layers."""
    LARGEST_SHAPE = "largest shape"
    """Parameters of the largest model that fits, of the trained shapes in `among`."""
    WIDEST = "widest"
    """Largest hidden size that trains on memory split into pieces of `PIECE_BYTES`: no buffer is
    larger than a piece, and all fit. Sizes are 4,096 and its doubles."""
    STATES = "states"
    """Parameters of the largest model whose states alone fit."""
    PLANNED = "planned"
    """A number that `zsim plan --json` prints, or the sum of a table of them; `of` is its key."""
    RESERVED = "reserved"
    """Bytes of GPU memory that PyTorch has reserved at most ("max cache allocated")."""
    FORMULA = "formula"
    """Value of a formula of the paper, in the printed unit."""
    COPY = "copy"
    """10^9 bytes per second between host memory, or drives, and each of some GPUs."""
    KERNEL = "kernel"
    """Seconds of kernels on host threads."""
    DRIVES = "drives"
    """10^9 bytes per second of a read or write of drives."""

    @property
    def needs_scenario(self) -> bool:
        """True if rows are scenarios; False if they set keys of `host_figures`."""
        return self not in {
            FigureQuantity.FORMULA,
            FigureQuantity.COPY,
            FigureQuantity.KERNEL,
            FigureQuantity.DRIVES,
        }


THROUGHPUTS = (
    FigureQuantity.THROUGHPUT,
    FigureQuantity.BLOCK_THROUGHPUT,
    FigureQuantity.FORMULA_THROUGHPUT,
)
"""Quantities that determine a step time: the counted FLOPs are those of a step."""


class _FigureTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _FigureRow(_FigureTable):
    label: str
    published: Annotated[float, Field(gt=0)] | None = None
    values: tuple[bool | int | str, ...]
    fitted: bool = False
    decimals: Annotated[int, Field(ge=-9, le=9)] | None = None
    peak_gib: Annotated[float, Field(gt=0)] | None = None


class _RowSettings(_FigureTable):
    given: Annotated[tuple[str, ...], Field(alias="if", min_length=1)]
    settings: Annotated[tuple[str, ...], Field(alias="set", min_length=1)]


class _Figure(_FigureTable):
    name: str
    quantity: FigureQuantity
    source: str
    keys: tuple[str, ...]
    rows: Annotated[tuple[_FigureRow, ...], Field(min_length=1)]
    settings: Annotated[tuple[str, ...], Field(alias="set")] = ()
    when: tuple[_RowSettings, ...] = ()
    otherwise: tuple[str, ...] = ()
    among: tuple[tuple[int, int, int], ...] = ()
    ordered: bool = False
    table: str = ""
    of: str = ""
    instead: str = ""

    @model_validator(mode="after")
    def _need_of(self) -> "_Figure":
        if bool(self.of) != (self.quantity is FigureQuantity.PLANNED):
            raise ValueError(f"{self.name}: of is for quantity = planned, which needs it")
        return self


class _SecondAnswer(_FigureTable):
    name: str
    figure: str
    source: str
    settings: Annotated[tuple[str, ...], Field(alias="set", min_length=1)]


class _File(_FigureTable):
    publication: str
    pipelines: bool = False
    seed: str = ""
    claim: tuple[Claim, ...] = ()
    base: dict[str, Any] = {}
    figure: Annotated[tuple[_Figure, ...], Field(min_length=1)]
    again: tuple[_SecondAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRun:
    """A row of a figure.

    Attributes:
        alternatives: scenario tables in order; the first that fits is the run. For a figure without
            scenarios, the values of the row by key.
        published: the printed value; None for a row that only claims use.
        fitted: True if the row was used to fit a constant; it then does not judge predictions.
        decimals: printed decimals, if the digits of a formula must match exactly.
        peak_bytes: peak reserved memory of the published step, on the GPU with the largest peak;
            None if not published.
        of: key of the plan, for `FigureQuantity.PLANNED`.
    """

    label: str
    published: float | None
    alternatives: tuple[Mapping[str, object], ...]
    fitted: bool
    decimals: int | None = None
    peak_bytes: int | None = None
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A figure or a table of a paper.

    Attributes:
        ordered: True if the order of its rows was published.
        again: True if its rows are those of another figure with other settings; the table of
            published runs excludes them.
        table: table of published runs that has these rows and more; the table of judged runs has
            them from there. Empty if there is none.
        instead: figure with the same rows that counts among the claims of the paper; empty if this
            one does.
    """

    name: str
    quantity: FigureQuantity
    source: str
    runs: tuple[PaperRun, ...]
    ordered: bool
    again: bool = False
    table: str = ""
    instead: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """Content of a file.

    Attributes:
        pipelines: True if its rows are training runs on many nodes, which are judged separately.
        seed: short name of a paper that zsim carries out; empty for other publications.
        claims: sentences and trends of the paper.
    """

    publication: str
    figures: tuple[PaperFigure, ...]
    pipelines: bool = False
    seed: str = ""
    claims: tuple[Claim, ...] = ()


def parse(text: str) -> Paper:
    """Return the figures in the TOML `text`.

    Raises:
        PaperError: a key is missing, unknown or of the wrong kind.
    """
    try:
        file = _File.model_validate(tomllib.loads(text))
        figures = (
            *(_figure(each, file.base) for each in file.figure),
            *(_second(each, file) for each in file.again),
        )
        _need_known_figures(figures)
    except (tomllib.TOMLDecodeError, ScenarioError) as error:
        raise PaperError(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PaperError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return Paper(
        publication=file.publication,
        figures=figures,
        pipelines=file.pipelines,
        seed=file.seed,
        claims=file.claim,
    )


def _need_known_figures(figures: Sequence[PaperFigure]) -> None:
    """Raise PaperError unless the figures that count instead of others exist."""
    names = {each.name for each in figures}
    for each in figures:
        if each.instead and each.instead not in names:
            raise PaperError(f"{each.name}: instead: no figure is named {each.instead}")


def _figure(table: _Figure, base: Mapping[str, Any]) -> PaperFigure:
    runs: list[PaperRun] = []
    unused = list(table.when)
    for row in table.rows:
        if len(row.values) != len(table.keys):
            raise PaperError(f"{table.name}: {row.label}: {len(table.keys)} values are needed")
        if row.peak_gib is not None and table.quantity is not FigureQuantity.STEP_TIME:
            raise PaperError(f"{table.name}: {row.label}: peak_gib needs quantity = step time")
        given = dict(zip(table.keys, row.values, strict=True))
        own = [f"{key}={_toml(value)}" for key, value in given.items()]
        cases = [case for case in table.when if {*case.given} <= {*own}]
        unused = [case for case in unused if case not in cases]
        own += [setting for case in cases for setting in case.settings]
        title = f"title={table.name}: {row.label}"
        alternatives: list[Mapping[str, object]] = [given]
        if table.quantity.needs_scenario:
            asked = [(title, *table.settings, *own)]
            asked += [(*asked[0], *table.otherwise)] if table.otherwise else []
            asked = [(*asked[0], *_shape(each)) for each in table.among] or asked
            alternatives = [_tables(base, settings) for settings in asked]
        runs.append(
            PaperRun(
                label=row.label,
                published=row.published,
                alternatives=tuple(alternatives),
                fitted=row.fitted,
                decimals=row.decimals,
                peak_bytes=None if row.peak_gib is None else round(row.peak_gib * GIB),
                of=table.of,
            )
        )
    if unused:
        raise PaperError(f"{table.name}: when: no row has {' and '.join(unused[0].given)}")
    return PaperFigure(
        name=table.name,
        quantity=table.quantity,
        source=table.source,
        runs=tuple(runs),
        ordered=table.ordered,
        table=table.table,
        instead=table.instead,
    )


def _second(table: _SecondAnswer, file: _File) -> PaperFigure:
    """Return a figure of the file with additional settings."""
    for each in file.figure:
        if each.name == table.figure:
            more = {
                "name": table.name,
                "source": table.source,
                "settings": (*each.settings, *table.settings),
            }
            return replace(_figure(each.model_copy(update=more), file.base), again=True)
    raise PaperError(f"again: {table.name}: no figure is named {table.figure}")


def _shape(shape: tuple[int, int, int]) -> Iterator[str]:
    """Yield the settings of layers, width and heads."""
    for key, value in zip(("layers", "hidden_size", "attention_heads"), shape, strict=True):
        yield f"model.{key}={value}"


def _toml(value: bool | int | str) -> str:  # noqa: FBT001  (a value of a file)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(base: Mapping[str, Any], settings: Sequence[str]) -> Mapping[str, object]:
    tables: dict[str, Any] = deepcopy(dict(base))
    for setting in settings:
        apply(tables, setting)
    return tables


def verdict(figure: PaperFigure, answers: Sequence[tuple[float, int] | str]) -> Verdict:
    """Compare `figure` with values and ways, or with lines that say why there is no value."""
    found: list[VerdictRow] = []
    unjudged: list[UnjudgedRow] = []
    left: list[tuple[int | str, str]] = []
    for run, answer in zip(figure.runs, answers, strict=True):
        if isinstance(answer, str):
            left.append((run.label, answer))
            continue
        value, alternative = answer
        if run.published is None:
            unjudged.append(UnjudgedRow(name=run.label, predicted=value))
            continue
        found.append(
            VerdictRow(
                place=run.label,
                name=run.label,
                published=run.published,
                predicted=value,
                is_kept=not run.fitted,
                source=run,
                alternative=alternative,
            )
        )
    return Verdict(
        name=figure.name,
        quantity=figure.quantity,
        rows=tuple(found),
        shown=partial(shown, quantity=figure.quantity),
        unmodelled=tuple(left),
        unjudged=tuple(unjudged),
        facts=(
            Fact(name="source", value=figure.source),
            *([_order(found)] if figure.ordered else []),
        ),
    )


def _order(found: Sequence[VerdictRow]) -> Fact:
    """Return the order of the predictions, and whether it is the published one."""
    order = [row.name for row in sorted(found, key=lambda row: row.predicted)]
    is_published = order == [row.name for row in sorted(found, key=lambda row: row.published)]
    said = "as published" if is_published else "not as published"
    line = f"from the smallest: {' < '.join(order)}, {said}"
    return Fact(name="order", value={"labels": order, "as_published": is_published}, lines=(line,))


def shown(value: float, quantity: FigureQuantity) -> str:
    """Return `value` in the unit of `quantity`."""
    match quantity:
        case _ if quantity in THROUGHPUTS:
            return f"{value:.1f} TFLOP/s"
        case FigureQuantity.FORMULA:
            return f"{value:g}"
        case FigureQuantity.STEP_TIME_RATIO:
            return f"{value:.3g} times"
        case FigureQuantity.COPY | FigureQuantity.DRIVES:
            return f"{value:.3g} GB/s"
        case FigureQuantity.KERNEL | FigureQuantity.BACKWARD | FigureQuantity.STEP_TIME:
            return f"{value:.3g} s"
        case FigureQuantity.PLANNED:
            return f"{value:,.0f}"
        case FigureQuantity.RESERVED:
            return format_bytes(round(value))
        case _:
            return f"{value / 1e9:.4g} billion"
