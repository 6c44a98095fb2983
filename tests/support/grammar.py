"""Schedules, traces and studies as files, written by grammar: most decode, and most of them run.

Random bytes stop at the reader. Here a file is right to begin with, and is changed in ways that the
grammar of its format allows: operations left out, repeated, moved, on another stream, on other
elements, with fewer edges; events that end later; axes and values that a scenario may have.
"""

import json
from typing import Any

from drawn_clusters import NO_MODEL
from drawn_gpus import cluster
from drawn_programs import programs
from hypothesis import strategies as st

from zsim.backend.document import Document, encode

Tree = Any
STREAMS = ("compute", "communication", "other")


@st.composite
def schedules(draw: st.DrawFn) -> str:
    """A schedule in JSON: as a writer makes it, in order, or changed."""
    made = draw(programs(filled=draw(st.integers(0, 3)) > 0))
    document = Document(
        schedule=made,
        model=NO_MODEL,
        cluster=cluster(made.mesh.size, made.mesh.size),
        steps=draw(st.integers(1, 2)),
    )
    tree = json.loads(encode(document))
    if draw(st.integers(0, 3)):
        in_order(tree)
    for _ in range(draw(st.integers(0, 2))):
        change(draw, tree)
    return json.dumps(tree)


def steps_of(tree: Tree) -> list[list[Tree]]:
    """The operations of a step of each program."""
    return [program["step"] for program in tree["schedule"]["programs"]]


def in_order(tree: Tree) -> None:
    """Every operation waits for the last of each stream, so that nothing races."""
    for step in steps_of(tree):
        last: dict[str, str] = {}
        for operation in step:
            if "stream" in operation or operation["type"] == "Branch":
                operation["after"] = sorted(last.values())
            if operation["type"] == "Branch":
                for side in ("then", "otherwise"):
                    inner = dict(last)
                    for each in operation.get(side, []):
                        if "stream" in each:
                            each["after"] = sorted(inner.values())
                            inner[each["stream"]] = each["id"]
            elif "stream" in operation:
                last[operation["stream"]] = operation["id"]


def change(draw: st.DrawFn, tree: Tree) -> None:
    """Change one thing that may be otherwise."""
    step = draw(st.sampled_from(steps_of(tree)))
    if not step:
        return
    at = draw(st.integers(0, len(step) - 1))
    operation = step[at]
    match draw(st.sampled_from(["leave out", "swap", "stream", "edges", "view", "again"])):
        case "leave out":
            step.pop(at)
        case "swap" if at + 1 < len(step):
            step[at], step[at + 1] = step[at + 1], operation
        case "stream" if "stream" in operation:
            operation["stream"] = draw(st.sampled_from(STREAMS))
        case "edges":
            operation["after"] = operation.get("after", [])[: draw(st.integers(0, 1))]
        case "view":
            views = [each for each in operation.values() if isinstance(each, dict)]
            views = [each for each in views if "buffer" in each]
            if views:
                view = draw(st.sampled_from(views))
                key = draw(st.sampled_from(["start", "size", "stride"]))
                view[key] = draw(st.integers(0, 7))
        case "again":
            copy = json.loads(json.dumps(operation))
            copy["id"] = f"{operation['id']}/again"
            step.insert(draw(st.integers(0, len(step))), copy)
        case _:
            pass


@st.composite
def changed_traces(draw: st.DrawFn, tree: Tree) -> bool:
    """Change one thing that a run recorded; return whether that says something else."""
    rank = draw(st.sampled_from(tree["trace"]["ranks"]))
    events, book = rank["events"], rank["book"]
    match draw(st.sampled_from(["nothing", "event", "book", "later", "rank", "steps"])):
        case "event" if events:
            events.pop(draw(st.integers(0, len(events) - 1)))
        case "book" if book:
            book.pop(draw(st.integers(0, len(book) - 1)))
        case "later" if events:
            event = draw(st.sampled_from(events))
            event["start_ps"], event["end_ps"] = event["end_ps"] + 5, event["start_ps"]
        case "rank":
            rank["rank"] = draw(st.integers(-1, 9))
        case "steps":
            tree["trace"]["steps"] = draw(st.integers(0, 5))
        case _:
            return False
    return True


FIELDS: dict[str, list[object]] = {
    "zero.stage": [0, 1, 2, 3],
    "zero.bucket_elements": [1, 1000, 10**9],
    "zero.prefetch_units": [0, 1, 5],
    "zero.emulate": ["fsdp1", "fsdp2", "deepspeed", "megatron", "nanotron", "none"],
    "parallel.tensor": [1, 2, 3],
    "parallel.data": [1, 2, 4],
    "activations.checkpointing": ["none", "full", "selective"],
    "train.precision": ["fp32", "bf16", "fp16"],
    "train.micro_batch_size": [1, 2],
    "train.gradient_accumulation_steps": [1, 2, 7],
    "train.steps": [1, 2],
    "model.layers": [1, 2, 4],
    "model.hidden_size": [64, 96],
    "cluster.nodes": [1, 2],
    "cluster.gpu_memory": ["1 MB", "80 GB"],
    "cluster.nics_per_node": [1, 8],
    "nothing.there": [1],
    "zero.stages": [1],
}
CONDITIONS = (
    "zero.stage < 3",
    "cluster.nodes * 8 >= parallel.tensor",
    "not (train.precision == 'fp16' and zero.stage == 0)",
    "model.layers % 2 == 0 or train.steps in [1, 2]",
)


@st.composite
def studies(draw: st.DrawFn) -> dict[str, Any]:
    """Tables of a study of a few runs."""
    names = draw(st.lists(st.sampled_from([*FIELDS]), min_size=1, max_size=3, unique=True))
    axes: list[dict[str, object]] = []
    for name in names:
        values = st.sampled_from(FIELDS[name])
        axes.append(
            {"field": name, "values": draw(st.lists(values, min_size=1, max_size=2, unique=True))}
        )
    study: dict[str, Any] = {
        "question": draw(st.sampled_from(["Which?", "[/] %s {0}"])),
        "base": {
            "scenario": draw(st.sampled_from(["tiny", "tiny_llama"])),
            "cluster": {"nodes": 1},
        },
        "axis": axes,
    }
    if draw(st.booleans()):
        study["where"] = {
            draw(st.sampled_from(["keep", "drop"])): [draw(st.sampled_from(CONDITIONS))]
        }
    if draw(st.booleans()):
        study["goal"] = {"minimize": draw(st.sampled_from(["step_time", "gpus", "cost"]))}
    return study
