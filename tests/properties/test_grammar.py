"""Files written by grammar: check, the simulation and real ranks say the same of each.

What check proves, the simulation and torch run as the schedule says; what either cannot run, check
has a finding about. `make test` draws 150 files, `make test-long` 50,000 (`ZSIM_CASES` other).
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
from grammar import changed_traces, schedules, studies
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.launch import NoRouteError, RefutedError, run
from zsim.api.scenario import load
from zsim.backend.backend import Job, RefusedError, RunFailedError
from zsim.backend.document import DocumentError, decode, decode_trace, encode, encode_trace
from zsim.mistake import MistakeError
from zsim.proof import check
from zsim.proof.against_trace import examine
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_study.answer.sweep_result import sweep
from zsim_study.study.outcome import Status
from zsim_torch import RankPool, TorchBackend

CASES = int(os.environ.get("ZSIM_CASES", "50000"))
SHARES = {"schedule": 200, "trace": 60, "study": 40}
"""Of 300 cases."""

TIMEOUT_S = 30.0

Pools = dict[int, RankPool]
Seen = Counter[str]


@contextmanager
def pools_of_ranks() -> Generator[Pools]:
    """Ranks for schedules of one, two and three."""
    pools = {ranks: RankPool(ranks, timeout_s=TIMEOUT_S) for ranks in (1, 2, 3)}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Generator[Pools]:
    with pools_of_ranks() as found:
        yield found


def need_one_line(error: Exception) -> None:
    if "\n" in str(error) or not str(error):
        raise AssertionError(f"not one line: {error!r}")


def simulated(job: Job) -> Trace | str:
    try:
        return SimBackend().run(job, seed=0)
    except (RefusedError, RunFailedError) as error:
        return str(error)


def executed(job: Job, pool: RankPool) -> Trace | str | None:
    """What real ranks did, or why they could not; None of what torch refuses."""
    backend = TorchBackend(pool=pool)
    if backend.refusal(job) is not None:
        return None
    try:
        return backend.run(job, seed=0)
    except RunFailedError as error:
        return str(error)


def agree_on_schedule(text: str, pools: Pools, seen: Seen) -> None:
    seen["schedule"] += 1
    try:
        document = decode(text)
    except DocumentError as error:
        need_one_line(error)
        return
    assert decode(encode(document)) == document
    seen["schedule decoded"] += 1
    findings = check(document.schedule)
    job = document.job()
    done = simulated(job)
    if isinstance(done, Trace):
        seen["schedule ran"] += 1
        assert not examine(document.schedule, done)
    else:
        assert findings, done
    if findings:
        return
    seen["schedule proved"] += 1
    real = executed(job, pools[document.schedule.mesh.size])
    if real is None:
        return
    assert isinstance(real, Trace), real
    assert not examine(document.schedule, real)
    assert isinstance(done, Trace)
    for one in real.ranks:  # each moves on the wire what the simulation says of it, or of its like
        own = [each for each in done.ranks if each.rank == one.rank]
        (like, *_) = own or [each for each in done.ranks if each.role == one.role]
        moved = [Counter(each.bytes for each in which.transfers) for which in (one, like)]
        assert moved[0] == moved[1]
    seen["schedule executed"] += 1


def agree_on_trace(text: str, alter: Callable[[dict[str, object]], bool], seen: Seen) -> None:
    try:
        document = decode(text)
    except DocumentError:
        return
    done = simulated(document.job())
    if isinstance(done, str):
        return
    seen["trace"] += 1
    tree = json.loads(encode_trace(done))
    changed = alter(tree)
    trace: Trace | None
    try:
        trace = decode_trace(json.dumps(tree))
    except DocumentError as error:
        need_one_line(error)
        trace = None
    if trace is None:
        assert changed
        return
    seen["trace decoded"] += 1
    findings = examine(document.schedule, trace)
    assert changed or not findings
    assert all(each.where and each.why for each in findings)


def agree_on_study(study: dict[str, object], seen: Seen) -> None:
    seen["study"] += 1
    try:
        found = sweep(study)
    except MistakeError as mistake:
        need_one_line(mistake)
        return
    seen["study ran"] += 1
    assert all("internal error" not in row.outcome.reason for row in found.study.rows)
    row = found.study.rows[0]
    if row.outcome.status not in {Status.DONE, Status.FULL} or row.outcome.summary is None:
        return
    if found.study.held == "nothing":
        return
    changes = {name: row.values[name] for (name,) in found.study.fields if name in row.values}
    changes |= {
        "cluster.nodes": row.values.get("cluster.nodes", 1),
        "train.micro_batch_size": row.micro_batch_size,
        "train.gradient_accumulation_steps": row.accumulation_steps,
    }
    base = study["base"]
    assert isinstance(base, dict)
    try:
        alone = run(load(base["scenario"], changes))
    except (MistakeError, RefutedError, NoRouteError):
        return
    seen["study compared"] += 1
    assert alone.step_time_s == row.outcome.summary.step_time_s


def agree(pools: Pools, cases: int) -> Seen:
    """Draw so many files, and return how many there were of each sort."""
    seen: Seen = Counter()

    def bounded(kind: str) -> settings:
        return settings(max_examples=max(1, cases * SHARES[kind] // 300))

    @bounded("schedule")
    @given(schedules())
    def on_schedules(text: str) -> None:
        agree_on_schedule(text, pools, seen)

    @bounded("trace")
    @given(schedules(), st.data())
    def on_traces(text: str, data: st.DataObject) -> None:
        agree_on_trace(text, lambda tree: data.draw(changed_traces(tree)), seen)

    @bounded("study")
    @given(studies())
    def on_studies(study: dict[str, object]) -> None:
        agree_on_study(study, seen)

    on_schedules()
    on_traces()
    on_studies()
    return seen


INSIDE = (
    "schedule ran",
    "schedule proved",
    "schedule executed",
    "trace decoded",
    "study ran",
    "study compared",
)


def halves(seen: Seen) -> None:
    """At least half of what is drawn reaches the inside."""
    assert seen["schedule ran"] >= seen["schedule"] / 2, seen
    assert seen["schedule proved"] >= seen["schedule"] / 5, seen
    assert seen["schedule executed"] >= seen["schedule"] / 5, seen
    assert seen["trace decoded"] >= seen["trace"] / 2, seen
    assert seen["study ran"] >= seen["study"] / 2, seen
    assert seen["study compared"] >= seen["study"] / 5, seen


@pytest.mark.one_commit_in(24)
def test_files_by_grammar_are_judged_alike_everywhere(pools: Pools) -> None:
    """Of each sort some reach the inside; 20 studies are too few to say how large a share does."""
    seen = agree(pools, 150)
    assert all(seen[sort] for sort in INSIDE), seen


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_many_files_by_grammar_are_judged_alike_everywhere(pools: Pools) -> None:
    halves(agree(pools, CASES))
