"""Figures of papers: they are read, predicted, and compared with what was published."""

import tomllib
from dataclasses import replace
from functools import cache
from typing import cast
from xml.etree import ElementTree as ET

import pytest

import zsim_scenarios
from zsim.analysis.memory_footprint import footprint
from zsim.cli.main import answer
from zsim.files.source import resolved
from zsim.model.architecture import GPT, Attention
from zsim.model.transformer import transformer
from zsim.scenario.tables import from_tables
from zsim.strategy.precision import Precision
from zsim_lab.answer.judged_figures import figure_runs
from zsim_lab.answer.paper_validation import verdicts_of
from zsim_lab.answer.validation import Validation
from zsim_lab.verdict.paper_figures import FigureQuantity, PaperError, PaperRun, parse, shown
from zsim_lab.verdict.paper_picture import picture
from zsim_lab.verdict.verdict import Verdict

SMALL = """
publication = "nobody, nowhere"
[base.model]
layers = 2
hidden_size = 64
attention_heads = 4
sequence_length = 64
vocab_size = 256
[base.cluster]
topology = "dgx2_infiniband"
nodes = 1
gpu_memory = "24 MB"
[base.zero]
stage = 1
[base.train]
micro_batch_size = 2
gradient_accumulation_steps = 1
precision = "fp16"
[[figure]]
name = "rates"
quantity = "throughput"
source = "made up"
keys = ["model.hidden_size", "train.micro_batch_size"]
otherwise = ["train.micro_batch_size=1"]
rows = [
    { label = "fits", published = 0.5, values = [64, 2] },
    { label = "too large", published = 0.5, values = [64, 64], fitted = true },
    { label = "cannot be", published = 0.5, values = [63, 2] },
]
[[figure]]
name = "sizes"
quantity = "largest"
ordered = true
source = "made up"
keys = ["zero.stage"]
rows = [
    { label = "replicated", published = 1e6, values = [0] },
    { label = "cut", published = 2e6, values = [2] },
]
[[figure]]
name = "states"
quantity = "states"
source = "made up"
set = ["model={ parameters = 2e6 }"]
keys = ["zero.stage"]
rows = [{ label = "replicated", published = 2.5e6, values = [0] }]
"""


@pytest.mark.one_commit_in(6)
def test_figures_are_predicted_beside_what_was_published() -> None:
    rates, sizes, states = verdicts_of(parse(SMALL))
    fits, too_large = rates.rows
    assert (fits.alternative, too_large.alternative) == (
        0,
        1,
    )  # the second fits with the smaller batch alone
    assert fits.off == pytest.approx(fits.predicted / 0.5 - 1)
    assert rates.all is not None
    assert rates.kept is not None
    assert (rates.all.rows, rates.kept.rows) == (2, 1)  # what was fitted does not judge
    ((label, reason),) = rates.unmodelled
    assert (label, "attention_heads" in reason) == ("cannot be", True)
    (_, order) = sizes.facts
    assert order.value == {"labels": ["replicated", "cut"], "as_published": True}
    # 16 bytes a parameter, of 24 MB, to four digits: 1.5 million.
    assert states.rows[0].predicted == pytest.approx(1.5e6, rel=2e-3)
    said = Validation(verdicts={"": [rates]}, more={}, is_paper=True).to_dict()["files"]["rates"]  # type: ignore[index]
    assert (said["rows"], said["modelled"], said["judged"]["modelled"]) == (3, 2, 1)
    assert "order" not in said
    assert [row["row"] for row in said["predictions"]] == ["fits", "too large"]
    drawing = ET.fromstring(picture([rates, sizes, states]))
    dots = [each for each in drawing.iter() if each.tag.endswith("circle")]
    assert len(dots) == 5


SECOND = """
[[again]]
name = "rates of one micro-batch more"
figure = "rates"
source = "made up"
set = ["train.gradient_accumulation_steps=2"]
"""


@pytest.mark.one_commit_in(6)
def test_a_figure_may_have_a_second_answer_which_is_no_judged_run() -> None:
    first, *_, second = parse(SMALL + SECOND).figures
    for one, other in zip(first.runs, second.runs, strict=True):
        for plain, changed in zip(one.alternatives, other.alternatives, strict=True):
            train = {**cast("dict[str, object]", plain["train"]), "gradient_accumulation_steps": 2}
            assert changed == {**plain, "title": changed["title"], "train": train}
    assert not [run for *_, run in figure_runs() if "stream" in str(run.alternatives[0]["title"])]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "[[figure]]",
            "[[again]]\nname = 'a'\nfigure = 'b'\nsource = ''\nset = ['c=1']\n[[figure]]",
            "again: a: no figure is named b",
        ),
        ("values = [64, 2] }", "values = [64] }", "rates: fits: 2 values are needed"),
        ('"throughput"', '"speed"', "figure.0.quantity"),
        ("published = 1e6", "published = 0", "figure.1.rows.0.published"),
        ("[base.model]", "[base", "Expected"),
    ],
)
def test_a_file_that_is_wrong_is_told_in_a_line(old: str, new: str, why: str) -> None:
    with pytest.raises(PaperError, match=why) as error:
        parse(SMALL.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_every_row_that_ships_is_a_scenario() -> None:
    paper = parse(zsim_scenarios.published_text("zero"))
    count = {figure.name: len(figure.runs) for figure in paper.figures}
    assert count["figure 2"] == 9
    assert count["figure 2, baseline"] == 9
    assert count["figure 3"] == 4
    assert (count["figure 2, DeepSpeed"], count["figure 3, DeepSpeed"]) == (9, 4)
    assert count["table 2, measured"] == 10
    fitted = [run.label for figure in paper.figures for run in figure.runs if run.fitted]
    assert not fitted
    for figure in paper.figures:
        for run in figure.runs:
            assert [from_tables(tables).title for tables in run.alternatives]


def test_the_run_that_a_new_user_sees_is_a_row_of_the_paper() -> None:
    (run,) = [
        run
        for figure in parse(zsim_scenarios.published_text("zero")).figures
        for run in figure.runs
        if (figure.name, run.label) == ("figure 2", "100B")
    ]
    ships = tomllib.loads(zsim_scenarios.text("zero_100b"))
    row = from_tables(run.alternatives[0])
    assert from_tables({**ships, "title": row.title}) == row
    assert f"{run.published:.1f} TFLOP/s" in zsim_scenarios.text("zero_100b")


def test_paper_takes_no_data_and_the_others_need_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["validate", "paper", "--data", "."]) == 2
    assert answer(["validate", "training"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "zsim: --data: .: paper takes none, its figures ship",
        "zsim: --data: missing; training needs a folder of published tables",
    ]


def test_values_are_shown_in_their_unit() -> None:
    assert shown(38.66, FigureQuantity.THROUGHPUT) == "38.7 TFLOP/s"
    assert shown(1.3e9, FigureQuantity.LARGEST) == "1.3 billion"


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_is_not_fused_moves_more_and_computes_and_keeps_the_same(tensor: int) -> None:
    together, apart = (
        transformer(
            GPT(
                layers=2,
                hidden_size=64,
                attention_heads=4,
                sequence_length=32,
                vocab_size=128,
                attention=Attention.PLAIN,
                fused=fused,
            ),
            micro_batch_size=2,
            tensor=tensor,
            precision=Precision.FP16,
        )
        for fused in (True, False)
    )
    assert apart.forward_flops == together.forward_flops
    assert apart.parameter_count == together.parameter_count
    for one, other in zip(together.units, apart.units, strict=True):
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            assert mine.saved_bytes == theirs.saved_bytes
    # Of a block on one rank, tokens x elements, in bytes: 2 each way, dropout a byte of mask more.
    tokens, hidden, scores = 64, 64, 64 * 4 * 32 // tensor
    wide = 4 * hidden // tensor
    copies = 4 * 2 * 2 * tokens * hidden // tensor
    biases = 2 * 2 * tokens * (3 * hidden // tensor + wide)
    expected = copies + biases + scores * (3 * 4 + 5) + 2 * tokens * hidden * (4 + 5)
    expected += tokens * wide * 2 * (8 - 2)
    moved = [
        sum(kernel.bytes for part in model.units[1].segments for kernel in part.forward)
        for model in (together, apart)
    ]
    assert moved[1] - moved[0] == expected


@cache
def shipped(name: str, figure: str) -> Verdict:
    """Return a figure of a paper that ships, predicted."""
    paper = parse(zsim_scenarios.published_text(name))
    figures = tuple(each for each in paper.figures if each.name == figure)
    (found,) = verdicts_of(replace(paper, figures=figures))
    assert not found.unmodelled
    return found


@pytest.mark.one_commit_in(9)
def test_figure_3_rises_with_gpus_in_the_order_of_deepspeed() -> None:
    found = {each.name: each for each in shipped("zero", "figure 3, DeepSpeed").rows}
    assert len(found) == 4
    assert max(abs(each.off) for each in found.values()) < 0.13
    few, many = (found[f"60B on {gpus} GPUs"].predicted for gpus in (64, 256))
    assert many > 1.15 * few


def test_all_cells_of_figure_2a_of_zero_infinity_are_exact_but_one() -> None:
    found = shipped("zero_infinity", "figure 2a").rows
    assert len(found) == 25
    wrong = [each.name for each in found if each.predicted != each.published]
    assert wrong == ["0.1T, model state working memory"]


def test_all_cells_of_table_3_of_zero_infinity_are_exact() -> None:
    found = shipped("zero_infinity", "table 3").rows
    assert [each.predicted for each in found] == [each.published for each in found]


def test_a_node_of_zero_infinity_copies_as_published() -> None:
    found = {each.name: each for each in shipped("zero_infinity", "figure 2b").rows}
    assert found["CPU memory, 16 GPUs"].predicted == pytest.approx(3.0)
    assert found["CPU memory, one GPU"].predicted == pytest.approx(12.0)
    assert found["NVMe, one GPU"].predicted == pytest.approx(12.0)
    assert abs(found["NVMe, 16 GPUs"].off) < 0.1  # 28 GB/s of another source, printed 25.6


@pytest.mark.matrix(21)
@pytest.mark.parametrize(
    ("paper", "figure", "within"),
    [
        ("zero_offload", "figure 9", 0.2),
        ("zero_offload", "figure 11", 0.17),
        ("zero_offload", "figure 7, shapes of table 3", 0.05),
        ("zero_infinity_runs", "figure 5c", 0.12),
        ("zero_infinity_runs", "figure 6a, data parallel", 0.1),
        ("zero_infinity_runs", "figure 6c, ZeRO-Infinity", 0.13),
        ("zero_infinity_runs", "figure 6d", 0.12),
    ],
)
def test_offloaded_runs_are_predicted_without_a_row_that_was_fitted(
    paper: str, figure: str, within: float
) -> None:
    found = shipped(paper, figure)
    assert found.kept == found.all
    assert all(abs(each.off) < within for each in found.rows)


@pytest.mark.one_commit_in(24)
def test_of_the_shapes_that_were_trained_the_published_ones_are_the_largest_that_fit() -> None:
    shapes = shipped("zero_offload", "figure 7, shapes of table 3").rows
    assert [f"{each.predicted / 1e9:.0f}" for each in shapes] == ["13", "8"]
    for each in shapes:
        assert isinstance(each.source, PaperRun)
        heavier = each.source.alternatives[each.alternative + 1]
        assert not footprint(resolved("heavier", from_tables(heavier)).job()).fits


@pytest.mark.parametrize("name", ["zero_offload", "zero_infinity_runs"])
def test_rows_of_offloaded_runs_are_scenarios(name: str) -> None:
    for figure in parse(zsim_scenarios.published_text(name)).figures:
        for run in figure.runs:
            assert [from_tables(tables).title for tables in run.alternatives]


@pytest.mark.one_commit_in(6)
def test_the_widest_layer_in_4_tiles_is_as_wide_as_was_measured() -> None:
    """4 tiles of 4 x 32,768 rows in all have 2 GiB each, which a piece of memory just holds."""
    paper = parse(zsim_scenarios.published_text("zero_infinity_runs"))
    (figure,) = (each for each in paper.figures if each.name == "figure 6b")
    (found,) = verdicts_of(replace(paper, figures=(replace(figure, runs=figure.runs[1:2]),)))
    assert [each.predicted for each in found.rows] == [32768]


def rates_as(quantity: str, steps: int = 1) -> Verdict:
    """Return the first figure of `SMALL` as another quantity, with twice the work `otherwise`."""
    text = SMALL.replace('"throughput"', f'"{quantity}"')
    text = text.replace("train.micro_batch_size=1", "train.gradient_accumulation_steps=2")
    text = text.replace("gradient_accumulation_steps = 1", f"gradient_accumulation_steps = {steps}")
    paper = parse(text)
    return verdicts_of(replace(paper, figures=paper.figures[:1]))[0]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("steps", [1, 7])
def test_flops_are_counted_as_zero_infinity_does(steps: int) -> None:
    blocks, model = (rates_as(each, steps) for each in ("block throughput", "throughput"))
    parameters, scores, head = 12 * 2 * 64**2, 2 * 2 * 64 * 64, 64 * 256
    assert blocks.rows[0].predicted / model.rows[0].predicted == pytest.approx(
        8 * parameters / (6 * (parameters + scores + head))
    )


def test_a_step_with_more_to_do_takes_longer() -> None:
    found = rates_as("step time ratio")
    assert 1 < found.rows[0].predicted < 2
    assert found.shown(found.rows[0].predicted).endswith(" times")


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("figure", "median"),
    [
        ("copies", 0.05),
        ("Adam on CPUs", 0.15),
        ("drives of Azure NC96ads A100 v4", 0.1),
        ("drives of a DGX-2, by size and threads", 0.1),
    ],
)
def test_measured_hardware_is_predicted_from_other_rows(figure: str, median: float) -> None:
    kept = shipped("offload_hardware", figure).kept
    assert kept is not None
    assert kept.median < median
