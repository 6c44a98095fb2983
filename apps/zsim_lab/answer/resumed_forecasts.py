"""Forecasts that a file keeps, so that a run that ends early can go on."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from zsim.api.answer import Progress
from zsim.api.forecast import (
    Asked,
    collect_garbage,
    first_that_fits,
    simulated_micro_batches,
)
from zsim.api.run_forecast import RunForecast
from zsim_lab.answer import kept_results

Made = RunForecast | str
"""A forecast, or the reason why there is none."""


def resumed(
    asked: Sequence[Asked],
    path: Path,
    progress: Progress,
    *,
    most: int | None = None,
) -> list[Made | None]:
    """Return forecasts of runs as `zsim.api.forecast.forecasts` does, and keep them in `path`.

    Runs with forecasts in the file are skipped; an incomplete line is ignored. The cheapest
    runs are predicted first, equal runs once. After `most` runs no further one starts, and the
    result of those that are left is None, as for a run without scenarios. The file does not know
    with which constants and code it was made: start a new one after a change.

    Raises:
        MistakeError: the file cannot be read.
        UnwrittenError: the file cannot be written.
    """
    found = kept(path)
    keys = [key_of(each) if each[0] else "" for each in asked]
    missing = {key: each for key, each in zip(keys, asked, strict=True) if key and key not in found}
    todo = sorted(missing.items(), key=lambda item: _cost(item[1]))[:most]
    total = len(set(filter(None, keys)))
    for key, made in _made(todo):
        found[key] = made
        kept_results.keep(path, key, made if isinstance(made, str) else asdict(made))
        progress(sum(each in found for each in {*keys}), total)
    return [found.get(key) for key in keys]


def key_of(asked: Asked) -> str:
    """Return a key of a run and of the quantity to predict."""
    alternatives, quantity = asked
    return kept_results.key_of(list(alternatives), quantity)


def kept(path: Path) -> dict[str, Made]:
    """Return the forecasts in a file by their keys; none if there is no file."""
    found: dict[str, Made] = {}
    for key, made in kept_results.kept_results(path):
        if isinstance(made, str):
            found[key] = made
        elif isinstance(made, dict):
            with suppress(TypeError):  # other code wrote it
                found[key] = RunForecast(**made)
    return found


def _made(todo: Sequence[tuple[str, Asked]]) -> Iterator[tuple[str, Made]]:
    """Yield forecasts as they are made, by one process for each processor."""
    workers = min(len(todo), os.cpu_count() or 1)
    if not workers:
        return
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool:
        running = {pool.submit(_forecast_of, each): key for key, each in todo}
        for done in as_completed(running):
            yield running[done], done.result()


def _forecast_of(each: Asked) -> Made:
    found = first_that_fits(*each)
    collect_garbage()
    return found


def _cost(asked: Asked) -> int:
    """Return layers times simulated micro-batches, about in proportion to the processor time."""
    tables = asked[0][0]
    few, _ = simulated_micro_batches(tables)
    layers, steps = (
        _whole(tables, table, key)
        for table, key in (("model", "layers"), ("train", "gradient_accumulation_steps"))
    )
    return layers * min(few, steps)


def _whole(tables: Mapping[str, object], table: str, key: str) -> int:
    """Return a whole number of a scenario; 1 if it is not given."""
    given = tables.get(table)
    value = given.get(key) if isinstance(given, Mapping) else None
    return value if isinstance(value, int) else 1
