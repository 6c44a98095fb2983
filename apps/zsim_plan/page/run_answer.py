"""Answers of the page: of one run, and of two side by side."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from zsim.analysis.run_comparison import counts, ratio_error
from zsim.api.run_result import RunResult
from zsim.api.training_budget import days_text
from zsim.units import format_bytes, format_count, format_seconds
from zsim_plan.page.form_fields import OWN, form_fields
from zsim_plan.page.own_files import without_folder
from zsim_plan.page.setting_form import FILE, ChosenSetting
from zsim_plan.page.setting_page import FormAnswer, FormField, MemoryBar, SideBySide


def run_answer(asked: ChosenSetting, result: RunResult) -> FormAnswer:
    """Return the answer to a setting that was simulated."""
    found, address = result.summary, asked.address
    headline = f"{asked.name} {'fits' if result.fits else 'does not fit'}."
    if result.step_time_s:
        step = format_seconds(result.step_time_s)
        headline += (
            f" A step takes {step}." if result.fits else f" With more memory: {step} a step."
        )
    quick = replace(result, look_for_remedies=lambda _: None)  # remedies may take a minute
    links = [(f"/report.html?{address}", "the full page")]
    links += [(f"/{name}?{address}", name) for name in (FILE, *asked.files)]
    facts = [(name, without_folder(text)) for name, text in quick.facts() if name != "error"]
    if asked.values["model"] == OWN and not asked.values["length"]:
        length = asked.sequence_length()
        facts.append(
            ("context length", f"{length:,} tokens, the longest of config.json; choose yours above")
        )
    return FormAnswer(
        headline=headline,
        fits=result.fits,
        cards=tuple(_cards(result)) if result.fits else (),
        bars=tuple(_bars(result)),
        error=f"Error: {without_folder(result.error)}.",
        facts=tuple(facts),
        links=tuple(links),
        remedies="" if found.fits else f"/remedies?{address}",
    )


def _cards(result: RunResult) -> Generator[tuple[str, str, str]]:
    """Yield title, value and note of the most important figures."""
    step_tokens = format_count(round(result.tokens_per_s * result.step_time_s))
    yield "step time", format_seconds(result.step_time_s), f"of {step_tokens} tokens"
    yield "tokens/s", f"{result.tokens_per_s:,.0f}", "all GPUs"
    yield "MFU", result.summary.mfu_text, f"{result.model_tflops_per_gpu:.0f} TFLOP/s per GPU"
    budget = result.training
    if budget is None:
        return
    yield f"{format_count(budget.tokens)} tokens", days_text(budget.days), "failures included"
    hours = format_count(round(budget.gpu_hours))
    if budget.cost is None:
        yield "GPU hours", hours, "enter a price to see the cost"
    else:
        yield "money", format_count(round(budget.cost)), f"{hours} GPU hours"


def _bars(result: RunResult) -> Generator[MemoryBar]:
    """Yield the used memory of each tier; the needed memory if it ran out."""
    found = result.summary
    taken = found.reserved_bytes
    words = "reserved" if taken is not None else "needed"
    bytes_taken = found.needed_bytes if taken is None else taken
    yield MemoryBar(
        text=f"GPU: {format_bytes(bytes_taken)} {words} of {format_bytes(found.usable_bytes)}",
        share=bytes_taken / found.usable_bytes if found.usable_bytes else 0.0,
    )
    for tier in found.tiers:
        if tier.capacity_bytes:
            name = f"{tier.name[:1].upper()}{tier.name[1:]}"
            yield MemoryBar(
                text=f"{name}: {tier.text()}", share=tier.needed_bytes / tier.capacity_bytes
            )


def side_by_side(
    sides: Sequence[tuple[ChosenSetting, FormAnswer, RunResult | None]],
) -> SideBySide:
    """Return the answers to two settings, the kept one first, and how much faster one is."""
    values = [asked.values for asked, _, _ in sides]
    differing = [each for each in form_fields() if len({v[each.name] for v in values}) > 1]
    answers = tuple(
        (name, _choices(differing, asked) or "the same choices", answer)
        for name, (asked, answer, _) in zip(("A, kept", "B, on the form"), sides, strict=True)
    )
    return SideBySide(answers=answers, verdict=_verdict(*(result for _, _, result in sides)))


def _choices(differing: Sequence[FormField], asked: ChosenSetting) -> str:
    return "; ".join(f"{each.label}: {_shown(each, asked)}" for each in differing)


def _shown(field: FormField, asked: ChosenSetting) -> str:
    value = asked.values[field.name]
    if field.lines:
        return f"{len(value.encode()):,} bytes" if value else "none"
    texts = {one: text for _, options in field.groups for one, text in options}
    return texts.get(value, value) or field.hint or "none"


def _verdict(first: RunResult | None, second: RunResult | None) -> str:
    """Return the ratio of the speeds of both runs as a sentence."""
    for name, each in (("A", first), ("B", second)):
        if each is None:
            return f"{name} has no answer, so the two cannot be compared."
        if not each.fits or not each.tokens_per_s:
            return f"{name} does not fit, so the two cannot be compared."
    assert first is not None
    assert second is not None
    ratio = second.tokens_per_s / first.tokens_per_s
    text = f"B trains {ratio:.2f} times as many tokens a second as A"
    money = [each.training.cost for each in (first, second) if each.training is not None]
    if len(money) == 2 and money[0] and money[1]:
        text += f" and costs {money[1] / money[0]:.2f} times as much"
    errors = first.recorded.error, second.recorded.error
    differs, error = counts(ratio - 1, *errors), ratio_error(*errors)
    if differs is None or error is None:
        return f"{text}; the error of their ratio is unknown."
    how = "more" if differs else "no more"
    return f"{text}; they differ by {how} than the error of their ratio, ±{error:.0%}."
