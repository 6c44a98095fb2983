"""What one line says about a file that is no schedule: the path inside it, and what is allowed."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from drawn_clusters import NO_MODEL, RATES

import zsim_topologies
from zsim.api.scenario import load
from zsim.backend.backend import Job
from zsim.backend.document import (
    Document,
    DocumentError,
    decode,
    decode_trace,
    encode,
    encode_trace,
)
from zsim.cluster.cluster import Cluster, Fabric, Gpu, Link, Tier
from zsim.cluster.fabric_kind import FAT_TREE, FabricKind
from zsim.memory.host_setup import HostSetup
from zsim.model.equal_units import equal_units
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Contract, Kind, Schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import (
    Event,
    LedgerEntry,
    LinkUse,
    OutOfMemory,
    RankTrace,
    Trace,
    Transfer,
)
from zsim_lab.fit.constants import START

CLUSTER = Cluster(
    name="four",
    nodes=1,
    gpus_per_node=4,
    gpu=Gpu(name="any", memory_bytes=1, memory_bytes_per_s=1, rates=RATES),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)


def schedule() -> Schedule:
    build = ScheduleBuilder.of("sum", data=4)
    data = build.group("data", "data")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    build.step.all_reduce("sum", data, x.all)
    build.step.copy("copy", x[:4], x[4:])
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=2),
        train=Train(optimizer=Adam(weight_decay=float("inf"))),
    )
    return build.schedule(Contract(strategy=strategy))


def plain() -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(encode(Document(schedule=schedule()))))


def refusal(data: object) -> str:
    with pytest.raises(DocumentError) as caught:
        decode(json.dumps(data))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_infinite_number_survives_in_plain_json() -> None:
    text = encode(Document(schedule=schedule()))
    assert "Infinity" not in text
    assert decode(text).schedule == schedule()


OTHER_KIND = FabricKind(name="of somebody else", has_tiers=True, rails_meet=False)


@pytest.mark.parametrize("kind", [FAT_TREE, OTHER_KIND], ids=str)
def test_constants_of_a_network_and_kinds_of_fabrics_survive(kind: FabricKind) -> None:
    fabric = Fabric(kind=kind, tiers=(Tier(name="leaf", nodes_below=2),))
    cluster = replace(CLUSTER, network=START, fabric=fabric)
    document = Document(schedule=schedule(), model=NO_MODEL, cluster=cluster)
    data = cast("dict[str, Any]", json.loads(encode(document)))
    assert data["cluster"]["network"] == dict(START.numbers)
    assert decode(json.dumps(data)).cluster == cluster
    data["cluster"]["fabric"]["kind"] = "mesh"
    assert "cluster.fabric.kind: 'mesh' must be one of single_switch, " in refusal(data)
    data["cluster"]["fabric"]["kind"] = {"name": "mesh"}
    assert "cluster.fabric.kind: an object must have name, has_tiers, " in refusal(data)


def test_a_wrong_value_is_named_with_its_path() -> None:
    data = plain()
    data["schedule"]["programs"][0]["step"][1]["source"]["size"] = "4"
    assert refusal(data) == 'schedule.programs[0].step[1].source.size: "4" must be a whole number'


def test_a_value_out_of_range_is_named_with_the_path_of_what_refuses_it() -> None:
    data = plain()
    data["schedule"]["programs"][0]["step"][1]["source"]["size"] = -3
    assert refusal(data) == (
        "schedule.programs[0].step[1].source: view of x: start 0 and size -3 must be >= 0"
    )


def test_an_operation_of_an_unknown_type_is_refused_with_those_known() -> None:
    data = plain()
    data["schedule"]["programs"][0]["step"][0]["type"] = "Gather"
    assert refusal(data).startswith(
        'schedule.programs[0].step[0].type: "Gather" must be one of Allocate, Free, Compute'
    )
    del data["schedule"]["programs"][0]["step"][0]["type"]
    assert refusal(data).startswith("schedule.programs[0].step[0].type: missing; must be one of")


def test_a_missing_key_and_an_unknown_one_are_named() -> None:
    data = plain()
    step = data["schedule"]["programs"][0]["step"]
    step[0]["grop"] = step[0].pop("group")
    assert refusal(data).startswith(
        "schedule.programs[0].step[0].grop: unknown key; did you mean group? AllReduce has id"
    )
    del step[0]["grop"]
    assert refusal(data) == "schedule.programs[0].step[0].group: missing"


def test_a_schedule_that_is_not_well_formed_is_refused_with_the_operation() -> None:
    data = plain()
    data["schedule"]["programs"][0]["step"][1]["after"] = ["step/nothing"]
    assert refusal(data) == "schedule: step/copy: after 'step/nothing', which is no operation"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"zsim": "trace"}, 'zsim: "trace" must be "job"'),
        ({"version": 2}, "version: 2 must be 1"),
        ({"version": True}, "version: true must be 1"),
        ({"steps": 0}, "steps: 0 must be at least 1"),
        ({"steps": 1.0}, "steps: 1.0 must be a whole number"),
        ({"model": []}, "model: a list must be an object: Model"),
        ({"schedule": None}, "schedule: null must be an object: Schedule"),
    ],
)
def test_the_frame_of_a_document_is_judged_too(change: dict[str, object], why: str) -> None:
    assert refusal({**plain(), **change}) == why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: Expecting value (line 1, column 1)"),
        ("{", "not JSON: Expecting property name enclosed in double quotes (line 1, column 2)"),
        ("[]", 'must be an object with "zsim": "job"'),
        ("{}", 'zsim: missing; must be "job"'),
        ('{"zsim": "job"}', "version: missing; must be 1"),
        ('{"zsim": "job", "version": 1}', "schedule: missing"),
        ('{"zsim": 1, "zsim": 2}', 'key "zsim" is repeated in one object'),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ('{"zsim": ' + "9" * 5000 + "}", "not JSON: a number has too many digits"),
    ],
)
def test_text_that_is_no_document_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(DocumentError) as caught:
        decode(text)
    assert str(caught.value) == why


def test_a_gpu_that_computes_nothing_is_refused() -> None:
    data = plain()
    rate = {"dtype": "fp32", "peak": 1, "matmul": 0, "elementwise": 1}
    gpu = {"name": "x", "memory_bytes": 1, "memory_bytes_per_s": 1, "rates": [rate]}
    data["cluster"] = {"name": "x", "nodes": 1, "gpus_per_node": 1, "gpu": gpu}
    assert refusal(data) == "cluster.gpu.rates[0]: rate of fp32: matmul must be more than 0"


def test_a_trace_survives() -> None:
    entry = LedgerEntry(
        operation="a", step=0, pool="device", buffer="x", kind=Kind.SAVED, change_bytes=-8
    )
    transfer = Transfer(
        operation="a", step=0, group="data", collective="AllGather", elements=3, bytes=12,
        scalar=False,
    )  # fmt: skip
    rank = RankTrace(
        rank=0,
        role="all",
        stands_for=4,
        events=(Event(operation="a", step=-1, stream="compute", start_ps=0, end_ps=10**15),),
        book=(entry,),
        transfers=(transfer,),
        losses=(1 / 3, float("inf")),
    )
    trace = Trace(
        backend="sim",
        schedule="sum",
        seed=0,
        steps=1,
        ranks=(rank,),
        step_end_ps=(10**15,),
        links=(LinkUse(link="nic", count=8, bytes=2**60, capacity_bytes_per_s=10**11),),
        out_of_memory=OutOfMemory(
            rank=0, pool="device", operation="a", needed_bytes=9, capacity_bytes=8,
            alive=(("x", 1),),
        ),
        observed=(("live", 0.1),), error_text="measured",
    )  # fmt: skip
    assert decode_trace(encode_trace(trace)) == trace
    text = encode_trace(trace)
    earlier = text.replace('"error_text"', '"trust"')
    assert earlier != text
    assert decode_trace(earlier) == trace
    for old, new, why in (
        (re.search(r'"ranks": \[.*?\n  \]', text, re.DOTALL), '"ranks": []', "ranks: none"),
        (re.search(r'"steps": 1', text), '"steps": 0', "steps: 0 must be at least 1"),
        (re.search(r'"steps": 1', text), '"steps": 3', "step_end_ps: 1, must be 3"),
    ):
        assert old is not None
        with pytest.raises(DocumentError, match=why):
            decode_trace(text.replace(old[0], new))


def test_a_job_and_its_document_say_the_same() -> None:
    data = Document(schedule=schedule())
    with pytest.raises(DocumentError, match=r"^model: missing; a run needs it, a check does not$"):
        data.job()
    model = equal_units(parameters=64, tokens=1)
    job = Job(schedule=data.schedule, model=model, cluster=zsim_topologies.load("dgx2_infiniband"))
    assert Document.of(job).job() == job
    built = replace(job, setup=HostSetup.EVERY_RANK)
    assert decode(encode(Document.of(built))).job() == built
    with pytest.raises(DocumentError, match=r"^cluster: missing; "):
        replace(Document.of(job), cluster=None).job()


@pytest.mark.one_commit_in(6)
def test_a_job_with_the_constants_that_ship_is_read_back_as_it_was() -> None:
    """They say on which date they were judged."""
    document = load("llama2_7b").document
    assert document.cluster is not None
    assert decode(encode(document)) == document


@pytest.mark.matrix(9)
@pytest.mark.parametrize("date", ["yesterday", 20260131, "2026-02-30"])
def test_what_is_no_date_is_refused(date: object) -> None:
    text = encode(load("llama2_7b").document)
    data = json.loads(text)
    dated = next(each for each in dictionaries(data) if "date" in each)
    dated["date"] = date
    with pytest.raises(DocumentError, match='must be a date such as "2026-01-31"'):
        decode(json.dumps(data))


def dictionaries(value: object) -> Iterator[dict[str, object]]:
    """Yield every JSON object inside `value`."""
    if isinstance(value, dict):
        given = cast("dict[str, object]", value)
        yield given
        for each in given.values():
            yield from dictionaries(each)
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            yield from dictionaries(each)
