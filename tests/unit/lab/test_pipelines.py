"""Publications of pipelines that ship: what is counted of a row, and that each is judged."""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from zsim.api.forecast import forecast
from zsim.api.run_forecast import RunForecast
from zsim.files.shipped_files import published_papers
from zsim.prediction.evidence import flat, judged_runs
from zsim_lab.answer import paper_validation
from zsim_lab.answer.judged_figures import figure_runs, judged_figure
from zsim_lab.answer.paper_validation import validate_papers
from zsim_lab.verdict.judged_rows import rounded
from zsim_lab.verdict.paper_figures import FigureQuantity, PaperError, parse
from zsim_runtimes.megatron.options import Megatron

TIMED = """
publication = "nobody, nowhere"
pipelines = true
[base.model]
layers = 4
hidden_size = 64
attention_heads = 4
sequence_length = 64
vocab_size = 256
[base.cluster]
topology = "dgx2_infiniband"
nodes = 1
[base.zero]
stage = 1
emulate = "megatron"
[base.train]
micro_batch_size = 2
gradient_accumulation_steps = 6
precision = "fp16"
[[figure]]
name = "seconds"
quantity = "step time"
source = "made up"
keys = ["parallel.pipeline"]
rows = [
    { label = "two stages", published = 0.5, values = [2] },
    { label = "uneven", published = 0.5, values = [8] },
]
[[figure]]
name = "rates"
quantity = "formula throughput"
source = "made up"
keys = ["parallel.pipeline"]
rows = [{ label = "two stages", published = 0.25, values = [2] }]
"""


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    other = TIMED.replace("pipelines = true", "").replace("nobody", "somebody")
    monkeypatch.setattr(
        paper_validation, "published_papers", lambda: {"pipelines": TIMED, "figures": other}
    )


def test_seconds_and_rates_by_formula_are_those_of_the_forecast(shipped: None) -> None:
    found = validate_papers(pipelines=True).verdicts
    assert list(found) == ["nobody, nowhere"]
    seconds, rates = found["nobody, nowhere"]
    (run,) = (run for run in parse(TIMED).figures[1].runs)
    made = forecast(run.alternatives[0])
    assert isinstance(made, RunForecast)
    assert seconds.rows[0].predicted == made.step_time_s
    # 4 blocks of width 64, 256 words; two stages on 16 GPUs leave 8 ranks of data, with 6 x 2
    # sequences of 64 tokens each.
    tokens = 8 * 6 * 2 * 64
    flops = 96 * tokens * 4 * 64**2 * (1 + 64 / (6 * 64) + 256 / (16 * 4 * 64))
    assert rates.rows[0].predicted == pytest.approx(flops / made.step_time_s / 16 / 1e12)
    ((label, reason),) = seconds.unmodelled
    assert label == "uneven"
    assert "must be a multiple of parallel.pipeline = 8" in reason


def test_pipelines_are_judged_apart_from_figures(shipped: None) -> None:
    assert list(validate_papers().verdicts) == ["somebody, nowhere"]


def test_a_published_rate_says_how_long_a_step_took() -> None:
    seconds, rates = parse(TIMED).figures
    timed = judged_figure(("a, b", "", FigureQuantity.STEP_TIME, seconds.runs[0]))
    assert timed is not None
    assert timed.step_s == 0.5
    rated = judged_figure(("a, b", "", FigureQuantity.FORMULA_THROUGHPUT, rates.runs[0]))
    assert rated is not None
    assert rated.predicted_step_s == timed.predicted_step_s
    of_tokens = 96 * 6144 * 4 * 64**2 * (1 + 64 / (6 * 64) + 256 / (16 * 4 * 64))
    assert rated.step_s == rounded(of_tokens / 16 / 0.25e12)
    assert judged_figure(("a, b", "", FigureQuantity.STEP_TIME, seconds.runs[1])) is None


def test_a_published_peak_is_judged_beside_the_time_of_its_step() -> None:
    two = "published = 0.5, values = [2]"
    peaked = TIMED.replace(two, f"{two}, peak_gib = 1.5")
    (run, without), _ = (figure.runs for figure in parse(peaked).figures)
    made = forecast(run.alternatives[0])
    judged = judged_figure(("a, b", "", FigureQuantity.STEP_TIME, run))
    assert judged is not None
    assert isinstance(made, RunForecast)
    assert (judged.step_s, judged.peak_bytes) == (0.5, 3 << 29)
    assert judged.predicted_peak_bytes == made.peak_reserved_bytes
    assert without.peak_bytes is None
    rate = "published = 0.25, values = [2]"
    with pytest.raises(PaperError, match=r"rates: two stages: peak_gib needs quantity = step time"):
        parse(TIMED.replace(rate, f"{rate}, peak_gib = 1.5"))


def test_rows_with_certain_values_have_settings_that_others_have_not() -> None:
    keys = 'keys = ["parallel.pipeline"]'
    when = 'when = [{ if = ["parallel.pipeline=2"], set = ["zero.stage=0"] }]'
    seconds, rates = parse(TIMED.replace(keys, f"{keys}\n{when}", 1)).figures
    runs = (*seconds.runs, *rates.runs)
    stages = [cast("dict[str, object]", run.alternatives[0]["zero"])["stage"] for run in runs]
    assert stages == [0, 1, 1]
    with pytest.raises(PaperError, match=r"seconds: when: no row has parallel\.pipeline=3"):
        parse(TIMED.replace(keys, f"{keys}\n{when.replace('=2', '=3')}", 1))


def key(publication: str, settings: Mapping[str, object]) -> tuple[str, str]:
    return publication, str(sorted((name, str(value)) for name, value in settings.items()))


@pytest.mark.one_commit_in(6)
def test_every_published_pipeline_is_in_the_table_of_judged_runs() -> None:
    ships = Counter(
        (*key(run.citation, run.settings), rounded(run.step_s)) for run in judged_runs()
    )
    of_pipelines = {
        parse(text).publication
        for text in published_papers().values()
        if tomllib.loads(text).get("pipelines")
    }
    assert len(of_pipelines) >= 4
    asked: Counter[tuple[str, str, float]] = Counter()
    for citation, _, quantity, run in figure_runs():
        if citation in of_pipelines and quantity is FigureQuantity.STEP_TIME:
            assert run.published is not None
            tables = {name: each for name, each in run.alternatives[0].items() if name != "title"}
            asked[*key(citation, flat(tables)), rounded(run.published)] += 1
    assert asked
    assert not asked - ships


def runs_on_stages(paper: str) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Yield label, layers and stages of runs with a pipeline, and the layers of each stage."""
    for figure in parse(published_papers()[paper]).figures:
        for run in figure.runs:
            tables = cast("dict[str, dict[str, Any]]", run.alternatives[0])
            stages, layers = tables["parallel"].get("pipeline", 1), tables["model"]["layers"]
            if stages > 1:
                options = Megatron().but(**tables["zero"].get("megatron", {}))
                sizes = options.layers_of_stages(layers=layers, stages=stages)
                yield run.label, layers, stages, sizes


def test_aleph_alpha_s_layers_are_split_as_their_trainer_does_if_nothing_is_said() -> None:
    # pipe_partition_uniform, the default (Aleph-Alpha/scaling at 737f8558): embedding, layers, norm
    # and head are items alike, of which the first parts have one more.
    for _, layers, stages, sizes in runs_on_stages("aleph_alpha_layouts"):
        each, more = divmod(layers + 3, stages)
        items = [each + (stage < more) for stage in range(stages)]
        assert sizes == (items[0] - 1, *items[1:-1], items[-1] - 2)


def test_layers_before_bloom_are_split_as_deepspeed_did() -> None:
    # partition_balanced of DeepSpeed in February 2022: parts are filled from the front up to the
    # smallest weight with which all fit. Layers weigh 1, and from the runs of 106 layers on
    # embedding and head as well (`type:transformer|embedding`).
    unlike = 0
    for label, layers, stages, sizes in runs_on_stages("bloom_prequel"):
        counted = label == "02-28" or layers == 106
        weight = layers + 2 * counted
        most = -(-weight // stages)
        parts = [most] * (weight // most) + ([weight % most] if weight % most else [])
        assert len(parts) == stages
        assert sizes == (parts[0] - counted, *parts[1:-1], parts[-1] - counted)
        unlike += len({*sizes}) > 1
    assert unlike == 29
