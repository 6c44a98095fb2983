"""A run that does not fit says when, what had the memory, and which changes help: they are run."""

import json
import re

import pytest

import zsim
from zsim.cli.main import answer
from zsim.runtimes.lookup import runtimes
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy

SMALL = ("train.steps=2", "zero.stage=1", "train.micro_batch_size=8", "zero.bucket_elements=1e9")
LIMITS = ("6 MB", "10 MB")
"""Less than the 10.5 MB that the run reserves: its forward stops at a block, or at the head."""


@pytest.mark.matrix(6)
@pytest.mark.parametrize("limit", LIMITS)
def test_each_remedy_makes_the_run_fit_and_takes_as_long_as_it_says(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = options(*SMALL, f'cluster.gpu_memory="{limit}"')
    assert answer(["run", "tiny", *settings, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    lack = found["out_of_memory"]
    assert lack["needed_bytes"] > lack["capacity_bytes"]
    assert lack["capacity_bytes"] == int(limit.split(maxsplit=1)[0]) * 10**6
    largest = lack["largest_consumer"]
    assert lack["alive_bytes"][largest["kind"]] == max(lack["alive_bytes"].values())
    assert largest["bytes"] >= largest["largest_buffer_bytes"] > 0
    remedies = found["remedies"]
    assert 1 <= len(remedies) <= 3
    times = [each["step_time_s"] for each in remedies]
    assert times == sorted(times)
    for each in remedies:
        assert answer(["run", "tiny", *settings, *options(*each["settings"]), "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["step_time_s"] == each["step_time_s"]
        assert again["peak_reserved_bytes"] == each["peak_reserved_bytes"]
        # As many sequences in a step: the tokens of the first run over its time.
        tokens = found["tokens_per_s"] * found["step_time_s"]
        assert again["tokens_per_s"] * again["step_time_s"] == pytest.approx(tokens)


@pytest.mark.one_commit_in(9)
def test_the_answer_is_no_in_at_most_15_lines(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ("train.micro_batch_size=32", "zero.stage=1", "zero.emulate=deepspeed", "train.steps=1")
    few = ("model.layers=4", "cluster.nodes=1", 'cluster.gpu_memory="30 GB"')
    assert answer(["run", "llama2_7b", *options(*wide, *few)]) == 1
    lines = capsys.readouterr().out.splitlines()
    title = next(at for at, line in enumerate(lines) if line.startswith("fits"))
    assert len(lines) <= title + 14
    assert max(map(len, lines)) <= 100
    assert re.match("fits +no: tensors need ", lines[title])
    assert any(line.startswith("it would fit with  ") for line in lines)
    assert any(re.match("out of memory at +forward of ", line) for line in lines)


@pytest.mark.parametrize(
    ("runtime", "stage"),
    [(name, stage) for name, each in runtimes().items() for stage in each.options.stages],
)
def test_each_way_off_the_device_that_a_runtime_names_is_one(runtime: str, stage: int) -> None:
    known = runtimes()[runtime].options.offloads(stage=stage)
    emulated = {"zero.emulate": runtime, "zero.stage": stage, "zero.bucket_elements": None}
    for options_of_way in known:
        settings = [f"zero.{runtime}.{each}" for each in options_of_way]
        loaded = zsim.load("tiny", emulated).changed(settings)
        found = loaded.strategy.zero.emulate
        assert found is not None
        assert set(found.tiers(stage=stage).values()) == {MemoryTier.HOST}
    of_deepspeed = 1 + (stage == 3) if stage else 0
    assert len(known) == {"fsdp2": 1, "deepspeed": of_deepspeed}.get(runtime, 0)


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    ("runtime", "megabytes", "helps"),
    [
        ("megatron", 9, "parallel.pipeline=4"),
        ("megatron", 12, "parallel.pipeline=2"),
        ("nanotron", 16, "parallel.pipeline=4"),
        ("fsdp2", 4, "parallel.tensor=2"),  # beside offload, on the ranks that there are
    ],
)
def test_other_axes_take_their_ranks_from_replicas(
    runtime: str, megabytes: int, helps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        f"zero.emulate={runtime}",
        f"zero.stage={3 if runtime == 'fsdp2' else 1}",
        "zero.bucket_elements=none",
        "model.layers=8",
        "model.hidden_size=128",
        "model.sequence_length=8",
        "train.steps=1",
        "cluster.allocator=exact",
        f'cluster.gpu_memory="{megabytes} MB"',
    ]
    assert answer(["run", "tiny", *options(*settings), "--json"]) == 1
    found = [each["settings"] for each in json.loads(capsys.readouterr().out)["remedies"]]
    assert helps in [setting for each in found for setting in each]
    tight = zsim.load("tiny").changed(settings).strategy
    for each in found:
        strategy = zsim.load("tiny").changed([*settings, *each]).strategy
        assert strategy.ranks == tight.ranks
        assert sequences(strategy) == sequences(tight)


@pytest.mark.one_commit_in(6)
def test_where_nothing_helps_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    settings = options("train.steps=1", 'cluster.gpu_memory="1 kB"')
    assert answer(["run", "tiny", *settings]) == 1
    assert "with no change that was tried" in capsys.readouterr().out


def sequences(strategy: Strategy) -> int:
    """Return for how many micro-batches, all of one size, a step has tokens."""
    readers = strategy.replicas // strategy.parallel.context  # those that share one have the same
    return readers * strategy.train.gradient_accumulation_steps


def options(*settings: str) -> list[str]:
    """Settings, as the command line takes them."""
    return [word for setting in settings for word in ("--set", setting)]
