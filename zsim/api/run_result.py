"""The result of a run: figures with units in their names, pages, traces and pictures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.analysis.memory_footprint import MemoryShortage, run_shortage
from zsim.analysis.summary import Summary, summary
from zsim.api.answer import AnswerInFacts
from zsim.api.goodput_answer import (
    FailureModel,
    Given,
    Goodput,
    checkpoint_bytes,
    reliability_of,
)
from zsim.api.notebook import Picture
from zsim.api.run_facts import RunOutcome, fit_probability, run_facts, run_object
from zsim.api.training_budget import TrainingBudget, price_of
from zsim.backend.backend import SIMULATOR
from zsim.cluster.fault import Flaky
from zsim.files.installed import fitted_for
from zsim.files.output_file import write
from zsim.files.trace_file import need_chakra, need_trace, write_trace
from zsim.mistake import MistakeError
from zsim.prediction.predicted_error import explained
from zsim.report.svg.figure import RUN_FIGURES
from zsim.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from pandas import DataFrame

    from zsim.analysis.detour import Detour
    from zsim.analysis.remedies import Remedy
    from zsim.api.imbalance import Imbalance
    from zsim.api.pipeline_fold import FoldedStep
    from zsim.api.scenario import LoadedScenario
    from zsim.backend.backend import Job
    from zsim.trace.trace import Trace

__all__ = ["RUN_FIGURES", "RunResult"]


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(AnswerInFacts):
    """Result of a run; each figure is of the last step, from the rank with the largest value.

    Attributes:
        title: title of the scenario, with the changes made to it.
        scenario: the loaded scenario; None if a job was built by hand.
        job: schedule, model and cluster of the run.
        recorded: trace of the run, operation by operation.
        wall_time_s: duration of computing the run, in seconds.
        healthy_step_time_s: step time in seconds without the faults and neighbours of the
            scenario; None if it has none.
        look_for_remedies: function that finds changes that make the run fit.
        look_for_band: function that simulates the fastest and the slowest fabric.
        look_for_imbalance: function that simulates a busier rank of experts.
        training: days, cost and energy of a whole training; None if its tokens are not given.
        folded: the micro-batches of a pipeline that were simulated, and the period that the others
            repeat; None if all were simulated. With it, `job` and `recorded` have the simulated
            ones alone; figures are of the whole step.
        detours: ways around dead links of the fabric.
        write_out: function that runs every micro-batch.
    """

    title: str
    scenario: "LoadedScenario | None"
    job: "Job"
    recorded: "Trace"
    wall_time_s: float
    healthy_step_time_s: float | None
    look_for_remedies: "Callable[[Trace], tuple[Remedy, ...] | None]"
    look_for_band: "Callable[[], tuple[float, float] | None]"
    training: TrainingBudget | None = None
    look_for_imbalance: "Callable[[], Imbalance | None]" = lambda: None
    folded: "FoldedStep | None" = None
    detours: "tuple[Detour, ...]" = ()
    write_out: "Callable[[], RunResult] | None" = None

    @cached_property
    def whole(self) -> "RunResult":
        """This result with every micro-batch written out; the first access simulates them."""
        if self.folded is None or self.write_out is None:
            return self
        return replace(self.write_out(), training=self.training)

    @cached_property
    def imbalance(self) -> "Imbalance | None":
        """Step time with a busier rank of experts; None without them, or if it does not fit."""
        return self.look_for_imbalance() if self.fits else None

    @cached_property
    def summary(self) -> Summary:
        """All figures in one object, which documents each."""
        if self.folded is not None:
            return self.folded.summary(self.job, self.recorded)
        return summary(self.job, self.recorded)

    @property
    def backend(self) -> str:
        """Name of the backend: "sim", "torch", or another installed one."""
        return self.recorded.backend

    @property
    def fits(self) -> bool:
        """True if every rank has the memory that it reserves."""
        return self.summary.fits

    @property
    def step_time_s(self) -> float:
        """Step time in seconds; 0 if the backend has no clock."""
        return self.summary.step_time_s

    @cached_property
    def step_time_band_s(self) -> tuple[float, float] | None:
        """Step times in seconds on the fastest and the slowest fabric that the run may have.

        None on one node, without fitted network constants, and if the run does not fit. The first
        access simulates both.
        """
        return self.look_for_band() if self.fits else None

    @property
    def flaky(self) -> Flaky | None:
        """Probability of the only fault; None if the scenario has no fault with a probability."""
        scenario = self.scenario
        if scenario is None or scenario.schedule_json is not None:
            return None
        return scenario.resolved.flaky

    @property
    def expected_step_time_s(self) -> float:
        """Expected step time in seconds, if only some steps have the fault; else `step_time_s`."""
        if self.flaky is None or self.healthy_step_time_s is None:
            return self.step_time_s
        return self.flaky.expected_s(self.healthy_step_time_s, self.step_time_s)

    @property
    def bound_by(self) -> str:
        """The largest part of the step: "compute", "communication" or "the host"."""
        return self.summary.bound_by

    @property
    def exposed_communication_s(self) -> float:
        """Seconds of the step in which a rank communicates, or waits for it, without computing."""
        return self.summary.exposed_communication_s

    @property
    def exposed_communication_s_by_axis(self) -> dict[str, float]:
        """Exposed communication by group; if two overlap, the one that started first counts."""
        return dict(self.summary.exposed_by_group)

    @property
    def host_bound_s(self) -> float:
        """Seconds of the step in which a GPU waits for its host to issue work."""
        return self.summary.host_bound_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all replicas and micro-batches per second."""
        return self.summary.tokens_per_s

    @property
    def model_tflops_per_gpu(self) -> float:
        """10^12 FLOPs of forward and backward per second and GPU, without recomputation."""
        return self.summary.model_tflops_per_gpu

    @property
    def hardware_tflops_per_gpu(self) -> float:
        """The same with recomputation."""
        return self.summary.hardware_tflops_per_gpu

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: a fraction of the GPU's peak; 0 without a peak."""
        return self.summary.mfu

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: the same with recomputation."""
        return self.summary.hfu

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of allocated device memory of the largest rank, in bytes."""
        return self.summary.peak_allocated_bytes

    @property
    def needed_bytes(self) -> int:
        """Lower bound of the peak of the largest rank in bytes, with waits for deferred frees."""
        return self.summary.needed_bytes

    @property
    def memory_wait_s(self) -> float:
        """Seconds of the step in which a host waits for memory to be freed."""
        return self.summary.memory_wait_s

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Peak of bytes reserved by the caching allocator; None if memory ran out before."""
        return self.summary.reserved_bytes

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes of a GPU that a rank may reserve: its memory minus that of CUDA and NCCL."""
        return self.summary.usable_bytes

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Allocated bytes at the peak by kind: parameter, gradient, moment, ..."""
        return {str(kind): size for kind, size in self.summary.memory_by_kind}

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss over the ranks in each step; empty if the backend does not train."""
        of_ranks = [rank.losses for rank in self.recorded.ranks if rank.losses]
        return tuple(sum(each) / len(each) for each in zip(*of_ranks, strict=True))

    @property
    def error(self) -> str:
        """Error of the step time as one line of text."""
        return self.recorded.error_text

    @property
    def step_time_interval_s(self) -> tuple[float, float] | None:
        """90 % prediction interval of the step time in seconds; None if unknown."""
        error, step_s = self.recorded.error, self.step_time_s
        return None if error is None else (step_s * error.low, step_s * error.high)

    @property
    def fit_probability(self) -> float | None:
        """Probability that a simulated run fits in memory; None for a real run."""
        return fit_probability(self.summary, self.backend)

    def explain_error(self) -> list[tuple[str, str]]:
        """Return the components of the error of the step time, and the closest published runs."""
        return explained(self.recorded.error, self.step_time_s)

    @property
    def out_of_memory(self) -> MemoryShortage | None:
        """The operation at which memory ran out, and the allocations then; None if the run fits."""
        return run_shortage(self.job.schedule, self.recorded)

    @cached_property
    def remedies(self) -> "tuple[Remedy, ...] | None":
        """The cheapest changes with which a simulated run fits; None if it already fits.

        The first access searches them: each change is simulated.
        """
        return self.look_for_remedies(self.recorded)

    def of_tokens(
        self,
        tokens: int | None,
        *,
        price: float | None = None,
        prices: str | PathLike[str] | None = None,
        reliability: Given = None,
    ) -> "RunResult":
        """Return a copy with days, cost and energy of a training of `tokens` tokens.

        The days include failures, checkpoints and restarts (`zsim.api.goodput_answer`).

        Args:
            tokens: tokens of the whole training; None returns `self`.
            price: price of a GPU hour.
            prices: path of a file with the prices of GPUs.
            reliability: failures, checkpoints, restarts and spare nodes by key, as
                `--reliability`.

        Raises:
            MistakeError: the run has no step time, `reliability` is wrong, or the file has no
                price of its GPU.
        """
        if tokens is None:
            return self
        if not self.tokens_per_s:
            raise MistakeError(f"--tokens: backend {self.backend} has no clock")
        from zsim.api.gpu_fleet import gpu_power_w

        gpu = self.job.cluster.gpu.name
        training = TrainingBudget(
            tokens=tokens,
            seconds=tokens / self.tokens_per_s * self.expected_step_time_s / self.step_time_s,
            gpus=self.job.schedule.mesh.size,
            price=price_of(gpu, price, prices),
            gpu_power_w=gpu_power_w(gpu),
            goodput=self._goodput(reliability_of(reliability)),
        )
        return replace(self, training=training)

    def _goodput(self, given: FailureModel) -> Goodput | None:
        """Return the goodput; None if the strategy is unknown, as for a schedule from a file."""
        strategy = self.job.schedule.contract.strategy
        if strategy is None:
            return None
        return Goodput(
            gpus=self.job.schedule.mesh.size,
            gpus_per_node=self.job.cluster.gpus_per_node,
            bytes=checkpoint_bytes(strategy, self.job.model.trained_count),
            given=given,
        )

    @property
    def _options(self) -> tuple[str, ...]:
        """Command-line options in addition to the scenario, if not the defaults."""
        options = [] if self.backend == SIMULATOR else ["--backend", self.backend]
        if self.recorded.seed:
            options += ["--seed", str(self.recorded.seed)]
        return tuple(options)

    @property
    def _outcome(self) -> RunOutcome:
        from zsim.backend.backend import predicts

        return RunOutcome(
            title=self.title,
            job=self.job,
            trace=self.recorded,
            summary=self.summary,
            losses=self.losses,
            wall_time_s=self.wall_time_s,
            healthy_step_time_s=self.healthy_step_time_s,
            flaky=self.flaky,
            step_time_band_s=self.step_time_band_s,
            remedies=self.remedies,
            fitted=fitted_for(self.job.cluster) if predicts(self.backend) else (),
            training=self.training,
            imbalance=self.imbalance,
            folded=self.folded,
            detours=self.detours,
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the lines that `zsim run` prints."""
        return run_facts(self._outcome)

    def to_dict(self) -> dict[str, object]:
        """Return all figures as `zsim run --json` prints them; names end in units."""
        return run_object(self._outcome)

    def rows(self) -> list[dict[str, object]]:
        """Return each operation of the last step of each recorded rank, times in seconds.

        Of ranks with identical behaviour one is recorded; `ranks` is their number.
        """
        recorded = self.whole.recorded
        last = recorded.steps - 1
        return [
            {
                "rank": rank.rank,
                "ranks": rank.stands_for,
                "operation": event.operation,
                "stream": event.stream,
                "start_s": event.start_ps / PICOSECONDS_PER_SECOND,
                "duration_s": (event.end_ps - event.start_ps) / PICOSECONDS_PER_SECOND,
            }
            for rank in recorded.ranks
            for event in rank.events
            if event.step == last
        ]

    def to_pandas(self) -> "DataFrame":
        """Return `rows()` as a pandas DataFrame.

        Raises:
            MistakeError: pandas is not installed.
        """
        from zsim.api.data_frame import data_frame

        return data_frame(self.rows())

    def report(self, path: str | PathLike[str]) -> None:
        """Write an HTML page about the run to `path` (.html).

        Raises:
            MistakeError: `path` is not .html, or the extra `report` is not installed.
            UnwrittenError: the file cannot be written.
        """
        from zsim.files.html_page import need_html

        need_html("report", Path(path))
        write(Path(path), self.html())

    def html(self) -> str:
        """Return the HTML page that `report` writes; needs the extra `report`."""
        from zsim.files.html_page import render
        from zsim.report.run_page import run_page
        from zsim.report.settings_section import settings_section

        ran = None
        if self.scenario is not None and self.scenario.tables is not None:
            keys = self.scenario.settled_keys()
            ran = settings_section(
                self.scenario.command("run", self._options),
                [(each.key, each.value, each.origin) for each in keys],
                changed=[each.key for each in keys if each.is_changed],
            )
        whole = self.whole
        page = run_page(
            whole.job,
            whole.recorded,
            whole.summary,
            title=self.title,
            facts=whole.facts(),
            settings=ran,
        )
        return render(page, made=datetime.now(UTC).date())

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the trace to `path`, in the format of the PyTorch profiler.

        A path that ends in `/`, or is a folder, gets one file per recorded rank.

        Raises:
            MistakeError: the folder does not exist.
            UnwrittenError: a file cannot be written.
        """
        need_trace("trace", str(path))
        whole = self.whole
        write_trace(str(path), whole.job, whole.recorded)

    def chakra(self, folder: str | PathLike[str]) -> None:
        """Write the last step into `folder` as Chakra execution traces, one file per rank.

        Raises:
            MistakeError: the folder cannot be created, or protobuf is not installed.
            UnwrittenError: a file cannot be written.
        """
        need_chakra("chakra", str(folder))
        from zsim.files.chakra_files import write_chakra

        whole = self.whole
        write_chakra(Path(folder), whole.job, whole.recorded)

    def timeline(self, path: str | PathLike[str] | None = None) -> Picture:
        """Draw the last step of the first rank; write it to `path` (.svg, .png or .pdf) if given.

        Raises:
            MistakeError: it cannot be drawn, or PNG and PDF need the extra `draw`.
            UnwrittenError: the file cannot be written.
        """
        from zsim.api.figure_file import drawn_figure
        from zsim.report.timeline import timeline

        whole = self.whole
        job, trace = whole.job, whole.recorded
        return drawn_figure("timeline", path, lambda: timeline(job.schedule, job.model, trace))

    def picture(
        self, path: str | PathLike[str] | None = None, *, figure: str = RUN_FIGURES[0]
    ) -> Picture:
        """Draw a figure of the page; write it to `path` (.svg, .png or .pdf) if given.

        Args:
            path: path of the file; None to write none.
            figure: "memory" over the last step, "time" by parts of the step, or "network".

        Raises:
            MistakeError: `figure` is unknown, or PNG and PDF need the extra `draw`.
            UnwrittenError: the file cannot be written.
        """
        from zsim.api.figure_file import drawn_figure, need_figure
        from zsim.report.run_picture import run_picture

        need_figure("figure", figure, RUN_FIGURES)
        whole = self.whole
        job, trace, found = whole.job, whole.recorded, whole.summary
        return drawn_figure(
            "picture",
            path,
            lambda: run_picture(figure, job, trace, found, title=self.title),
        )

    def __repr__(self) -> str:
        return (
            f"RunResult(title={self.title!r}, fits={self.fits}, step_time_s={self.step_time_s}, "
            f"peak_reserved_bytes={self.peak_reserved_bytes})"
        )
