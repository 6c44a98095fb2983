"""`zsim largest`: Table 2 of the ZeRO paper, and a size that fits beside one that does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
import zsim_topologies
from zsim.api.error_text import probability_text
from zsim.cli.main import answer
from zsim.cluster.files import Part
from zsim.prediction.error_rule import SURE
from zsim_plan.answer.largest_result import DIGITS, LargestResult

PRINTED = {0: "2.0", 1: "7.6", 2: "14.4", 3: "128.0"}
"""Rajbhandari et al. 2020 (arXiv 1910.02054v3), Table 2, first row: billions by stage, 64 GPUs."""

SCALED = {(1, 16): 121.6e9, (3, 4): 0.5e12}
"""The same, other rows, by stage and degree of model parallelism."""

BOUND = {1: 0.007, 2: 0.007, 3: 0.025}
"""The paper multiplies its first row, which it has rounded: 7.6 is 7.64, and 128 is cut to 125."""


def largest(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """What `zsim largest --json` says."""
    assert answer(["largest", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.matrix(9)
@pytest.mark.parametrize(("stage", "printed"), PRINTED.items())
def test_the_first_row_of_table_2_has_the_printed_digits(
    stage: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = largest(capsys, "zero_table1", "--set", f"zero.stage={stage}")
    assert found["by"] == "parameters"
    parameters = found["parameters"]
    assert isinstance(parameters, int)
    assert f"{parameters / 1e9:.1f}" == printed
    # Bytes of a parameter: 2 + 2 + 12, of which a stage cuts some over 64 ranks (section 5).
    each = (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)[stage]
    assert parameters * each == pytest.approx(32e9, rel=10 ** (1 - DIGITS))


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("key", "published"), SCALED.items())
def test_other_rows_of_table_2_are_as_near_as_the_paper_rounds(
    key: tuple[int, int], published: float, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, tensor = key
    settings = (f"--set=zero.stage={stage}", f"--set=parallel.tensor={tensor}")
    assert largest(capsys, "zero_table1", *settings)["parameters"] == pytest.approx(
        published, rel=BOUND[stage]
    )


@pytest.mark.matrix(24)
@pytest.mark.parametrize("runtime", ["none", "fsdp1"])
def test_a_run_fits_with_so_many_layers_and_not_with_one_more(
    runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ['cluster.gpu_memory="16 MB"', "train.steps=2", "zero.bucket_elements=500_000_000"]
    changes += [f"zero.emulate={runtime}"] if runtime != "none" else []
    settings = [word for change in changes for word in ("--set", change)]
    found = largest(capsys, "tiny", *settings)
    sure, unsure, following = found["layers"], found["unsure"], found["next"]
    assert isinstance(unsure, dict)
    assert isinstance(following, dict)
    assert isinstance(sure, int)
    assert 1 < sure < unsure["layers"] < following["layers"]
    for count, code in ((sure, 0), (unsure["layers"], 0), (following["layers"], 1)):
        assert answer(["run", "tiny", *settings, "--set", f"model.layers={count}"]) == code


CHANGES = {"cluster.gpu_memory": "20 MB"}


@pytest.fixture(scope="module")
def found() -> LargestResult:
    return zsim.largest("tiny", CHANGES)


def test_the_largest_size_surely_fits_and_a_larger_one_is_said_with_its_probability(
    found: LargestResult,
) -> None:
    assert found.sure is not None
    assert found.unsure is not None
    assert found.layers == found.sure.size < found.unsure.size
    chances = [
        zsim.run("tiny", {**CHANGES, "model.layers": layers}).fit_probability or 0.0
        for layers in (found.sure.size, found.sure.size + 1, found.unsure.size)
    ]
    assert chances[0] >= SURE > chances[1]
    facts = dict(found.facts())
    assert facts["largest"].startswith(f"{found.layers} layers")
    risk = probability_text(chances[2])
    assert facts["larger"].startswith(f"{found.unsure.size} layers")
    assert facts["larger"].endswith(f"may not fit: probability {risk}")
    said: Any = found.to_dict()
    assert said["fit_probability"] == pytest.approx(chances[0])
    assert said["unsure"]["layers"] == found.unsure.size
    assert said["unsure"]["fit_probability"] == pytest.approx(chances[2])


def test_the_largest_size_says_first_that_none_surely_fits(found: LargestResult) -> None:
    assert found.unsure is not None
    alone = replace(found, sure=None)
    facts = dict(alone.facts())
    said: Any = alone.to_dict()
    risk = probability_text(said["fit_probability"])
    assert facts["largest"].startswith(
        f"may not fit: probability {risk}, and no size reaches 95%; {found.unsure.size} layers"
    )
    assert "larger" not in facts
    assert alone.layers == found.unsure.size
    assert alone.unsure is None


def test_a_model_of_which_nothing_fits_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["largest", "tiny", "--set", 'cluster.gpu_memory="1 kB"']) == 1
    assert "not even the smallest fits" in capsys.readouterr().out


def test_no_model_is_tried_that_leaves_a_stage_of_the_pipeline_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ['cluster.gpu_memory="1 kB"', "zero.stage=1", "zero.emulate=nanotron"]
    changes += ["parallel.pipeline=7", "zero.bucket_elements=500_000_000"]
    settings = [word for change in changes for word in ("--set", change)]
    assert answer(["largest", "tiny_llama", *settings]) == 1
    out = capsys.readouterr().out
    few = int(out.split("the next size")[1].split()[0])
    assert 1 < few <= 3
    less = ["run", "tiny_llama", *settings, "--set", f"model.layers={few - 1}"]
    assert answer(less) == 2
    assert "7 stages are more than the" in capsys.readouterr().err


@pytest.mark.one_commit_in(12)
def test_host_memory_may_be_what_limits_the_largest_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "small_host.toml"
    shipped = zsim_topologies.text("dgx_a100", Part.NODE)
    node.write_text(shipped.replace('memory = "2 TB"', 'memory = "20 MB"', 1), "utf-8")
    settings = [f'cluster.node="{node}"', "cluster.fabric=single_switch", "cluster.topology=none"]
    words = [word for each in (*settings, "host.setup=every_rank") for word in ("--set", each)]
    found = largest(capsys, "tiny", *words)
    following = found["next"]
    assert isinstance(following, dict)
    # Each of four ranks builds the model in fp32.
    sizes = [int(str(each["parameters"])) for each in (found, following)]
    assert 4 * 4 * sizes[0] <= 20e6 < 4 * 4 * sizes[1]
    (tier,) = following["tiers"]
    assert (tier["tier"], tier["fits"]) == ("host", False)
    assert answer(["largest", "tiny", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "on a node of 20 MB, does not fit: most is the model as it is built 20" in out


def test_a_schedule_has_no_largest_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.json"
    assert answer(["plan", "tiny", "--schedule", str(path)]) == 0
    assert answer(["largest", str(path)]) == 2
    assert "the largest model is that of a scenario" in capsys.readouterr().err


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("option", "fewest", "step"),
    [
        ("grad_reduce_in_fp32=true", 4, 4),
        ("num_layers_in_first_pipeline_stage=1", 4, 3),  # three more on the other stages
        ("num_virtual_stages_per_pipeline_rank=2", 8, 8),
        ("account_for_embedding_in_pipeline_split=true", 3, 4),
    ],
)
def test_layers_of_a_pipeline_are_such_as_its_stages_can_have(
    option: str, fewest: int, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["zero.stage=1", "zero.emulate=megatron", "parallel.pipeline=4", "parallel.data=1"]
    changes += [f"zero.megatron.{option}", "train.steps=1", 'cluster.gpu_memory="60 MB"']
    changes += ["train.gradient_accumulation_steps=4", "zero.bucket_elements=500_000_000"]
    changes += [f"model.layers={fewest}"]
    settings = [word for change in changes for word in ("--set", change)]
    found = largest(capsys, "tiny_llama", *settings)
    layers, following = found["layers"], found["next"]
    assert isinstance(layers, int)
    assert isinstance(following, dict)
    unsure: Any = found["unsure"] or found
    assert following["layers"] == unsure["layers"] + step
    assert (layers - fewest) % step == (unsure["layers"] - fewest) % step == 0


def test_a_layout_that_says_how_many_layers_there_are_has_no_other_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ["zero.stage=1", "zero.emulate=megatron", "parallel.pipeline=2", "parallel.data=1"]
    changes += ["zero.megatron.pipeline_model_parallel_layout=Et*3|t*2L", "model.layers=5"]
    changes += ["zero.bucket_elements=500_000_000"]
    settings = [word for change in changes for word in ("--set", change)]
    found = largest(capsys, "tiny_llama", *settings)
    assert (found["layers"], found["next"]) == (5, None)
