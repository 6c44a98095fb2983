"""Write a job as JSON and read it back without loss.

    {"zsim": "job", "version": 1, "schedule": {...}, "model": {...}, "cluster": {...}, "steps": 1}

Keys are the fields of the values in `zsim.schedule.schedule`, `zsim.schedule.operation`,
`zsim.model.model` and `zsim.cluster.cluster`. The key `type` names the class of an operation, and
of every value whose field allows several classes. Fields that are empty by default are omitted if
they are empty. A schedule without a model and a cluster can be read and checked, but not run.
`faults` and `neighbours` (`zsim.cluster.fault`) and `decision` (`zsim.network.link_load`) apply to
the run.

A trace may be part of a file of PyTorch's profiler (`zsim.trace.kineto`), under a separate key.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from zsim.backend.backend import Job
from zsim.bounded_text import repeated
from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, Neighbour
from zsim.memory.host_setup import HostSetup
from zsim.model.model import Model
from zsim.network.link_load import Decision
from zsim.schedule.binding import AnyBinding, Balanced, BindingError
from zsim.schedule.json import FieldError, decode_value, encode_value
from zsim.schedule.schedule import Schedule
from zsim.trace.kineto import KEYS
from zsim.trace.trace import Trace

if TYPE_CHECKING:
    from zsim.schedule.bind import BoundSchedule

VERSION = 1
"""Version of the format, raised when documents of the last version would be misread."""


class DocumentError(ValueError):
    """The text is not a valid document; the message has the path, the value, the allowed values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A schedule with its model, cluster and circumstances, if known.

    Attributes:
        faults: hardware of the cluster that is slow or dead.
        neighbours: other jobs on the cluster.
        decision: requested algorithm of collectives, or None.
        binding: numbers of the schedule's named counts; None for balanced ones.
    """

    schedule: Schedule
    model: Model | None = None
    cluster: Cluster | None = None
    steps: int = 1
    setup: HostSetup = HostSetup.SHARDED
    faults: tuple[Fault, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    decision: Decision | None = None
    binding: AnyBinding | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DocumentError(f"steps: {self.steps} must be at least 1")

    @classmethod
    def of(cls, job: Job) -> "Document":
        """Return the document of a job, without faults, neighbours or a decision."""
        return cls(
            schedule=job.written,
            model=job.model,
            cluster=job.cluster,
            steps=job.steps,
            setup=job.setup,
            binding=job.binding,
        )

    def job(self) -> Job:
        """Return the job of the document, without its faults, neighbours and decision.

        Raises:
            DocumentError: the document has no model, or no cluster; or its binding does not fit.
        """
        if self.model is None or self.cluster is None:
            missing = "model" if self.model is None else "cluster"
            raise DocumentError(f"{missing}: missing; a run needs it, a check does not")
        job = Job(
            schedule=self.schedule,
            model=self.model,
            cluster=self.cluster,
            steps=self.steps,
            setup=self.setup,
        )
        if not self.schedule.counts:
            if self.binding is not None:
                raise DocumentError("binding: the schedule has no counts; remove it")
            return job
        binding, found = self.bound()
        return replace(
            job,
            schedule=found.schedule,
            named=self.schedule,
            binding=binding,
            excess=found.excess,
        )

    def bound(self) -> "tuple[AnyBinding, BoundSchedule]":
        """Return the binding of a schedule with counts, balanced by default, and its numbers.

        Raises:
            DocumentError: the binding does not fit.
        """
        from zsim.schedule.bind import bound

        binding = self.binding or Balanced()
        try:
            return binding, bound(self.schedule, binding)
        except BindingError as error:
            raise DocumentError(str(error)) from None


def encode(document: Document) -> str:
    """Return `document` as JSON text, with each short value on one line."""
    return _text("job", cast("dict[str, object]", encode_value(document, Document)))


def encode_trace(trace: Trace, profile: Mapping[str, object] | None = None) -> str:
    """Return `trace` as JSON text.

    With `profile`, the keys that `zsim.trace.kineto` makes of the trace, PyTorch's profiler tools
    can read the text.
    """
    return _text("trace", {**(profile or {}), "trace": encode_value(trace, Trace)})


def decode(text: str) -> Document:
    """Return the document that `encode` wrote.

    Raises:
        DocumentError: `text` is not a document.
    """
    return cast("Document", _decode(text, "job", Document))


def decode_trace(text: str) -> Trace:
    """Return the trace that `encode_trace` wrote.

    Raises:
        DocumentError: `text` is not a trace.
    """
    return cast("_TraceDocument", _decode(text, "trace", _TraceDocument, beside=KEYS)).trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceDocument:
    trace: Trace


EARLIER_NAMES = {"trust": "error_text"}
"""Fields of a trace that were renamed: former name to present name."""

LINE_LENGTH = 100


def _text(kind: str, fields: dict[str, object]) -> str:
    return _laid_out({"zsim": kind, "version": VERSION, **fields}, "") + "\n"


_plain = json.JSONEncoder(allow_nan=False).encode
"""Encoder for values on one line; `json.dumps` with options would make an encoder for each call."""


def _laid_out(value: object, indent: str) -> str:
    """Return JSON with one line for each value that fits, so that files can be compared by line."""
    deeper = indent + " "
    if isinstance(value, list):
        items = [_laid_out(item, deeper) for item in cast("list[object]", value)]
        opening, closing = "[", "]"
    elif isinstance(value, dict):
        named = cast("dict[str, object]", value).items()
        items = [f"{_plain(key)}: {_laid_out(item, deeper)}" for key, item in named]
        opening, closing = "{", "}"
    else:
        return _plain(value)
    line = f"{opening}{', '.join(items)}{closing}"
    if len(indent) + len(line) <= LINE_LENGTH and "\n" not in line:
        return line
    body = ",\n".join([deeper + item for item in items])
    return f"{opening}\n{body}\n{indent}{closing}"


def _decode(text: str, kind: str, hint: type, *, beside: Iterable[str] = ()) -> object:
    data = _load(text)
    if not isinstance(data, dict):
        raise DocumentError(f'must be an object with "zsim": "{kind}"')
    fields = cast("dict[str, object]", data)
    for key, expected in (("zsim", kind), ("version", VERSION)):
        if key not in fields:
            raise DocumentError(f"{key}: missing; must be {json.dumps(expected)}")
        value = fields.pop(key)
        if type(value) is not type(expected) or value != expected:
            raise DocumentError(f"{key}: {json.dumps(value)[:60]} must be {json.dumps(expected)}")
    for key in beside:
        fields.pop(key, None)
    if isinstance(trace := fields.get("trace"), dict):
        _renamed(cast("dict[str, object]", trace))
    try:
        return decode_value(fields, hint)
    except FieldError as error:
        raise DocumentError(_printable(str(error))) from None
    except RecursionError:
        raise DocumentError("nested too deeply") from None


def _renamed(trace: dict[str, object]) -> None:
    """Rename fields of a trace that an earlier version wrote, in place."""
    for before, now in EARLIER_NAMES.items():
        if before in trace and now not in trace:
            trace[now] = trace.pop(before)


def _printable(text: str) -> str:
    """Return `text` with control characters escaped: names in a document may contain any."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _load(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise DocumentError("not JSON: nested too deeply") from None
    except DocumentError:
        raise
    except ValueError:
        raise DocumentError("not JSON: a number has too many digits") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = json.dumps(repeated(name for name, _ in pairs))[:60]
        raise DocumentError(f"key {key} is repeated in one object")
    return found
