"""Tables of published training runs: each row as a scenario with its published figures.

A file of `apps/zsim_lab/runs` describes the tables of one publication: their columns, values
that the publication or its scripts state (`[stated]`, with the source), words of cells (`[words]`)
and the scenario of a row. A string that starts with "= " is an expression
(`zsim_lab.rows.expression`) on columns, stated values and the names of `[let]`; if its value is
`none`, the key is omitted. A table has:

- `files`, `publication`: names of the CSV files without suffix, and of the publication.
- `judges`: files whose rows are never used in a fit. With `fits_kernels = true`, `zsim calibrate`
  fits the speed of kernels in training to the others; a list names the fitted profiles.
  `reserved = false`: peaks are of allocated memory; `of_last_rank = true`: of the last rank.
- `columns`: names and kinds of cells, "whole" or "whole: title of the column".
- `unmodelled`: conditions under which a row is not modelled, and why.
- `scenario`, `way`: the tables of the scenario, and changes of which the first that fits ran.
- `trainer_file`: its `key` of `[zero]`, and the `options` of the file, which the reader of that key
  completes the scenario from, as of a user's file.
- `once`: names whose values must differ between rows; a row that repeats them is not predicted.
- `run`: fields of `Published`; `peak_gib` and `library_mib` are sizes in other units.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from pydantic import Field, create_model

from zsim.files.installed import model_catalogue
from zsim.mistake import MistakeError
from zsim.runtimes.lookup import reader_of
from zsim.runtimes.trainer_files.tables import GivenTables, TrainerFileError
from zsim.scenario.trainer_files import TABLES as COMPLETED
from zsim_lab.rows.csv_rows import (
    Cells,
    CsvRow,
    MaybePositive,
    MaybeWhole,
    NotModelledError,
    Positive,
    Whole,
    WholeOrOne,
    parsed,
    word,
)
from zsim_lab.rows.expression import evaluated
from zsim_lab.rows.hardware import gpu_in, memory_gb_in
from zsim_lab.rows.published import GIB, MIB, Published

KINDS: Mapping[str, tuple[Any, Any]] = {
    "text": (str, ...),
    "flag": (bool, ...),
    "whole": (Whole, ...),
    "integer": (int, ...),
    "maybe whole": (MaybeWhole, ...),
    "whole or one": (WholeOrOne, ...),
    "positive": (Positive, ...),
    "maybe positive": (MaybePositive, ...),
}
"""Types of cells, by the name of their kind."""

NEAR_GB = 6
"""Maximum difference in GB between a GPU's memory and its name, which may omit driver memory."""


@dataclass(frozen=True, slots=True)
class RunTable:
    """A file, by its name without suffix, and the description of its rows."""

    file: str
    form: Mapping[str, Any]

    @property
    def publication(self) -> str:
        """Short name of the publication of the rows."""
        return str(self.form["publication"])

    @property
    def judges(self) -> bool:
        """True if no constant is fitted to any row."""
        return self.file in self.form.get("judges", ())

    @property
    def fits_kernels(self) -> bool:
        """True if constants of kernels in training are fitted to the rows that do not judge."""
        return bool(self.form.get("fits_kernels", False))

    def fits(self, profile: str) -> bool:
        """Return True if constants of a profile are fitted to rows of this table."""
        fitted = self.form.get("fits_kernels", False)
        return profile in fitted if isinstance(fitted, list) else bool(fitted)

    def read(self, rows: Iterable[Cells]) -> list[Published]:
        """Return every row of the file; an unmodelled row has a reason.

        Raises:
            MeasuredError: a column is missing.
        """
        model = row_model(self.form["columns"])
        found: list[Published] = []
        seen: dict[tuple[object, ...], int] = {}
        for line, cells in enumerate(rows, start=2):
            try:
                scope = RowScope(self.form, parsed(self.file, model, cells).model_dump())
                run = self._run(line, scope)
                self._need_new(line, scope, seen)
                found.append(run)
            except NotModelledError as error:
                found.append(self._unmodelled(line, cells, error))
        return found

    def _need_new(self, line: int, scope: "RowScope", seen: dict[tuple[object, ...], int]) -> None:
        """Raise NotModelledError if an earlier row has the same settings of `once`."""
        if names := self.form.get("once"):
            first = seen.setdefault(tuple(scope[name] for name in names), line)
            if first != line:
                raise NotModelledError(f"the settings of line {first} again")

    def _run(self, line: int, scope: "RowScope") -> Published:
        scope.need_modelled()
        run = scope.filled(self.form["run"])
        peak_gib, library_mib = run.pop("peak_gib", None), run.pop("library_mib", 0)
        failed = run.get("failed", False)
        first, *fallbacks = _alternatives(scope, self.form)
        if failed:
            run["step_time_s"] = peak_gib = None
        return Published(
            file=self.file,
            line=line,
            scenario=first,
            fallbacks=tuple(fallbacks),
            peak_bytes=None if peak_gib is None else round(peak_gib * GIB),
            reserved=self.form.get("reserved", True),
            of_last_rank=self.form.get("of_last_rank", False),
            library_bytes=round(library_mib * MIB),
            source=scope["source"],
            **run,
        )

    def _unmodelled(self, line: int, cells: Cells, error: NotModelledError) -> Published:
        return Published(
            file=self.file,
            line=line,
            hardware="",
            model="",
            sequence_length=0,
            scenario={},
            source=cells.get("source", ""),
            reason=str(error),
        )


class RowScope(dict[str, Any]):
    """Values by name for expressions: cells, stated values, functions and names of `[let]`."""

    def __init__(self, form: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
        stated = {name: value for name, (value, _) in form.get("stated", {}).items()}
        super().__init__({**FUNCTIONS, **stated, **cells, "true": True, "false": False})
        self["none"] = None
        self["word"] = self._word
        self["system"] = self._system
        self["day"] = self._day
        self._form = form

    def __missing__(self, name: str) -> object:
        """Return the value of a name of `[let]`, which is computed once."""
        text = self._form.get("let", {}).get(name)
        if text is None:
            raise KeyError(name)
        self[name] = self.value(text)
        return self[name]

    def need_modelled(self) -> None:
        """Raise NotModelledError if a condition of `unmodelled` holds.

        Raises:
            NotModelledError: it does.
        """
        for each in self._form.get("unmodelled", ()):
            if self.value(each["if"]):
                raise NotModelledError(each["why"].format_map(self))

    def value(self, given: object) -> object:
        """Return `given`, or its value if it is an expression."""
        if isinstance(given, str) and given.startswith("= "):
            return evaluated(given.removeprefix("= "), self)
        return given

    def filled(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return `table` with the values of its expressions; omit keys whose value is none."""
        found: dict[str, Any] = {}
        for key, given in table.items():
            value = self.filled(given) if isinstance(given, dict) else self.value(given)
            if value is not None and value != {}:
                found[key] = value
        return found

    def _word(self, column: str, text: str | None = None) -> object:
        """Return the value of the word in `column`, or of `text` instead."""
        known: Mapping[str, object] = self._form["words"][column]
        return word(column, self[column] if text is None else text, known)

    def _system(self, text: str) -> Mapping[str, Any]:
        """Return the first of `[[system]]` with the GPU in `text`, and with its memory if given."""
        gpu, memory_gb = gpu_in(text), memory_gb_in(text)
        known = self._form["system"]
        for each in known:
            is_near = memory_gb is None or abs(memory_gb - each["memory_gb"]) <= NEAR_GB
            if each["gpu"] == gpu and is_near:
                return cast("Mapping[str, Any]", each)
        names = ", ".join(f"{each['gpu']} {each['memory_gb']} GB" for each in known)
        raise NotModelledError(f"gpu {text!r} is not one of {names}")

    def _day(self, text: str) -> str:
        """Return the ISO date of the publication of `text`, from `[dates]`.

        A page has the month in its name; a commit is listed by its first digits.
        """
        dates = self._form["dates"]
        page = re.search(dates["page"], text)
        if page is not None:
            return f"{page.group(1)}-{page.group(2)}-01"
        commit = text.rpartition("@")[2]
        for day, commits in dates["commits"].items():
            if any(commit.startswith(each) for each in commits.split()):
                return str(day)
        return str(dates["otherwise"])


def _first_word(text: str) -> str:
    return (text.lower().split() or [""])[0].strip("(),")


def _found(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if found is None:
        raise NotModelledError(f"{text}: no {pattern}")
    return found


def _number(pattern: str, text: str) -> int:
    return int(_found(pattern, text).group(1))


def _whole(value: str | float) -> int:
    try:
        return int(value)
    except ValueError:
        raise NotModelledError(f"{value!r} is not a whole number") from None


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "before": lambda mark, text: text.partition(mark)[0],
    "begins": str.startswith,
    "decimal": lambda text: float(_found(r"[0-9.]+", text).group()),
    "first_word": _first_word,
    "gpu_in": gpu_in,
    "has": lambda pattern, text: re.search(pattern, text) is not None,
    "least": min,
    "multiple": _multiple,
    "number": _number,
    "words_of": str.format,
    "whole": _whole,
}
"""Functions of expressions, in addition to `word`, `system` and `day`."""


def row_model(columns: Mapping[str, str]) -> type[CsvRow]:
    """Return the class of rows with `columns`."""
    described: dict[str, Any] = {}
    for name, text in columns.items():
        kind, _, title = text.partition(": ")
        cell, default = KINDS[kind]
        described[name] = (cell, Field(default, alias=title or name))
    return create_model("PublishedRow", __base__=CsvRow, **described)


def _alternatives(scope: RowScope, form: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the scenarios of a row: with each change of `way` whose condition holds."""
    base = _completed(scope.filled(form["scenario"]), scope.filled(form.get("trainer_file", {})))
    changes = [scope.filled(each["set"]) for each in form.get("way", ()) if scope.value(each["if"])]
    return [_merged(base, change) for change in changes or [{}]]


def _completed(tables: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario completed from the options of a trainer's file, if they are given.

    Raises:
        MistakeError: the reader of the file needs a package that is not installed.
        NotModelledError: the reader of the file refuses an option.
    """
    if not given:
        return tables
    try:
        reader = reader_of(given["key"])
    except ModuleNotFoundError as error:
        hint = ": pip install 'zsim[yaml]'" if error.name == "yaml" else ""
        needs = f"needs {error.name}, which is not installed{hint}"
        raise MistakeError(f"--data: {given['key']}: {needs}") from None
    try:
        found = reader(
            GivenTables(
                tables={name: tables.get(name, {}) for name in COMPLETED},
                shape_of=lambda name: (
                    model_catalogue().find(name)[1].shape.model_dump(exclude_unset=True)
                ),
            ),
            json.dumps(given["options"]),
        )
    except TrainerFileError as error:
        raise NotModelledError(str(error)) from None
    return {**tables, **{name: table for name, table in found.tables.items() if table}}


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `change`, merged table by table."""
    found = dict(base)
    for key, value in change.items():
        found[key] = _merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def forms_in(folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each table that a TOML file in `folder` of this package describes."""
    paths = sorted((files("zsim_lab") / folder).iterdir(), key=lambda path: path.name)
    for path in paths:
        if path.name.endswith(".toml"):
            form = tomllib.loads(path.read_text("utf-8"))
            for name in form["files"]:
                yield name, form


TABLES: dict[str, RunTable] = {name: RunTable(name, form) for name, form in forms_in("runs")}
"""All tables of published runs, by the name of their file."""
