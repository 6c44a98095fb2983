"""The searches of the page: their requests to the process that answers, and their answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from zsim.mistake import MistakeError
from zsim.report.drawing import NARROW, drawn
from zsim.report.svg.figure import ChoiceChart, ChoicePoint, Series, SeriesMark
from zsim.units import format_count, format_seconds
from zsim_plan.answer.best_search import OPERATIONS
from zsim_plan.page.form_fields import GROWS, ZERO, form_fields, label
from zsim_plan.page.own_files import without_folder
from zsim_plan.page.setting_form import ChosenSetting, chosen_setting, offloads
from zsim_plan.page.setting_page import FormAnswer

HALVINGS: Final = 3
"""Number of times that the curve divides the GPUs by two, and multiplies them by two."""

WIDE: Final = 760.0
"""Width of the chart in pixels, next to the form."""

FORM_KEYS: Final = {
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "train.micro_batch_size": "micro",
    "train.gradient_accumulation_steps": "accumulate",
    "activations.checkpointing": "checkpointing",
}
"""Fields of the form by key of the scenario."""

FOLLOWS: Final = {"zero.emulate", "zero.stage", "parallel.data"}
"""Keys that follow from other fields."""

OPTION_LABELS: Final = {
    "--gpus: ": "count",
    "--batch: ": "accumulate",
    "--runtime: ": "runtime",
    "--objective: ": "least",
}
"""Fields by the option of `zsim best` that a message starts with."""


def search_request(asked: ChosenSetting) -> dict[str, Any]:
    """Return the question of `zsim best` that the form asks.

    Raises:
        MistakeError: a choice is invalid.
    """
    gpus, gpu = asked.gpus
    changes = {**asked.given(), **({} if gpu is None else {"cluster.gpu": gpu})}
    options: dict[str, object] = {
        "batch_tokens": _sequences(asked) * asked.sequence_length(),
        "objective": asked.values["least"],
        "operations": OPERATIONS,
        "price": asked.price,
        "tokens": asked.tokens,
    }
    if asked.values["least"] == "cost" and asked.price is None:
        raise MistakeError(f"{label('price')}: is empty; a search for the least cost needs it")
    if asked.values["among"]:
        if asked.runtime == ZERO:
            raise MistakeError(
                f"{label('among')}: a search has no {ZERO!r}, zsim's own order; choose all runtimes"
            )
        options["among"] = [asked.runtime]
    return {
        "kind": "search",
        "model": asked.model[1],
        "gpus": gpus,
        "changes": changes,
        "options": options,
    }


def curve_request(asked: ChosenSetting) -> dict[str, Any]:
    """Return the scenarios of the setting on fewer and on more GPUs.

    Raises:
        MistakeError: a choice of the setting itself is invalid.
    """
    asked.sequence_length()  # raises if a choice is invalid with any number of GPUs
    count, tokens, price = asked.number("count"), asked.tokens, asked.price
    counts = [count // 2**each for each in range(HALVINGS, 0, -1) if not count % 2**each]
    counts += [count * 2**each for each in range(HALVINGS + 1)]
    points = [_point(asked, each) for each in counts]
    return {"kind": "curve", "points": points, "tokens": tokens, "price": price}


def _point(asked: ChosenSetting, count: int) -> dict[str, Any]:
    try:
        setting = ChosenSetting(values={**asked.values, "count": str(count)})
        if asked.values["batch"] != GROWS:
            setting = ChosenSetting(
                values={**setting.values, "accumulate": _accumulation(asked, setting)}
            )
        return {"gpus": count, "tables": setting.tables()}
    except MistakeError as mistake:
        return {"gpus": count, "refused": str(mistake)}


def _accumulation(asked: ChosenSetting, other: ChosenSetting) -> str:
    """Return the micro-batches with which `other` has the batch of `asked`.

    Raises:
        MistakeError: there is no such number.
    """
    batch, each = _sequences(asked), other.replicas * other.number("micro")
    if batch % each:
        raise MistakeError(
            f"{label('batch')}: {batch:,} sequences of a step must be a multiple of {each:,}, one "
            "micro-batch of each replica"
        )
    return str(batch // each)


def _sequences(asked: ChosenSetting) -> int:
    return asked.replicas * asked.number("micro") * asked.number("accumulate")


def search_answer(asked: ChosenSetting, line: Mapping[str, Any]) -> FormAnswer:
    """Return the answer in the last line of a search."""
    if "refused" in line:
        return FormAnswer(headline=_labelled(without_folder(str(line["refused"]))))
    if "points" in line:
        return curve_answer(asked, line["points"])
    found = line["found"]
    named = [(str(name), without_folder(str(text))) for name, text in found["facts"]]
    (_, best), *facts = named
    if "scenario" not in found:
        return FormAnswer(headline=f"The search: {best}.", facts=tuple(facts))
    address, left_out = in_form(asked, found["changes"], found["gpus"])
    shown = "show it in the form"
    if left_out:
        shown += f" (which has no field for {', '.join(left_out)})"
    return FormAnswer(
        headline=f"The best: {best}.",
        fits=True,
        facts=tuple(facts),
        file=("The best as a scenario", without_folder(found["scenario"])),
        links=((f"/?{address}", shown),),
    )


def in_form(asked: ChosenSetting, changes: Mapping[str, Any], gpus: int) -> tuple[str, list[str]]:
    """Return the address of the form with a found setting, and the keys without a field."""
    runtime = str(changes["zero.emulate"])
    values = {
        **asked.values,
        "count": str(gpus),
        "runtime": f"{runtime}-{changes['zero.stage']}",
        "offload": "",
    }
    left = {key: value for key, value in changes.items() if key not in FOLLOWS}
    if left.get("parallel.replicate") == 1:
        del left["parallel.replicate"]
    done = {name: its for name, its in offloads(runtime).items() if its.items() <= left.items()}
    if done:  # the choice that covers most keys
        values["offload"] = max(done, key=lambda name: len(done[name]))
        left = {key: value for key, value in left.items() if key not in done[values["offload"]]}
    for key, name in FORM_KEYS.items():
        if key in left and _allows(name, str(left[key])):
            values[name] = str(left.pop(key))
    return chosen_setting(values).address, sorted(left)


def _allows(name: str, value: str) -> bool:
    field = next(each for each in form_fields() if each.name == name)
    return field.typed or value in field.values


def _labelled(line: str) -> str:
    """Return a message with the label of a field in place of the option of `zsim best`."""
    for option, name in OPTION_LABELS.items():
        if line.startswith(option):
            return f"{label(name)}: {line.removeprefix(option)}"
    return line


COLUMNS: Final = ("GPUs", "step", "tokens/s", "tokens/s per GPU", "MFU", "training", "money")


def curve_answer(asked: ChosenSetting, points: Sequence[Mapping[str, Any]]) -> FormAnswer:
    """Return the curve of the setting over the number of GPUs."""
    ran = [each for each in points if "refused" not in each]
    fitting = [each for each in ran if each["fits"]]
    rows = tuple(map(_row, ran))
    used = [at for at in range(len(COLUMNS)) if not rows or any(row[at] for row in rows)]
    refused = tuple(
        (f"{each['gpus']:,} GPUs", without_folder(str(each["refused"])))
        for each in points
        if "refused" in each
    )
    batch = "a replica" if asked.values["batch"] == GROWS else "a step"
    headline = f"{asked.name} fits on none of these numbers of GPUs."
    if fitting:
        counts = " to ".join(f"{fitting[at]['gpus']:,}" for at in (0, -1))
        headline = f"{asked.name} on {counts} GPUs, with the same batch of {batch}."
    return FormAnswer(
        headline=headline,
        fits=bool(fitting),
        facts=refused,
        columns=tuple(COLUMNS[at] for at in used),
        rows=tuple(tuple(row[at] for at in used) for row in rows),
        chart=_chart(fitting),
    )


def _row(point: Mapping[str, Any]) -> tuple[str, ...]:
    gpus, speed = cast("int", point["gpus"]), cast("float", point["tokens_per_s"])
    if not point["fits"]:
        return (f"{gpus:,}", "does not fit", "", "", "", "", "")
    days, cost = point["days"], point["cost"]
    return (
        f"{gpus:,}",
        format_seconds(point["step_time_s"]),
        f"{speed:,.0f}",
        f"{speed / gpus:,.0f}",
        str(point["mfu"]),
        "" if days is None else f"{days:,.1f} days",
        "" if cost is None else format_count(round(cost)),
    )


def _chart(fitting: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the chart for a wide and for a narrow page; empty if there is nothing to compare."""
    if len(fitting) < 2:
        return "", ""
    points = tuple(
        ChoicePoint(
            choice=at,
            value=each["tokens_per_s"],
            band=each["tokens_per_s"] * (each["error"] or 0.0),
            meets=True,
            title=f"{each['gpus']:,} GPUs: {each['tokens_per_s']:,.0f} tokens/s",
        )
        for at, each in enumerate(fitting)
    )
    chart = ChoiceChart(
        series=(Series("tokens/s", "#5b8bd0", SeriesMark.LINE),),
        points=(points,),
        choices=tuple(f"{each['gpus']:,}" for each in fitting),
        axis="GPUs",
        values="tokens/s",
        is_bars=False,
        is_joined=True,
        is_logarithmic=True,
        is_seconds=False,
    )
    return drawn(chart, WIDE), drawn(chart, NARROW)
