"""Facts of a run: its figures, the most important first, and their error."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING

from zsim.analysis.memory_category import by_category
from zsim.analysis.memory_footprint import MemoryShortage, communicator_count, run_shortage
from zsim.analysis.out_of_memory import alive_text, shortage_object
from zsim.analysis.summary import Summary
from zsim.analysis.tier_fit import tier_objects
from zsim.api.error_text import error_object, probability_text
from zsim.api.step_time_band import WIDE
from zsim.api.training_budget import TrainingBudget
from zsim.backend.backend import Job, predicts
from zsim.cluster.fault import Flaky
from zsim.cluster.foreign_profile import foreign_profiles
from zsim.files.installed import network_profiles
from zsim.prediction.error_rule import SURE, shipped_rules
from zsim.schedule.describe_operation import moment
from zsim.schedule.schedule import Discipline, Place
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import STAGES
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from zsim.analysis.detour import Detour
    from zsim.analysis.remedies import Remedy
    from zsim.api.imbalance import Imbalance
    from zsim.api.pipeline_fold import FoldedStep

LIVE, BOOKED = "live_bytes_peak/state", "booked_bytes_peak/state"
ON_DEVICE = "live_bytes_peak/all"
"""Names of observed memory peaks.

The first two are of model state and communication buffers, live and in the ledger; the last is of
all live memory on the device.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A finished run; with faults or neighbours, also the step time without them.

    `remedies` are the changes that make it fit; None if they were not searched. `fitted` are
    settings that replace data-sheet rates by measurements. `training` is the budget of a whole
    training. `flaky` is the probability of the only fault, if not all steps have it. `detours` are
    the ways around dead links.
    """

    title: str
    job: Job
    trace: Trace
    summary: Summary
    losses: tuple[float, ...]
    wall_time_s: float
    healthy_step_time_s: float | None
    step_time_band_s: tuple[float, float] | None
    remedies: "tuple[Remedy, ...] | None"
    fitted: tuple[str, ...]
    training: TrainingBudget | None = None
    flaky: Flaky | None = None
    imbalance: "Imbalance | None" = None
    folded: "FoldedStep | None" = None
    detours: "tuple[Detour, ...]" = ()


def run_object(outcome: RunOutcome) -> dict[str, object]:
    """Return the object of `zsim run --json`."""
    found, trace = outcome.summary, outcome.trace
    shortage = run_shortage(outcome.job.schedule, trace)
    return {
        "title": outcome.title,
        "backend": trace.backend,
        "fits": found.fits,
        "out_of_memory": None if shortage is None else shortage_object(shortage),
        "remedies": _remedy_objects(outcome.remedies),
        "step_time_s": found.step_time_s,
        "healthy_step_time_s": outcome.healthy_step_time_s,
        **_flaky_object(outcome),
        "step_time_band_s": outcome.step_time_band_s,
        "model_tflops_per_gpu": found.model_tflops_per_gpu,
        "hardware_tflops_per_gpu": found.hardware_tflops_per_gpu,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "causal_model_tflops_per_gpu": found.causal.model_tflops_per_gpu,
        "causal_hardware_tflops_per_gpu": found.causal.hardware_tflops_per_gpu,
        "causal_mfu": found.causal.mfu,
        "causal_hfu": found.causal.hfu,
        "tokens_per_s": found.tokens_per_s,
        "exposed_communication_s": found.exposed_communication_s,
        "exposed_communication_s_by_axis": dict(found.exposed_by_group),
        "exposed_on_host_s": dict(found.exposed_on_host),
        "host_bound_s": found.host_bound_s,
        "memory_wait_s": found.memory_wait_s,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "needed_bytes": found.needed_bytes,
        "peak_reserved_bytes": found.reserved_bytes,
        "memory_bytes": dict(found.memory_by_kind),
        "peak_node_host_bytes": found.peak_host_bytes,
        "tiers": tier_objects(found.tiers),
        "drive_life": None if found.drive_life is None else asdict(found.drive_life),
        "usable_memory_bytes": found.usable_bytes,
        "gpu_memory_bytes": outcome.job.cluster.gpu.memory_bytes,
        "losses": outcome.losses,
        "observed": dict(trace.observed),
        "error": error_object(trace.error, found.step_time_s, trace.error_text),
        "fit_probability": fit_probability(found, trace.backend),
        "seed": trace.seed,
        "steps": trace.steps,
        "wall_time_s": outcome.wall_time_s,
        **({} if outcome.imbalance is None else {"imbalance": asdict(outcome.imbalance)}),
        **({} if outcome.folded is None else {"folded": outcome.folded.to_dict()}),
        **({} if outcome.training is None else {"training": outcome.training.to_dict()}),
    }


def _remedy_objects(
    remedies: "tuple[Remedy, ...] | None",
) -> list[dict[str, object]] | None:
    if remedies is None:
        return None
    from zsim.api.remedy_runs import remedy_objects

    return remedy_objects(remedies)


def run_facts(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return the names and texts of the facts of a run, the most important first."""
    found, trace = outcome.summary, outcome.trace
    lines = [("fits", _fits(outcome))]
    shortage = run_shortage(outcome.job.schedule, trace)
    if shortage is not None:
        return [*lines, *_out_of_memory(outcome, shortage), *_error(outcome)]
    lines += _risk(outcome)
    if found.step_time_s:
        lines += [
            ("step time", _step_time(found)),
            *([] if outcome.folded is None else [("micro-batches", outcome.folded.text())]),
            *_band(outcome.step_time_band_s),
            *_disturbance_cost(outcome),
            *_imbalance(outcome),
            *_exposed(found),
            *_on_host(found),
            *_host(found),
            ("throughput", _rates(found)),
            *_causal(found),
        ]
        if outcome.training is not None:
            lines += outcome.training.facts()
    lines.append(("memory", _memory(found)))
    lines += [(each.name, each.text()) for each in found.tiers if each.is_noticed]
    if found.drive_life is not None and predicts(trace.backend):
        lines.append(("written to drives", found.drive_life.text()))
    if predicts(trace.backend) and outcome.job.cluster.gpu.overheads.total_bytes(1):
        lines.append(("outside PyTorch", _overheads(outcome.job)))
    observed = dict(trace.observed)
    if LIVE in observed and BOOKED in observed:
        seen = f"{observed[LIVE]:,.0f} bytes live, {observed[BOOKED]:,.0f} in the ledger"
        lines.append(("state and communication", seen))
    if ON_DEVICE in observed:
        seen = f"{format_bytes(int(observed[ON_DEVICE]))} live at most, temporaries included"
        lines.append(("seen on the device", seen))
    if outcome.losses:
        first, last = outcome.losses[0], outcome.losses[-1]
        lines.append(("loss", f"{first:.4f} in the first step, {last:.4f} in step {trace.steps}"))
    return [*lines, *_error(outcome)]


def _band(band_s: tuple[float, float] | None) -> list[tuple[str, str]]:
    """Return the fastest and slowest step on the fabric, if they differ much."""
    if band_s is None or band_s[1] < WIDE * band_s[0]:
        return []
    fast, slow = map(format_seconds, band_s)
    return [("by congestion", f"{fast} to {slow} a step, as the fabric is more or less congested")]


def _imbalance(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return the step time if more tokens reach one rank of experts, if there are any."""
    found = outcome.imbalance
    return [] if found is None else [("imbalance", found.text(outcome.summary.step_time_s))]


def _error(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return the error of the step time, and settings that would use measurements."""
    lines = [("error", outcome.trace.error_text)]
    cluster = outcome.job.cluster
    foreign = foreign_profiles(cluster) if predicts(outcome.trace.backend) else {}
    for key, name in foreign.items():
        why = f"{key} = {name} is of another GPU than {cluster.gpu.name}"
        lines.append(("warning", f"{why}; --set {key}=none takes published rates"))
    links = None if cluster.network is None else network_profiles().get(cluster.network.name)
    if links is not None and links.scaled_from and not links.publications:
        gpu, other = links.gpu.upper(), links.scaled_from.upper()
        lines.append(("assumed", f"collectives as on {other}; none of {gpu} is published"))
    if outcome.fitted:
        settings = " ".join(f"--set {each}" for each in outcome.fitted)
        lines.append(("more accurate", f"{settings}, from measurements"))
    return lines


def _out_of_memory(outcome: RunOutcome, shortage: MemoryShortage) -> list[tuple[str, str]]:
    """Return when memory ran out, the allocations at that time, and the remedies."""
    lines = [
        ("out of memory at", moment(shortage.operation)),
        ("allocated with that", alive_text(shortage)),
    ]
    excess = outcome.job.excess
    if excess is not None and excess.operation == shortage.operation:
        most = f"at most {excess.count.maximum:,} are declared ({excess.count.name})"
        lines.append(("rows received", f"{excess.rows:,} by rank {excess.rank}, {most}"))
        least = ceil(100 * excess.rows / max(1, excess.count.sent)) / 100
        lines.append(("it may fit", f"with experts.maximum={least:g} or more"))
    if outcome.remedies is not None:
        from zsim.api.remedy_runs import remedy_lines

        lines += remedy_lines(outcome.remedies)
    if outcome.summary.step_time_s:
        step = format_seconds(outcome.summary.step_time_s)
        lines.append(("step time", f"{step} if there were more memory"))
    return lines


def _host(found: Summary) -> list[tuple[str, str]]:
    """Return how long the GPU waits for the host, and how long the host waits for memory."""
    lines: list[tuple[str, str]] = []
    waits_s = found.parts_s["the host"]
    if waits_s >= SHOWN * found.step_time_s:
        share = waits_s / found.step_time_s
        lines.append(("waiting for the host", f"{format_seconds(waits_s)} ({share:.1%})"))
    if found.memory_wait_s >= SHOWN * found.step_time_s:
        waits = format_seconds(found.memory_wait_s)
        lines.append(("host waits for memory", f"{waits}, while the GPU does what was issued"))
    return lines


def _disturbance_cost(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return the cost of faults and neighbours, if there are any."""
    healthy_s, step_s = outcome.healthy_step_time_s, outcome.summary.step_time_s
    if not healthy_s:
        return []
    lost_s = step_s - healthy_s
    lost = f"{'+' if lost_s >= 0 else '-'}{format_seconds(abs(lost_s))}" if lost_s else "nothing"
    without = f"{format_seconds(healthy_s)} without"
    lines = [("faults and neighbours", f"{lost} ({step_s / healthy_s - 1:+.1%}): {without}")]
    return [*lines, *map(_detour, outcome.detours), *_flaky(outcome, healthy_s)]


def _detour(found: "Detour") -> tuple[str, str]:
    """Describe the way around a dead link."""
    if not found.bytes:
        return "dead link", f"{found.link} carries nothing of this run while it works"
    ways = (
        "no other link is in use" if not found.use else f"{found.busiest} is {found.use:.0%} busy"
    )
    moved = f"{format_bytes(found.bytes)} a step of {found.link} take other ways"
    return "dead link", f"{moved}; of the fabric's links, {ways} at most"


def _flaky(outcome: RunOutcome, healthy_s: float) -> list[tuple[str, str]]:
    """Return the expected step time, if only some steps have the fault."""
    if (flaky := outcome.flaky) is None:
        return []
    expected_s = flaky.expected_s(healthy_s, outcome.summary.step_time_s)
    links = "1 link has" if flaky.links == 1 else f"at least 1 of {flaky.links:,} links has"
    text = (
        f"{format_seconds(expected_s)} a step ({expected_s / healthy_s - 1:+.1%}): {links} the "
        f"fault in {flaky.chance:.2%} of the steps; the lines above are of these"
    )
    return [("expected", text)]


def _flaky_object(outcome: RunOutcome) -> dict[str, object]:
    """Return the expected step time, if only some steps have the fault."""
    flaky, healthy_s = outcome.flaky, outcome.healthy_step_time_s
    if flaky is None or healthy_s is None:
        return {}
    expected_s = flaky.expected_s(healthy_s, outcome.summary.step_time_s)
    return {"fault_share_of_steps": flaky.chance, "expected_step_time_s": expected_s}


def _fits(outcome: RunOutcome) -> str:
    job, found = outcome.job, outcome.summary
    chance = fit_probability(found, outcome.trace.backend)
    verdict, tensors = _verdict(found.fits, chance), format_bytes(found.needed_bytes)
    if chance is None:
        return f"{verdict}: at most {tensors} of tensors on each of {job.schedule.mesh.size} ranks"
    usable = f"{format_bytes(found.usable_bytes)} usable on {job.cluster.gpu.name}"
    if found.reserved_bytes is None and found.needed_bytes > found.usable_bytes:
        return f"{verdict}: tensors need {tensors}, more than the {usable}"
    return f"{verdict}: reserves {_reserved(outcome)} of {usable}, {tensors} in tensors"


def _verdict(fits: bool, chance: float | None) -> str:  # noqa: FBT001  (the prediction itself)
    """Return the prediction as text, with the probability of fitting if it is uncertain."""
    if chance is None or (chance >= SURE if fits else chance <= 1 - SURE):
        return "yes" if fits else "no"
    word = "probably not" if not fits else "probably" if chance >= 1 / 2 else "uncertain"
    return f"{word} (probability {probability_text(chance)})"


def fit_probability(found: Summary, backend: str) -> float | None:
    """Return the probability that a simulated run fits; None for a real run.

    A run that ran out of memory before its peak needs at least the usable memory.
    """
    if not predicts(backend):
        return None
    least = 0 if found.fits else found.usable_bytes
    taken = max(found.needed_bytes, found.reserved_bytes or least)
    return shipped_rules().fit.probability(taken, found.usable_bytes)


def _risk(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return how little memory is left if a run may not fit, and settings that need less memory."""
    found, chance = outcome.summary, fit_probability(outcome.summary, outcome.trace.backend)
    if chance is None or chance >= SURE or not found.fits:
        return []
    usable, taken = found.usable_bytes, max(found.needed_bytes, found.reserved_bytes or 0)
    most = format_bytes(int(shipped_rules().fit.room(SURE) * usable))
    left = f"{format_bytes(taken)} of {format_bytes(usable)} leaves {format_bytes(usable - taken)}"
    why = "which is within the error of predicted peaks"
    less = ", ".join(_less_memory(outcome.job, found))
    change = f"try {less} or more GPUs" if less else "try more GPUs"
    line = f"{left}, {why}; {most} or less fits with a probability of {SURE:.0%}: {change}"
    return [("to be sure", line)]


FRAGMENTED = 0.03
"""Minimum fraction of fragmentation at which expandable segments are suggested."""


def _less_memory(job: Job, found: Summary) -> Iterator[str]:
    """Yield settings that reduce the memory of the run."""
    pools = [each for each in job.schedule.pools if each.place is Place.DEVICE]
    caching = any(each.discipline is Discipline.CACHING for each in pools)
    if caching and (found.reserved_bytes or 0) > (1 + FRAGMENTED) * found.needed_bytes:
        yield "cluster.allocator=expandable"
    if (size := job.model.micro_batch_size) > 1:
        yield f"train.micro_batch_size={size // 2}"
    strategy = job.schedule.contract.strategy
    if strategy is None:
        return
    if strategy.activations.checkpointing is not Checkpointing.FULL:
        yield "activations.checkpointing=full"
    runtime = strategy.zero.emulate
    stages = STAGES if runtime is None else runtime.stages
    if strategy.zero.stage < max(stages):
        yield f"zero.stage={max(stages)}"


def _reserved(outcome: RunOutcome) -> str:
    """Return the peak of reserved memory; a lower bound if memory ran out before the peak."""
    found, full = outcome.summary, outcome.trace.out_of_memory
    if found.reserved_bytes is not None:
        return format_bytes(found.reserved_bytes)
    pools = {pool.name: pool.place for pool in outcome.job.schedule.pools}
    refused = full.needed_bytes if full and pools[full.pool] is Place.DEVICE else 0
    return f"at least {format_bytes(max(found.needed_bytes, refused))}"


def _step_time(found: Summary) -> str:
    """Return the step time, and the largest of its parts."""
    share = found.parts_s[found.bound_by] / found.step_time_s
    return f"{format_seconds(found.step_time_s)}, bound by {found.bound_by} ({share:.1%} of it)"


def _exposed(found: Summary) -> list[tuple[str, str]]:
    """Return how long the GPU waits for communication, if it does."""
    groups = [(axis, seconds) for axis, seconds in found.exposed_by_group if seconds]
    if not groups:
        return []
    by_axis = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in groups)
    share = found.exposed_communication_s / found.step_time_s
    exposed = f"{format_seconds(found.exposed_communication_s)} exposed ({share:.1%} of the step)"
    return [("communication", f"{exposed}: {by_axis}")]


SHOWN = 0.0005
"""Minimum fraction of a step that gets a line: it rounds to 0.1 %."""


def _on_host(found: Summary) -> list[tuple[str, str]]:
    """Return how long the GPU waits for kernels, copies and files of the host."""
    moves = any(each.is_noticed for each in found.tiers)
    shares = [(name, s, s / found.step_time_s) for name, s in found.exposed_on_host]
    waits = [each for each in shares if each[2] >= SHOWN]
    if not waits:
        return []
    said = ", ".join(
        f"{name} {format_seconds(seconds)} ({share:.1%})" for name, seconds, share in waits
    )
    return [("offload" if moves else "on the host", f"exposed: {said}")]


def _rates(found: Summary) -> str:
    """Return the FLOP/s per GPU, also with recomputation if there is any."""
    rates = [(found.model_tflops_per_gpu, "MFU", found.mfu, " per GPU")]
    if not found.model_tflops_per_gpu:  # a recorded script has kernels, but no model FLOPs
        rates = [(found.hardware_tflops_per_gpu, "HFU", found.hfu, " per GPU")]
    elif found.hardware_tflops_per_gpu > found.model_tflops_per_gpu * 1.0005:
        rates.append((found.hardware_tflops_per_gpu, "HFU", found.hfu, " with recomputation"))
    texts = [
        f"{format_rate(tflops * 1e12)}{what}" + (f" ({name} {used:.1%})" if used else "")
        for tflops, name, used, what in rates
    ]
    if found.tokens_per_s:  # a recorded script has no tokens
        texts = [*texts, f"{found.tokens_per_s:,.0f} tokens/s"]
    return ", ".join(texts)


MASKED = 0.1
"""Minimum fraction of masked FLOPs at which a line shows the rates without them."""


def _causal(found: Summary) -> list[tuple[str, str]]:
    """Return the rates without masked FLOPs, if they matter.

    Published figures count all of attention, but kernels skip the half that causal masks hide. So
    with long sequences, or kernels near their peak, utilization may exceed 100 %.
    """
    if not found.model_tflops_per_gpu:
        return []
    without = found.causal
    is_masked = without.model_tflops_per_gpu < (1 - MASKED) * found.model_tflops_per_gpu
    if not is_masked and max(found.mfu, found.hfu) <= 1:
        return []
    used = [f"MFU {without.mfu:.1%}"] if without.mfu else []
    used += [f"HFU {without.hfu:.1%}"] if without.hfu > without.mfu * 1.0005 else []
    text = f"{format_rate(without.model_tflops_per_gpu * 1e12)} per GPU"
    text += f" ({', '.join(used)})" if used else ""
    return [("causal throughput", f"{text}; the line above counts masked attention too")]


BLOCKS = 0.01
"""Minimum fraction of the needed memory in allocator blocks, outside tensors, that gets a line."""


def _memory(found: Summary) -> str:
    """Return the bytes of tensors at the peak by category, the largest first."""
    sizes = by_category(found.memory_by_kind)
    said = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes)
    blocks = found.needed_bytes - sum(size for _, size in sizes)
    if blocks < BLOCKS * found.needed_bytes:
        return said
    return f"{said}, rounding to blocks of the allocator {format_bytes(blocks)}"


def _overheads(job: Job) -> str:
    """Return the memory of CUDA and NCCL on a GPU, and the visible memory."""
    count = communicator_count(job)
    gpu, taken = job.cluster.gpu, job.cluster.gpu.overheads
    visible = gpu.memory_bytes if gpu.visible_bytes is None else gpu.visible_bytes
    used = f"{format_bytes(taken.total_bytes(count))} of {format_bytes(visible)}"
    name = "1 communicator" if count == 1 else f"{count} communicators"
    return f"{used}: CUDA context, cuBLAS" + (f", {name} of NCCL" if count else "")
