"""`zsim.largest`: the largest model that fits, and the reason why the next one does not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import log2
from os import PathLike

from zsim.analysis.memory_footprint import Footprint, depends_on_time, states_alone
from zsim.analysis.out_of_memory import alive_text, shortage_object
from zsim.analysis.simulated_footprint import footprint_of
from zsim.analysis.tier_fit import tier_objects
from zsim.api.answer import AnswerInFacts, Progress, ignore_progress
from zsim.api.error_text import probability_text
from zsim.api.scenario import Changed, LoadedScenario, load
from zsim.backend.backend import Job
from zsim.files.source import resolved
from zsim.mistake import MistakeError
from zsim.model.pipeline_stages import layer_counts
from zsim.prediction.error_rule import SURE, ErrorInterval, shipped_rules
from zsim.prediction.predicted_error import peak_error
from zsim.scenario.tables import Scenario
from zsim.schedule.describe_operation import moment
from zsim.units import format_bytes, format_count
from zsim_plan.answer.largest_model import Largest, Tried
from zsim_plan.answer.largest_model import largest as search_for

MOST_LAYERS = 1000
"""Maximum number of layers to try; the schedule of a deeper model takes too long to write."""

MOST_SIMULATED_LAYERS, SIMULATED_DIGITS = 300, 2
"""The same for memory that depends on time and is simulated, and significant digits of layers."""

MOST_PARAMETERS = 10**15

DIGITS = 4
"""Significant digits to which parameters are searched; the paper prints at most four."""

UNITS = 32
"""Number of equal units of a model that has only a number of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LargestResult(AnswerInFacts):
    """The largest model of a scenario that fits.

    Attributes:
        title: title of the scenario, with the changes made to it.
        by: searched quantity: "layers", or "parameters" if the model has only a number of them.
        found: the largest size that is predicted to fit, and the next size, which does not.
        sure: the largest size that surely fits; None if not even the smallest does.
        error: text of the error of the predicted memory peak.
        peak_interval: bounds of the peak as factors of the prediction; None if unknown.
        states: for "parameters", the largest size by model states alone, without any buffer.
    """

    title: str
    by: str
    found: Largest
    sure: Tried | None
    error: str
    peak_interval: ErrorInterval | None = None
    states: Largest | None = None

    @property
    def fits(self) -> bool:
        """True if any size is predicted to fit."""
        return self.found.fits is not None

    @property
    def largest(self) -> Tried | None:
        """The largest size that surely fits, else the largest that may fit; None if none fits."""
        return self.found.fits if self.sure is None else self.sure

    @property
    def unsure(self) -> Tried | None:
        """A larger size that is predicted to fit, but may not; None if there is none."""
        return None if self.largest is self.found.fits else self.found.fits

    @property
    def parameters(self) -> int | None:
        """Parameters of the largest model that fits; None if not even the smallest does."""
        return None if self.largest is None else self.largest.parameters

    @property
    def layers(self) -> int | None:
        """Layers of the largest model that fits; None if none fits, or by parameters."""
        fits = self.largest
        return fits.size if fits is not None and self.by == "layers" else None

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Bytes of device memory that the largest model reserves."""
        return None if self.largest is None else self.largest.footprint.reserved_bytes

    @property
    def usable_memory_bytes(self) -> int | None:
        """Bytes of a GPU that a rank may reserve."""
        return None if self.largest is None else self.largest.footprint.usable_bytes

    def __repr__(self) -> str:
        return (
            f"LargestResult(title={self.title!r}, parameters={self.parameters}, "
            f"layers={self.layers}, peak_reserved_bytes={self.peak_reserved_bytes})"
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the lines that `zsim largest` prints."""
        error = ("error", self.error)
        if self.states is None:
            return [*self._sure_lines("largest"), error]
        of_states = _found_lines("by model states alone", self.by, self.states)
        return [*of_states, *self._sure_lines("with all buffers"), error]

    def _sure_lines(self, what: str) -> list[tuple[str, str]]:
        """Return the lines about the size that surely fits, a larger one, and the next one."""
        found, *following = _found_lines(what, self.by, self.found)
        if self.found.fits is None or _is_sure(self.found.fits):
            return [found, *following]
        edge = found[1]
        risk = f"may not fit: probability {probability_text(_probability(self.found.fits))}"
        if self.sure is None:
            return [(what, f"{risk}, and no size reaches {SURE:.0%}; {edge}"), *following]
        return [(what, _fit_text(self.by, self.sure)), ("larger", f"{edge}; {risk}"), *following]

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim largest --json` prints."""
        sure = self._sure_object()
        found: dict[str, object] = {"title": self.title, "by": self.by}
        found |= sure if self.states is None else _largest_object(self.by, self.states)
        if self.states is not None:
            found["with_buffers"] = sure
        interval = self.peak_interval
        return found | {
            "peak_memory_error": None if interval is None else interval.half_width,
            "error": self.error,
        }

    def _sure_object(self) -> dict[str, object]:
        """Return the size that surely fits, a larger one that may not, and the next one."""
        found = _largest_object(self.by, replace(self.found, fits=self.largest))
        unsure = None if self.unsure is None else _fit_object(self.by, self.unsure)
        if self.largest is not None:
            found["fit_probability"] = _probability(self.largest)
        return {**found, "unsure": unsure}


def largest(
    scenario: LoadedScenario | str | PathLike[str] | Mapping[str, object],
    changes: Changed = None,
    *,
    progress: Progress | None = None,
) -> LargestResult:
    """Find the largest model with which a scenario fits its GPUs.

    Args:
        scenario: scenario as in `load`; the search changes its layers or its parameters.
        changes: values by key, as in `load`.
        progress: callback that receives the work done and the total work.

    Raises:
        MistakeError: it is not a scenario, or it is invalid.
    """
    loaded, progress = load(scenario, changes), progress or ignore_progress
    if loaded.checked is None:
        raise MistakeError(f"{loaded.name}: a schedule; the largest model is that of a scenario")
    tables = loaded.checked
    jobs = _Jobs(name=loaded.name, scenario=tables, ranks=loaded.changes.ranks)
    job = jobs.of({})
    error = peak_error(job)
    result = partial(
        LargestResult, title=loaded.title, error=error.text, peak_interval=error.interval
    )
    if tables.model.parameters is None:
        strategy = job.schedule.contract.strategy
        assert strategy is not None
        assert job.model.architecture is not None  # it has more than a parameter count
        simulated = depends_on_time(job.schedule)
        layers = job.model.architecture.layers
        most = MOST_SIMULATED_LAYERS if simulated else MOST_LAYERS
        turns = _LayerCounts(layer_counts(job.model, layers, strategy, most=most))
        search = _Search(
            smallest=turns.first,
            most=turns.last,
            digits=SIMULATED_DIGITS if simulated else None,
            progress=progress,
        )
        found = search.surely(
            lambda turn: _tried(turn, jobs.of({"layers": turns.layers(turn)}), footprint_of),
            start=turns.nearest(layers),
        )
        return result(by="layers", found=turns.named(found.largest), sure=turns.size(found.sure))
    smallest = UNITS * tables.parallel.tensor
    start = max(smallest, tables.model.parameters)

    search = _Search(smallest=smallest, most=MOST_PARAMETERS, digits=DIGITS, progress=progress)

    def by(footprint: Callable[[Job], Footprint]) -> Callable[[int], Tried]:
        return lambda size: _tried(size, jobs.of({"parameters": size}), footprint)

    found, states = (
        search.surely(by(footprint_of), start=start),
        search.of(by(states_alone), start=start),
    )
    return result(by="parameters", found=found.largest, sure=found.sure, states=states)


@dataclass(frozen=True, slots=True)
class _CertainSize:
    """The largest size that is predicted to fit, and the largest that surely fits."""

    largest: Largest
    sure: Tried | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Bounds of a search, and its progress in halvings of the interval."""

    smallest: int
    most: int
    digits: int | None
    progress: Progress

    def surely(self, tried: Callable[[int], Tried], *, start: int) -> _CertainSize:
        """Search from `start`; if the result may not fit, search below it for a sure size."""
        known = cache(tried)
        found = self.of(known, start=start)
        edge = found.fits
        if edge is None or _is_sure(edge):
            return _CertainSize(found, edge)
        sure = search_for(
            known,
            start=max(self.smallest, int(edge.size * shipped_rules().fit.room(SURE))),
            smallest=self.smallest,
            most=edge.size,
            digits=self.digits,
            room=shipped_rules().fit.room(SURE),
        )
        return _CertainSize(found, sure.fits)

    def of(self, tried: Callable[[int], Tried], *, start: int) -> Largest:
        """Search from `start`."""
        low, high = self.smallest - 1, self.most + 1
        every = log2(high - low)

        def told(size: int) -> Tried:
            nonlocal low, high
            found = tried(size)
            low, high = (size, high) if found.footprint.fits else (low, size)
            step = 1 if self.digits is None else max(1, 10 ** (len(str(low)) - self.digits))
            self.progress(every - log2(max((high - low) / step, 1)), every)
            return found

        return search_for(
            told, start=start, smallest=self.smallest, most=self.most, digits=self.digits
        )


@dataclass(frozen=True, slots=True)
class _LayerCounts:
    """Possible numbers of layers, each with an index; indices are consecutive.

    If every number of layers is possible, the index equals the number.
    """

    counts: range

    @property
    def first(self) -> int:
        """Index of the smallest number of layers."""
        return max(1, self.counts.start // self.counts.step)

    @property
    def last(self) -> int:
        """Index of the largest number of layers."""
        return self.first + len(self.counts) - 1

    def layers(self, turn: int) -> int:
        """Return the number of layers at index `turn`."""
        return self.counts[turn - self.first]

    def nearest(self, layers: int) -> int:
        """Return the index of `layers`, or of the next smaller possible number."""
        return min(
            max(self.first + (layers - self.counts.start) // self.counts.step, self.first),
            self.last,
        )

    def named(self, found: Largest) -> Largest:
        """Return the result with numbers of layers in place of indices."""
        return Largest(fits=self.size(found.fits), refused=self.size(found.refused))

    def size(self, found: Tried | None) -> Tried | None:
        """Return a size with its number of layers in place of its index."""
        return None if found is None else replace(found, size=self.layers(found.size))


def _tried(size: int, job: Job, by: Callable[[Job], Footprint]) -> Tried:
    return Tried(size=size, parameters=job.model.parameter_count, footprint=by(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
    """The jobs of a scenario with models of different sizes."""

    name: str
    scenario: Scenario
    ranks: int | None

    def of(self, size: dict[str, int]) -> Job:
        """Return the job of the scenario with `size` replacing keys of `[model]`."""
        model = self.scenario.model.model_copy(update=size)
        scenario = self.scenario.model_copy(update={"model": model})
        return resolved(self.name, scenario, ranks=self.ranks, quiet=bool(size)).job()


def _largest_object(by: str, found: Largest) -> dict[str, object]:
    refused = found.refused
    following = None if refused is None else {**_size_object(by, refused)}
    if refused is not None and refused.footprint.shortage is not None and following is not None:
        following["out_of_memory"] = shortage_object(refused.footprint.shortage)
    if following is not None and refused is not None and refused.footprint.tiers:
        following["tiers"] = tier_objects(refused.footprint.tiers)
    if found.fits is None:
        return {by: None, "parameters": None, "next": following}
    return {**_size_object(by, found.fits), "next": following}


def _size_object(by: str, tried: Tried) -> dict[str, object]:
    taken = tried.footprint
    short = taken.shortage is not None and taken.reserved_bytes < taken.shortage.needed_bytes
    return {
        by: tried.size,
        "parameters": tried.parameters,
        "peak_allocated_bytes": taken.allocated_bytes,
        "needed_bytes": taken.needed_bytes,
        "peak_reserved_bytes": None if short else taken.reserved_bytes,
        "usable_memory_bytes": taken.usable_bytes,
    }


def _found_lines(what: str, by: str, found: Largest) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    fits, refused = found.fits, found.refused
    if fits is None:
        lines.append((what, "none: not even the smallest fits"))
    else:
        lines.append((what, _fit_text(by, fits)))
    if refused is None:
        lines.append(("the next size", "was not tried: no larger one can be asked for"))
    elif refused.footprint.shortage is not None:
        shortage = refused.footprint.shortage
        needed = f"needs {format_bytes(shortage.needed_bytes)}"
        when = f" at {moment(shortage.operation)}" if shortage.operation else ""
        lines.append(("the next size", f"{_size(by, refused)}: {needed}{when}"))
        lines.append(("allocated then", alive_text(shortage)))
    elif (short := refused.footprint.tier_short) is not None:
        lines.append(("the next size", f"{_size(by, refused)}: {short.name}: {short.text()}"))
    return lines


def _fit_text(by: str, tried: Tried) -> str:
    taken = tried.footprint
    needed, reserved = map(format_bytes, (taken.needed_bytes, taken.reserved_bytes))
    memory = f"{needed} needed, {reserved} reserved of {format_bytes(taken.usable_bytes)}"
    return f"{_size(by, tried)}: {memory}"


def _fit_object(by: str, tried: Tried) -> dict[str, object]:
    return {**_size_object(by, tried), "fit_probability": _probability(tried)}


def _probability(tried: Tried) -> float:
    """Return the probability that a size fits that is predicted to fit."""
    taken = tried.footprint
    if not taken.usable_bytes:
        return 1.0
    return shipped_rules().fit.probability(taken.taken_bytes, taken.usable_bytes)


def _is_sure(tried: Tried) -> bool:
    return _probability(tried) >= SURE


def _size(by: str, tried: Tried) -> str:
    if by == "parameters":
        return f"{tried.parameters:,} parameters"
    return f"{tried.size:,} layers, {format_count(tried.parameters)} parameters"
