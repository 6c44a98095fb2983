"""The question of `zsim.best`: the model, the GPUs, the batch and the objective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from zsim.api.goodput_answer import FailureModel, Given, Goodput, checkpoint_bytes, reliability_of
from zsim.api.gpu_fleet import GpuFleet, gpu_fleet
from zsim.api.scenario import Changed, as_settings
from zsim.api.setting_notes import checkpointing_notes, nic_notes
from zsim.api.training_budget import JOULES_PER_KWH, SECONDS_PER_HOUR, Price, price_of
from zsim.cluster.cluster import ClusterError
from zsim.cluster.files import Part, TopologyError
from zsim.files.installed import part_names, topology
from zsim.files.source import print_ignored, settled, with_files
from zsim.mistake import MistakeError, mistakes
from zsim.runtimes.lookup import runtimes
from zsim.scenario.changes import changed, flat
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import Scenario, ScenarioError, from_tables
from zsim.scenario.toml import setting_value, with_settings
from zsim.strategy.activations import Checkpointing
from zsim.suggestion import one_of
from zsim_plan.answer.setting_trial import NAME
from zsim_plan.search.fleet import Fleet
from zsim_plan.search.space import RuntimeSpace, SettingSpace, powers

BATCH_TOKENS: Final = 4 * 2**20
"""Default tokens of a step: the batch of Llama 2 (arXiv 2307.09288, section 2.2)."""

ADAPTED_SEQUENCES: Final = 128
"""Default sequences of a step with LoRA: the batch of its paper for GPT-3 (arXiv 2106.09685)."""

OF_GPUS: Final = 40
"""Power of the number of GPUs in a value: twice the GPUs multiply it by a trillion."""

LEAST_STEP_S: Final = 1e-6
"""Step time of settings that have no bound of it."""

OBJECTIVES: Final = ("time", "cost", "energy", "gpus")

FOLLOWS: Final = {
    "train.global_batch_size": "say --batch",
    "train.gradient_accumulation_steps": "it follows from --batch",
    "cluster.nodes": "say --gpus",
    "parallel.data": "it follows from --gpus",
}
"""Keys that cannot be set, and the option to use instead."""


class BestOptions(TypedDict, total=False):
    """Options of `best` in addition to the model and the GPUs.

    Attributes:
        tokens: tokens of the whole training, to compute days, money and energy.
        within_s: limit of the training time in seconds.
        batch_tokens: tokens of a step; default 4,194,304 (with LoRA 128 sequences), or one
            sequence per GPU if that is more.
        objective: "time", "cost", "energy" or "gpus"; all but "time" may use fewer GPUs.
        price: price of a GPU hour.
        prices: path of a file with the prices of GPUs.
        among: names of the candidate runtimes; default all.
        fabrics: names of the candidate fabrics between nodes; default the usual fabric of the
            node.
        reliability: failures, checkpoints, restarts and spare nodes by key, as
            `--reliability`.
    """

    tokens: int | None
    within_s: float | None
    batch_tokens: int | None
    objective: str
    price: float | None
    prices: str | PathLike[str] | None
    among: Sequence[str]
    fabrics: Sequence[str]
    reliability: Given


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question: GPUs, batch, objective and limits of a search.

    Attributes:
        tables: tables of a scenario without the keys that the search sets.
        fleet: the available GPUs.
        sequences: sequences of a step.
        sequence_length: tokens of a sequence.
        layers: layers of the model.
        experts: routed experts of a block; 0 for a dense model.
        objective: one of `OBJECTIVES`.
        tokens: tokens of the whole training; None if not given.
        within_s: limit of the training time in seconds; None if not given.
        price: price of a GPU; None if unknown.
        power_w: power limit of a GPU; None if unknown.
        fixed: values by key that the user set and the search keeps.
        runtimes: names of the candidate runtimes.
        fabrics: names of the candidate fabrics between nodes; empty to keep the one of `tables`.
        reliability: failures, checkpoints and restarts; None if neither they nor `tokens` are
            given.
        checkpoint_bytes: bytes of a checkpoint; 0 without `reliability`.
    """

    tables: Mapping[str, Any]
    fleet: GpuFleet
    sequences: int
    sequence_length: int
    layers: int
    experts: int
    objective: str
    tokens: int | None
    within_s: float | None
    price: Price | None
    power_w: int | None
    fixed: Mapping[str, object]
    runtimes: tuple[str, ...]
    fabrics: tuple[str, ...] = ()
    reliability: FailureModel | None = None
    checkpoint_bytes: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.sequence_length

    def value(self, step_time_s: float, gpus: int) -> float:
        """Return the value to minimize; it grows with the step time.

        With the fewest GPUs as objective, a setting with half the GPUs has the smaller value at any
        step time. With equal numbers of GPUs, the ratio of two values is that of the step times.
        """
        match self.objective:
            case "time":
                return step_time_s
            case "gpus":
                return max(step_time_s, LEAST_STEP_S) * float(gpus) ** OF_GPUS
            case "cost":
                assert self.price is not None  # checked in question_of
                return gpus * step_time_s / SECONDS_PER_HOUR * self.price.per_gpu_hour
            case _:
                assert self.power_w is not None
                return gpus * step_time_s * self.power_w / JOULES_PER_KWH

    def goodput(self, gpus: int) -> Goodput | None:
        """Return the goodput of a training on `gpus` GPUs; None without `reliability`."""
        if self.reliability is None:
            return None
        return Goodput(
            gpus=gpus,
            gpus_per_node=self.fleet.cluster.gpus_per_node,
            bytes=self.checkpoint_bytes,
            given=self.reliability,
        )

    def is_late(self, step_time_s: float, gpus: int) -> bool:
        """Return True if the training, with its failures, would take longer than `within_s`."""
        if self.within_s is None or self.tokens is None:
            return False
        work_s, goodput = self.tokens / self.tokens_per_step * step_time_s, self.goodput(gpus)
        return (work_s if goodput is None else goodput.passing_s(work_s)) > self.within_s

    def fleets(self) -> tuple[Fleet, ...]:
        """Return the candidate fleets: all GPUs for "time", else also fewer by powers of two.

        A fleet of several nodes is repeated for each fabric.
        """
        per_node, gpus = self.fleet.cluster.gpus_per_node, self.fleet.gpus
        counts = [gpus]
        if self.objective != "time":
            counts = sorted({gpus, *powers(gpus, gpus)})
        return tuple(
            Fleet(gpus=count, gpus_per_node=min(per_node, count), changes=changes)
            for count in counts
            for changes in self._fabrics_between(-(-count // per_node))
        )

    def _fabrics_between(self, nodes: int) -> tuple[dict[str, object], ...]:
        """Return the changes that select each candidate fabric between `nodes` nodes."""
        if nodes == 1 or not self.fabrics:
            return ({},)
        return tuple({FABRIC_KEY: fabric} for fabric in self.fabrics)

    def space(self) -> SettingSpace:
        """Return the space of all candidate settings."""
        known = runtimes()
        return SettingSpace(
            runtimes=[
                RuntimeSpace(
                    name=name,
                    stages=known[name].options.stages,
                    has_replicas=known[name].options.has_replicas,
                    has_pipeline=known[name].options.has_pipeline,
                    has_context=known[name].options.has_context,
                    has_experts=known[name].options.has_experts,
                )
                for name in self.runtimes
            ],
            fleets=self.fleets(),
            sequences=self.sequences,
            sequence_length=self.sequence_length,
            layers=self.layers,
            experts=self.experts,
            compiles=bool(self.tables["train"].get("compile", False)),
            fixed=self.fixed,
        )

    def scenario(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Return the tables of the scenario with the changes of a setting."""
        with mistakes(ScenarioError):
            return changed(self.tables, changes)


def question_of(
    model: str, gpus: str, changes: Changed = None, **options: Unpack[BestOptions]
) -> Question:
    """Return the question that the arguments of `best` ask.

    Raises:
        MistakeError: an option is unknown, is missing, or contradicts another.
    """
    objective, tokens = options.get("objective", "time"), options.get("tokens")
    within_s, among = options.get("within_s"), options.get("among", ())
    if objective not in OBJECTIVES:
        raise MistakeError(f"--objective: {one_of(objective, OBJECTIVES)}")
    if within_s is not None and tokens is None:
        raise MistakeError("--within: needs --tokens, of which it is the time")
    for name in among:
        if name not in runtimes():
            raise MistakeError(f"--runtime: {one_of(name, tuple(runtimes()))}")
    fleet = gpu_fleet(gpus, _gpu_of(as_settings(changes)))
    tables = _tables(model, fleet, as_settings(changes))
    given = flat(tables)
    for key, instead in FOLLOWS.items():
        if key in given:
            raise MistakeError(f"--set: {key} is not for best: {instead}")
    said = [each.partition("=")[0].strip() for each in as_settings(changes)]
    fabrics = _fabrics(fleet, options.get("fabrics", ()), is_set=FABRIC_KEY in said)
    scenario = _described(tables)
    length = scenario.model.sequence_length
    if length is None:
        raise MistakeError(f"model: {model!r} has no sequence length; add --sequence TOKENS")
    known = price_of(fleet.cluster.gpu.name, options.get("price"), options.get("prices"))
    if objective == "cost" and known is None:
        raise MistakeError("--objective: cost needs --price or --prices")
    _tell_notes(tables, fleet)
    counts_failures = tokens is not None or options.get("reliability") is not None
    power = fleet.power_w
    if objective == "energy" and power is None:
        raise MistakeError(f"--objective: energy: no power of {fleet.cluster.gpu.name} is known")
    return Question(
        tables=tables,
        fleet=fleet,
        sequences=_sequences(
            options.get("batch_tokens"), length, fleet.gpus, adapts="lora" in tables["model"]
        ),
        sequence_length=length,
        layers=scenario.model.layers or 0,
        experts=0 if scenario.model.experts is None else scenario.model.experts.count,
        objective=objective,
        tokens=tokens,
        within_s=within_s,
        price=known,
        power_w=power,
        fixed={key: value for key, value in given.items() if key.startswith(SOUGHT)},
        runtimes=_among(among, given),
        fabrics=fabrics,
        reliability=reliability_of(options.get("reliability")) if counts_failures else None,
        checkpoint_bytes=_checkpoint_bytes(tables, fleet.gpus) if counts_failures else 0,
    )


def _plain(tables: Mapping[str, Any], gpus: int) -> ResolvedScenario:
    """Return a plain setting of the question; its checkpoint is as large as that of the others."""
    plain = {
        "title": tables["title"],
        "model": tables["model"],
        "cluster": tables["cluster"],
        "zero": {"stage": 3},
        "parallel": {"data": gpus},
        "activations": tables.get("activations", {}),
        "train": {
            **tables["train"],
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
        },
    }
    with mistakes(ScenarioError):
        resolved, _ = settled(NAME, from_tables(plain))
    return resolved


def _checkpoint_bytes(tables: Mapping[str, Any], gpus: int) -> int:
    """Return the bytes of a checkpoint."""
    plain = _plain(tables, gpus)
    return checkpoint_bytes(plain.strategy, plain.make_model().trained_count)


def _tell_notes(tables: Mapping[str, Any], fleet: GpuFleet) -> None:
    """Print notes on the activations and on the NICs, if there are any."""
    nodes = max(1, fleet.gpus // fleet.cluster.gpus_per_node)
    nics = tables["cluster"].get("nics_per_node", fleet.cluster.nics_per_node)
    notes = [*nic_notes(replace(fleet.cluster, nodes=nodes, nics_per_node=nics))]
    activations = tables.get("activations", {})
    if activations.get("checkpointing") == Checkpointing.SELECTIVE:
        notes += checkpointing_notes(_plain(tables, fleet.gpus))
    print_ignored("; ".join(notes))


SOUGHT: Final = (
    "zero.",
    "parallel.",
    "experts.",
    "activations.checkpointing",
    "train.micro_batch_size",
)
"""Keys that the search sets, unless a change fixes them."""


FABRIC_KEY: Final = "cluster.fabric"
GPU_KEY: Final = "cluster.gpu"


def _gpu_of(settings: Sequence[str]) -> str | None:
    """Return the GPU that a change names; None if there is none."""
    found = None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key.strip() == GPU_KEY:
            with mistakes(ScenarioError):
                said = setting_value(setting, value.strip())
            found = said if isinstance(said, str) and said != "none" else None
    return found


def _fabrics(fleet: GpuFleet, names: Sequence[str], *, is_set: bool) -> tuple[str, ...]:
    """Return the fabrics that are compared.

    Raises:
        MistakeError: a name is unknown, a fabric does not fit the nodes, there is only one node,
            or a change sets the fabric.
    """
    if not names:
        return ()
    if is_set:
        raise MistakeError(f"--set: {FABRIC_KEY} is what --fabric compares: say one of the two")
    nodes = fleet.gpus // fleet.cluster.gpus_per_node
    if nodes < 2:
        raise MistakeError(f"--fabric: {fleet.title} are on one node; remove --fabric")
    for name in names:
        if name not in part_names(Part.FABRIC):
            raise MistakeError(f"--fabric: {one_of(name, part_names(Part.FABRIC))}")
        with mistakes(TopologyError, ClusterError, prefix="--fabric: "):
            topology(fleet.node, name, nodes)
    return tuple(dict.fromkeys(names))


def _among(among: Sequence[str], given: Mapping[str, object]) -> tuple[str, ...]:
    emulate = given.get("zero.emulate")
    if emulate is not None:
        return (str(emulate),)
    return tuple(dict.fromkeys(among)) or tuple(sorted(runtimes()))


def _tables(model: str, fleet: GpuFleet, settings: tuple[str, ...]) -> dict[str, Any]:
    """Return the tables of the scenario that the search completes."""
    key = "hf_config" if model.endswith(".json") else "name"
    base: dict[str, Any] = {
        "title": f"{_title(model)} on {fleet.title}",
        "model": {key: model},
        **fleet.tables,
        "train": {"precision": fleet.precision, "optimizer": "adam"},
    }
    with mistakes(ScenarioError):
        return with_settings(base, settings)


def _title(model: str) -> str:
    """Return the name of a model; of a file, its name, and that of its folder if it is usual."""
    if not model.endswith(".json"):
        return model
    path = Path(model)
    return f"{path.parent.name}/{path.name}".lstrip("/") if path.stem == "config" else path.name


def _described(tables: Mapping[str, Any]) -> Scenario:
    """Return the scenario of `tables`, with the shape of its model."""
    with mistakes(ScenarioError):
        scenario, told = with_files(NAME, from_tables({"zero": {"stage": 3}, **tables}))
        print_ignored(told)
        return scenario


def _sequences(batch_tokens: int | None, length: int, gpus: int, *, adapts: bool) -> int:
    """Return the sequences of a step; `adapts` is True if it trains adapters only.

    Raises:
        MistakeError: `batch_tokens` is not a multiple of `length`.
    """
    if batch_tokens is None:
        usual = ADAPTED_SEQUENCES if adapts else BATCH_TOKENS // length
        return max(usual // gpus, 1) * gpus
    if batch_tokens % length:
        below = batch_tokens // length * length
        near = f"{below:,} or {below + length:,}" if below else f"{length:,}"
        raise MistakeError(
            f"--batch: {batch_tokens:,} tokens must be a multiple of {length:,}, the tokens of a "
            f"sequence, such as {near}"
        )
    return batch_tokens // length
