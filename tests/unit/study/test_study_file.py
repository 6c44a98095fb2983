"""Study files: what they mean, and what is wrong with one in a line."""

import re
from typing import Any

import pytest

from zsim.scenario.changes import changed
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import from_tables
from zsim_study.study.axis import axes_of, combinations
from zsim_study.study.condition import condition
from zsim_study.study.file import StudyError, parse
from zsim_study.study.study_plan import StudyPlan, planned
from zsim_study.workers.study_source import reader

BASE = """
[base]
title = "small"
model = { layers = 2, hidden_size = 64, attention_heads = 4, sequence_length = 32, vocab_size = 64 }
cluster = { topology = "dgx_a100_infiniband", nodes = 1 }
zero = { stage = 1 }
train = { micro_batch_size = 4, gradient_accumulation_steps = 2, precision = "bf16" }
"""

STAGES = """
[[axis]]
field = "zero.stage"
values = [0, 1, 2, 3]
"""

NODES = """
[[axis]]
name = "size"
field = "cluster.nodes"
values = [1, 2, 4]
"""


def plan(*parts: str, top: str = "") -> StudyPlan:
    study = parse("\n".join([f'question = "which?"\n{top}', BASE, *parts]))
    return planned(study, study.base, reader("study.toml"))


def test_a_grid_has_every_choice_with_every_other_the_last_axis_fastest() -> None:
    found = plan(STAGES, NODES)
    assert [run.name for run in found.runs][:4] == [
        "stage=0, size=1",
        "stage=0, size=2",
        "stage=0, size=4",
        "stage=1, size=1",
    ]
    assert len(found.runs) == 4 * 3
    assert found.runs[-1].values == {"zero.stage": 3, "cluster.nodes": 4}
    resolved = found.runs[-1].resolved
    assert resolved is not None
    assert (resolved.strategy.zero.stage, resolved.cluster.nodes) == (3, 4)


def test_lists_that_go_together_and_variants_change_several_fields() -> None:
    zipped = '[[axis]]\nname = "cut"\nlabels = ["wide", "deep"]\n'
    zipped += 'zip = { "cluster.nodes" = [2, 4], "parallel.tensor" = [2, 4] }'
    variants = '[[axis]]\nname = "trouble"\nvariants.none = {}\n'
    variants += 'variants.slow.fault = [{ kind = "gpu", rank = 0, factor = 2 }]'
    found = plan(zipped, variants)
    assert [run.labels for run in found.runs] == [
        ("wide", "none"),
        ("wide", "slow"),
        ("deep", "none"),
        ("deep", "slow"),
    ]
    settled = [run.resolved for run in found.runs]
    assert [each and each.strategy.parallel.tensor for each in settled] == [2, 2, 4, 4]
    assert [each and len(each.faults) for each in settled] == [0, 1, 0, 1]


def test_conditions_keep_and_drop_combinations() -> None:
    where = "[where]\nkeep = ['zero.stage < 3 or size == \"4\"']\n"
    where += "drop = ['cluster.nodes * 8 in (8, 16) and not zero.stage >= 1']"
    found = plan(STAGES, NODES, where)
    kept = [run.labels for run in found.runs]
    assert kept == [
        ("0", "4"),
        *((stage, size) for stage in "12" for size in "124"),
        ("3", "4"),
    ]
    assert found.dropped == 12 - len(kept)


def batches_of(resolved: ResolvedScenario) -> tuple[int, int]:
    return resolved.micro_batch_size, resolved.strategy.train.gradient_accumulation_steps


def test_the_global_batch_is_held_and_gradient_accumulation_makes_up_for_replicas() -> None:
    # 8 replicas x 4 x 2 = 64: with 16 replicas 4 x 1, with 32 there are 2 left for each.
    found = plan(NODES)
    assert "64 sequences" in found.held
    batches = [batches_of(run.resolved) for run in found.runs if run.resolved is not None]
    assert batches == [
        (4, 2),
        (4, 1),
        (2, 1),
    ]


def test_a_micro_batch_that_the_base_does_not_give_stays_what_it_comes_to() -> None:
    base = BASE.replace("micro_batch_size = 4", "global_batch_size = 64")
    study = parse(f'question = "which?"{base}{NODES}')
    found = planned(study, study.base, reader("study.toml"))
    batches = [batches_of(run.resolved) for run in found.runs if run.resolved is not None]
    assert [micro for micro, _ in batches] == [4, 4, 2]


def test_where_an_axis_sets_a_batch_size_the_other_follows_or_nothing_is_held() -> None:
    micro = '[[axis]]\nfield = "train.micro_batch_size"\nvalues = [1, 2]'
    found = [batches_of(run.resolved) for run in plan(micro).runs if run.resolved is not None]
    assert found == [(1, 8), (2, 4)]
    loose = plan(NODES, top='hold = "nothing"')
    batches = [batches_of(run.resolved) for run in loose.runs if run.resolved is not None]
    assert set(batches) == {(4, 2)}
    assert loose.held.startswith("nothing")


def test_a_combination_that_cannot_be_is_a_run_with_its_reason() -> None:
    tensor = '[[axis]]\nfield = "parallel.tensor"\nvalues = [1, 3]'
    shape = '[[axis]]\nname = "heads"\nzip = { "model.attention_heads" = [4, 3], '
    shape += '"model.hidden_size" = [64, 63], "cluster.nodes" = [1, 3] }'
    found = {run.labels: run.impossible for run in plan(tensor, shape).runs}
    assert found["1", "4 x 64 x 1"] == ""
    assert "3 must divide the 8 ranks" in found["3", "4 x 64 x 1"]


def test_what_equal_schedules_are_made_from_is_one_value() -> None:
    nics = '[[axis]]\nfield = "cluster.nics_per_node"\nvalues = [8, 4, 2]'
    runs = plan(STAGES, nics).runs
    assert len({run.resolved.schedule_key for run in runs if run.resolved is not None}) == 4
    assert len({id(run.resolved.strategy) for run in runs if run.resolved is not None}) == 4


WRONG = {
    STAGES.replace("stage", "stge"): "axis.0.field: zero.stge: unknown key; did you mean stage?",
    STAGES.replace("zero.stage", "zero"): "zero=0: zero: 0 must be a table",
    STAGES.replace("[0, 1, 2, 3]", "[1, 9]"): "stage=9: zero.stage: 9 must be 0, 1, 2 or 3",
    STAGES.replace("[0, 1, 2, 3]", "[1, 1]"): "axis.0.values: '1' is there twice",
    "[[axis]]\n[axis.variants]\nnow = {}\nlater = {}": (
        "axis.0.variants: now, later of axis 'variant' change nothing"
    ),
    STAGES.replace("[0, 1, 2, 3]", "[]"): "axis.0.values: empty",
    STAGES + STAGES: "axis.1: zero.stage is on axis 'stage' too",
    '[[axis]]\nfield = "zero.stage"': "axis.0.values: none given",
    "[[axis]]\nvalues = [1]": "axis.0.field: stands with values",
    '[[axis]]\nzip = { "zero.stage" = [1, 2], "cluster.nodes" = [1] }': "axis.0.zip: lists must be",
    '[[axis]]\nfeild = "zero.stage"\nvalues = [1]': "axis.0.feild: unknown key; did you mean field",
    "": "axis: missing",
    '[[axis]]\nfield = "parallel.tensor"\nvalues = [1, 3]': "tensor=3: parallel.tensor: 3 must di",
    '[[axis]]\nfield = "cluster.topology"\nvalues = ["abacus"]': "topology=abacus: cluster.topolo",
    STAGES + '[where]\nkeep = ["zero.stge > 1"]': "where.keep: 'zero.stge > 1': zero.stge: unknown",
    STAGES + '[where]\nkeep = ["zero.stage >"]': "where.keep: 'zero.stage >' must be a condition",
    STAGES + '[where]\nkeep = ["zero.stage > 5"]': "where: drops all 4 combinations",
    STAGES
    + '[where]\nkeep = ["parallel.data > 5"]': "where: stage=0: 'parallel.data > 5': parallel.da",
    STAGES
    + "[where]\nkeep = [\"'a' > zero.stage\"]": "where: stage=0: \"'a' > zero.stage\": compa",
    STAGES + '[where]\nkeep = ["1 / zero.stage > 0"]': "where: stage=0: '1 / zero.stage > 0': divi",
    NODES.replace("1, 2, 4", "2, 1") + '[[axis]]\nname = "GPU"\n[axis.variants]\nsound = {}\n'
    'slow = { fault = [{ kind = "gpu", rank = 9, factor = 2 }] }': (
        "size=1, GPU=slow: fault.0.rank: 9 must be 0 to 7: there are 8 ranks"
    ),
    STAGES + '[where]\ndrop = ["print(1)"]': "where.drop: 'print(1)' is not for a condition",
    STAGES + '[goal]\nminimize = "time"': "goal.minimize: 'time' must be step_time, cost_per_token",
    STAGES + '[goal]\nminimize = "cost_per_token"': "goal.minimize: needs price_per_gpu_hour",
    STAGES + "[goal]\nmax_gpus = 0": "goal.max_gpus: 0 must be at least 1",
    STAGES + "[gaol]": "gaol: unknown key; did you mean goal?",
    "[[axis": "not TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_one_line_before_anything_runs(text: str) -> None:
    with pytest.raises(StudyError, match=f"^{re.escape(WRONG[text])}") as error:
        plan(text)
    assert "\n" not in str(error.value)


VALUES: dict[str, Any] = {
    "zero.stage": 2,
    "cluster.nodes": 3,
    "train.precision": "bf16",
    "run": "a",
}

CONDITIONS = {
    "zero.stage == 2": True,
    "1 < zero.stage < 3 <= cluster.nodes": True,
    "cluster.nodes % 2 == 0": False,
    "-cluster.nodes + 6 // 2 == 0 and cluster.nodes / 2 == 1.5": True,
    "not (zero.stage == 2 or cluster.nodes == 4)": False,
    "train.precision in ('bf16', 'fp16') and run != 'b'": True,
    "train.precision not in ['bf16']": False,
    "cluster.nodes * 8 - 4 > 20": False,
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_means_what_it_says(text: str) -> None:
    assert condition(text, ["run"]).holds(VALUES.__getitem__) is CONDITIONS[text]


def test_changes_leave_what_they_were_made_from_as_it_was() -> None:
    tables = parse(f'question = "?"\n{BASE}{STAGES}').base
    again = changed(
        tables, {"zero.stage": 3, "zero.fsdp2.reduce_dtype": "fp32", "network.chunks": 2}
    )
    assert tables["zero"] == {"stage": 1}
    assert again["zero"] == {"stage": 3, "fsdp2": {"reduce_dtype": "fp32"}}
    assert from_tables(changed(tables, {"network.chunks": 2})).network.chunks == 2


def test_there_are_as_many_combinations_as_choices_multiply_to() -> None:
    axes = axes_of(parse(f'question = "?"\n{BASE}{STAGES}{NODES}').axis)
    found = list(combinations(axes))
    assert len({each.labels for each in found}) == len(found) == 12


@pytest.mark.parametrize("text", ["'a' * 9999999999", "'%3999999999d' % 1", "'%s' % zero.stage"])
def test_text_is_no_operand_of_arithmetic(text: str) -> None:
    with pytest.raises(StudyError, match="compares what cannot be compared"):
        plan(STAGES, f'[where]\nkeep = ["{text} == 1"]\n')


def test_more_combinations_than_anybody_plans_are_refused_at_once() -> None:
    fields = ("model.layers", "model.hidden_size", "model.vocab_size", "cluster.nodes")
    numbers = list(range(1, 101))
    axes = [f'[[axis]]\nfield = "{name}"\nvalues = {numbers}\n' for name in fields]
    with pytest.raises(StudyError, match="axis: 100,000,000 combinations must be at most"):
        plan(*axes)


@pytest.mark.parametrize(
    ("goal", "line"),
    [
        ('minimize = "train.optimizer"', "goal.minimize: train.optimizer is 'adam' in stage=0"),
        (
            'minimize = "cost_per_token"\nprice_per_gpu_hour = { H100 = 2.0 }',
            "goal.price_per_gpu_hour: A100-SXM4-80GB of stage=0 has no price",
        ),
    ],
)
def test_what_is_sought_is_known_of_every_run_before_one_runs(goal: str, line: str) -> None:
    with pytest.raises(StudyError) as error:
        plan(STAGES, f"[goal]\n{goal}\n")
    assert str(error.value).startswith(line)
