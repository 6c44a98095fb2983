"""Holistic Trace Analysis reads our traces, and divides their time as we do."""

from importlib import import_module
from pathlib import Path

import pytest

from zsim.analysis.time_breakdown import breakdown
from zsim.backend.document import decode_trace
from zsim.cli.main import answer
from zsim.files.source import Changes, read

pytestmark = [
    pytest.mark.studies,
    pytest.mark.filterwarnings("ignore"),  # of pandas, at each of its releases
]


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        ("zero_100b", ()),
        ("llama2_7b", ("zero.emulate=fsdp2",)),
        ("llama2_7b", ("zero.stage=2", "cluster.nics_per_node=1")),
    ],
)
def test_its_temporal_breakdown_is_ours(
    scenario: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    changes = [word for setting in settings for word in ("--set", setting)]
    assert answer(["run", scenario, *changes, "--trace", str(path)]) == 0
    analysis = import_module("hta.trace_analysis").TraceAnalysis(
        trace_files={0: str(path)}, trace_dir="", include_last_profiler_step=True
    )
    (found,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    trace = decode_trace(path.read_text("utf-8"))
    rank = trace.ranks[0]
    program = read(scenario, Changes(settings=settings)).document.schedule.program_of(rank.rank)
    span = (
        min(event.start_ps for event in rank.events),
        max(event.end_ps for event in rank.events),
    )
    ours = breakdown(program, rank, *span)
    for name, picoseconds in (
        ("compute_time", ours.compute_ps),
        ("non_compute_time", ours.communication_ps + ours.copy_ps),
        ("idle_time", ours.idle_ps),
    ):
        share = found[f"{name}(us)"] / found["kernel_time(us)"]
        assert share == pytest.approx(picoseconds / ours.span_ps, abs=0.01), name
    assert found["kernel_time(us)"] == pytest.approx(ours.span_ps / 1e6, rel=0.01)


def test_it_reads_the_ranks_of_a_real_run(tmp_path: Path) -> None:
    words = ["run", "tiny", "--backend", "torch", "--ranks", "2", "--trace", str(tmp_path)]
    assert answer(words) == 0
    analysis = import_module("hta.trace_analysis").TraceAnalysis(
        trace_dir=str(tmp_path), include_last_profiler_step=True
    )
    found = analysis.get_temporal_breakdown(visualize=False)
    assert sorted(found["rank"]) == [0, 1]
    assert (found["compute_time(us)"] > 0).all()
    assert (found["non_compute_time(us)"] > 0).all()
