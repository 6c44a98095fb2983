"""The result of `zsim.best`: the best setting, its ties, and why the others lost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from zsim.analysis.run_comparison import counts
from zsim.analysis.summary import utilization_text
from zsim.api.answer import AnswerInFacts
from zsim.api.answer_text import facts_text, table_text
from zsim.api.error_text import error_object, probability_text
from zsim.api.goodput_answer import Goodput
from zsim.api.notebook import facts_html
from zsim.api.scenario import scenario_text
from zsim.api.training_budget import Price, TrainingBudget
from zsim.cluster.files.domain import domain_share
from zsim.cluster.foreign_profile import efficiency_words
from zsim.files.output_file import need_folder, write
from zsim.files.source import settled
from zsim.mistake import MistakeError
from zsim.prediction.memory_margin import TIGHT
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.lookup import config_text
from zsim.scenario.changes import changed
from zsim.scenario.tables import from_tables
from zsim.schedule.program import Discipline
from zsim.units import format_bytes, format_seconds
from zsim_plan.answer.best_report import BestPages, OrderedSettings
from zsim_plan.answer.launch_script import SettingLaunch, launch_script
from zsim_plan.answer.search_text import (
    BETTER,
    better_unsure,
    nearest,
    optimality_text,
    risk_text,
    searched_text,
    unfinished_text,
)
from zsim_plan.answer.setting_bound import LATE
from zsim_plan.answer.setting_trial import NAME
from zsim_plan.answer.tried_setting import LONGER, TriedSetting
from zsim_plan.search.front import front

SHOWN = 10
"""Number of settings that the text lists."""

TIGHT_SHOWN = 5
"""Number of settings with almost no free memory that the text lists."""

TIGHT_HEAD = (
    f"Under {1 - TIGHT:.0%} of the memory left (real runs with so little are often much slower)"
)

REASONS_SHOWN = 8
"""Number of reasons that the text lists."""


def _no_goodput(_gpus: int) -> Goodput | None:
    return None


@dataclass(frozen=True, slots=True)
class LossReason:
    """A reason why settings were not chosen, and the number of these settings."""

    kind: str
    why: str
    count: int


@dataclass(frozen=True, kw_only=True, repr=False)
class BestResult(BestPages, AnswerInFacts):
    """The best of all settings that were considered.

    Attributes:
        title: the model and the GPUs.
        objective: the quantity to minimize: "time", "cost", "energy" or "gpus".
        settings: number of settings that were considered.
        tried: settings that were simulated, the best first.
        losses: why the others lost.
        gap: by which fraction of its value a missed setting may be better.
        open_settings: number of settings not simulated that may still be better.
        left_out: number of settings with offload that were skipped, since others fit without it.
        operations: operations of all schedules written or simulated; they limit the search.
        unsure_settings: number of settings that were skipped, since they may not fit and others do.
        is_stopped: True if the search reached its limit of processor time.
        is_interrupted: True if the user ended the search.
        tables: tables of the scenario without a setting.
        sequences: sequences of a step, each of `sequence_length` tokens.
        gpu, power_w: name and power limit of the GPU.
        gpus_per_node: GPUs of a node.
        nodes_per_domain: nodes that share an NVSwitch.
        tokens: tokens of the whole training; None if not given.
        price: price of a GPU; None if unknown.
        bounded_s: lower bound of the step time of all settings that may fit.
        goodput_of: function that returns the goodput on a number of GPUs; None if not asked.
        by_fabric: step time in seconds of the best setting on each fabric that was compared.
        enough: if no setting is an answer, the GPUs on which a plain one is, and what it takes.
        wall_time_s: duration of the search; the only attribute that depends on the machine.
    """

    title: str
    objective: str
    settings: int
    tried: Sequence[TriedSetting]
    losses: tuple[LossReason, ...]
    gap: float
    open_settings: int
    left_out: int = 0
    operations: int = 0
    unsure_settings: int = 0
    is_stopped: bool = False
    is_interrupted: bool = False
    tables: Mapping[str, Any]
    sequences: int
    sequence_length: int
    gpu: str
    gpus_per_node: int
    nodes_per_domain: int
    tokens: int | None = None
    price: Price | None = None
    power_w: int | None = None
    bounded_s: float = 0.0
    by_fabric: Mapping[str, float] = field(default_factory=dict[str, float])
    goodput_of: Callable[[int], Goodput | None] = _no_goodput
    enough: str = ""
    wall_time_s: float = 0.0

    @property
    def is_scaled(self) -> bool:
        """True if kernels have the efficiency of another GPU, scaled to the data sheet."""
        kernels = self.tables.get("compute", {}).get("profile")
        return bool(efficiency_words(kernels or "", self.gpu))

    @cached_property
    def answers(self) -> tuple[TriedSetting, ...]:
        """Settings that were simulated and fit, the best first."""
        return tuple(each for each in self.tried if each.is_answer)

    @property
    def best(self) -> TriedSetting | None:
        """The best setting that surely fits, else the best that may fit; None if none fits."""
        return self.answers[0] if self.answers else None

    @property
    def unsure(self) -> TriedSetting | None:
        """The best setting that is better than `best`, but may not fit; None if there is none."""
        better = [each for each in self.answers if self.more(each) < 0]
        return min(better, key=self.more, default=None)

    @cached_property
    def ten(self) -> tuple[TriedSetting, ...]:
        """The best ten settings that differ in what people choose between, the best first.

        Two of them differ in the runtime, the stage, a degree, checkpointing, offload or the GPUs.
        The best of each runtime and of plain FSDP2 settings are among them. Settings with almost no
        free memory are not, unless all have as little.
        """
        roomy = [each for each in self.answers if not each.outcome.is_tight] or self.answers
        plain = next((each for each in roomy if each.is_plain), None)
        of_runtime: dict[str, TriedSetting] = {}
        of_choice: dict[object, TriedSetting] = {}
        for each in roomy:
            of_runtime.setdefault(each.runtime, each)
            of_choice.setdefault(each.choice, each)
        certain = [each.choice for each in of_runtime.values()]
        certain += [] if plain is None else [plain.choice]
        shown = [of_choice[choice] for choice in dict.fromkeys([*certain, *of_choice])]
        return tuple(sorted(shown[:SHOWN], key=lambda each: each.order))

    @cached_property
    def tight(self) -> tuple[TriedSetting, ...]:
        """The best settings that leave almost no free memory, one of each choice."""
        of_choice: dict[object, TriedSetting] = {}
        for each in self.answers:
            if each.outcome.is_tight and each not in self.ten:
                of_choice.setdefault(each.choice, each)
        return tuple(of_choice.values())[:TIGHT_SHOWN]

    @cached_property
    def front(self) -> tuple[TriedSetting, ...]:
        """Pareto front of step time, memory and GPUs of settings with free memory, sorted."""
        roomy = [each for each in self.answers if not each.outcome.is_tight] or self.answers
        figures = [
            (each.outcome.step_time_s, float(each.outcome.memory_bytes), float(each.gpus))
            for each in roomy
        ]
        return tuple(roomy[place] for place in front(figures))

    def ordered(self) -> OrderedSettings:
        """Return the settings that the page shows."""
        return OrderedSettings(answers=self.answers, ten=self.ten, ties=self.ties)

    def more(self, other: TriedSetting) -> float:
        """Return by which fraction `other` is worse than the best.

        With the fewest GPUs as objective, it is that of GPUs if they differ.
        """
        assert self.best is not None
        assert self.best.value
        assert other.value is not None
        if self.objective == "gpus" and other.gpus != self.best.gpus:
            return other.gpus / self.best.gpus - 1
        return other.value / self.best.value - 1

    def is_tie(self, other: TriedSetting) -> bool | None:
        """Return True if `other` is within the error of its ratio to the best; None if unknown."""
        assert self.best is not None
        if self.objective == "gpus" and other.gpus != self.best.gpus:
            return False
        found = counts(self.more(other), self.best.outcome.error, other.outcome.error)
        return None if found is None else not found

    @cached_property
    def ties(self) -> tuple[TriedSetting, ...]:
        """Settings whose difference from the best is within the error of the ratio."""
        return tuple(each for each in self.answers[1:] if self.is_tie(each))

    def scenario(self, setting: TriedSetting) -> dict[str, Any]:
        """Return the tables of the scenario with `setting`, which `zsim.load` accepts."""
        title = f"{self.title}: {setting.name()}"
        return changed({**self.tables, "title": title}, setting.changes)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the best setting as a scenario.

        Raises:
            MistakeError: nothing fits, or the folder of `path` does not exist.
            UnwrittenError: the file cannot be written.
        """
        if self.best is None:
            raise MistakeError(f"--save: {path}: no setting fits")
        need_folder("--save", Path(path))
        write(Path(path), scenario_text(self.scenario(self.best)))

    def config_text(self, setting: TriedSetting, *, suffix: str = "") -> str:
        """Return a setting as the configuration of its runtime, or as a file with a suffix.

        Raises:
            MistakeError: there is no such configuration, or it cannot express the setting.
        """
        parallel = {"context": 1, **self.tables.get("parallel", {})}
        shared = ("context", "context_exchange", "expert", "expert_tensor")
        kept = {f"parallel.{key}": parallel[key] for key in shared if key in parallel}
        asked = ConfigQuestion(
            changes={**kept, **setting.changes},
            precision=str(self.tables["train"]["precision"]),
            sequences=self.sequences,
            sequence_length=self.sequence_length,
            clip_norm=self.tables["train"].get("clip_norm"),
            model=self.tables["model"].get("name", ""),
            train=self.tables["train"],
        )
        return config_text(asked, suffix=suffix)

    def launch(self, setting: TriedSetting) -> SettingLaunch:
        """Return the values from which a start script is written."""
        cluster = self.tables.get("cluster", {})
        nodes = -(-setting.gpus // self.gpus_per_node)
        share = domain_share(nodes, self.nodes_per_domain)
        return SettingLaunch(
            name=setting.name(),
            runtime=str(setting.changes["zero.emulate"]),
            gpus=setting.gpus,
            gpus_per_node=self.gpus_per_node,
            nodes_per_domain=cluster.get("nodes_per_domain", share),
            is_expandable=cluster.get("allocator") == Discipline.EXPANDABLE,
        )

    def save_config(self, path: str | PathLike[str]) -> None:
        """Write the best setting as the configuration of its runtime; .toml means torchtitan.

        Next to it, write a script that starts it: `.sh` for torchrun on one node, `.sbatch` for
        Slurm on several.

        Raises:
            MistakeError: nothing fits, the folder of `path` does not exist, or zsim cannot write
                such a configuration.
            UnwrittenError: the file cannot be written.
        """
        if self.best is None:
            raise MistakeError(f"--config: {path}: no setting fits")
        need_folder("--config", Path(path))
        text = self.config_text(self.best, suffix=Path(path).suffix)
        write(Path(path), text)
        asked = self.launch(self.best)
        write(asked.path(Path(path)), launch_script(asked, Path(path)))

    def budget(self, setting: TriedSetting, tokens: int | None = None) -> TrainingBudget | None:
        """Return the days, cost and energy of the training; None if its tokens are unknown.

        `tokens` replaces the tokens of the question.
        """
        tokens = self.tokens if tokens is None else tokens
        if tokens is None:
            return None
        steps = tokens / (self.sequences * self.sequence_length)
        return TrainingBudget(
            tokens=tokens,
            seconds=steps * setting.outcome.step_time_s,
            gpus=setting.gpus,
            price=self.price,
            gpu_power_w=self.power_w,
            goodput=self.goodput_of(setting.gpus),
        )

    def mfu(self, setting: TriedSetting, *, causal: bool = False) -> float:
        """Return the model FLOPs utilization; `causal` leaves out the FLOPs of masked attention."""
        resolved, _ = settled(NAME, from_tables(self.scenario(setting)))
        model, strategy = resolved.make_model(), resolved.strategy
        flops = model.forward_flops + model.backward_flops - (model.masked_flops if causal else 0)
        batches = strategy.replicas * strategy.train.gradient_accumulation_steps
        peak = resolved.cluster.gpu.rate(strategy.train.precision.compute).peak
        return flops * batches / setting.outcome.step_time_s / (setting.gpus * peak)

    def gain(self, other: TriedSetting) -> str:
        """Return the text of the gain of `other` over the best setting, such as "2.9% faster"."""
        assert self.best is not None
        if self.objective == "gpus" and other.gpus < self.best.gpus:
            return f"{other.gpus:,} GPUs instead of {self.best.gpus:,}"
        return f"{-self.more(other):.1%} {BETTER[self.objective]}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the names and texts of the first lines that `zsim best` prints."""
        best = self.best
        has_best, simulated = best is not None, len(self.tried)
        searched = searched_text(self, simulated=simulated, has_best=has_best)
        if best is None:
            is_late = any(each.why.startswith(LATE) for each in self.losses)
            none = "none is fast enough for --within" if is_late else "none fits"
            near = [] if is_late else nearest(self.tried)
            enough = [("enough", self.enough)] if self.enough else []
            return [("best", none), *near, *enough, ("search", searched)]
        found, step = best.outcome, self.sequences * self.sequence_length
        seconds = format_seconds(found.step_time_s)
        lines = [
            ("best", f"{risk_text(best.outcome)}{best.description()}: {seconds} a step"),
            *([("options", best.options())] if best.options() else []),
            *better_unsure(self),
            (
                "step time",
                f"{seconds} for {step:,} tokens ({self.sequences:,} "
                f"sequences): {step / found.step_time_s:,.0f} tokens/s, "
                f"MFU {utilization_text(self.mfu(best), self.mfu(best, causal=True))}",
            ),
            (
                "memory",
                f"reserves {format_bytes(found.memory_bytes)} of "
                f"{format_bytes(found.usable_bytes)} usable on {self.gpu}; fits with probability "
                f"{probability_text(found.fit_probability)}",
            ),
        ]
        if self.by_fabric:
            times = [f"{format_seconds(each)} over {name}" for name, each in self.by_fabric.items()]
            lines.append(("fabrics", f"a step of this setting takes {', '.join(times)}"))
        if found.slower >= LONGER:
            lines.append(("expected", f"{best.longer()} as predicted, in the median"))
        if (budget := self.budget(best)) is not None:
            lines += budget.facts()
        elif (goodput := self.goodput_of(best.gpus)) is not None:
            lines += goodput.facts()
        is_beaten = self.unsure is not None or self.unsure_settings > 0
        optimality = optimality_text(self, is_sure=found.is_sure, unsure_is_better=is_beaten)
        lines += [("optimality", optimality), ("search", searched), *self._tied()]
        return [*lines, ("error", found.error_text)]

    def _tied(self) -> list[tuple[str, str]]:
        if not self.ties:
            return []
        groups = len({each.group for each in self.ties})
        return [
            (
                "ties",
                f"{len(self.ties)} settings in {groups} group{'s' * (groups > 1)} are within the "
                f"error of the best",
            )
        ]

    @property
    def unfinished(self) -> str:
        """Warning that a setting better by more than 5 % may be missed; empty if not."""
        is_sure = self.best is not None and self.best.outcome.is_sure
        return unfinished_text(self, has_best=self.best is not None, is_sure=is_sure)

    def text(self) -> str:
        """Return the facts, the ten best, the Pareto front, and why the others lost."""
        parts = [self.unfinished] if self.unfinished else []
        parts.append(super().text())
        if self.ten:
            of = f"the {len(self.answers):,} settings that were simulated and fit"
            head = f"Best of {of}, one of each runtime, stage, degrees and checkpointing:"
            parts += ["", head, self._table(self.ten)]
        if self.tight:
            parts += ["", f"{TIGHT_HEAD}:", self._table(self.tight)]
        if len(self.front) > 1:
            parts += ["", "Less memory takes more time:", self._table(self.front[:SHOWN])]
        if self.losses:
            parts += ["", "Why the others lost:", self._losses_text()]
        return "\n".join(parts)

    def _table(self, settings: Sequence[TriedSetting]) -> str:
        rows = [
            (
                each.name(),
                f"{each.gpus:,}",
                format_seconds(each.outcome.step_time_s),
                format_bytes(each.outcome.memory_bytes),
                self._comparison(each),
            )
            for each in settings
        ]
        columns = ("setting", "GPUs", "step", "memory", "to the best")
        return table_text(columns, rows, words=(0, 4))

    def _comparison(self, each: TriedSetting) -> str:
        risk = probability_text(each.outcome.fit_probability)
        verdict = "" if each.outcome.is_sure else f", fits with probability {risk}"
        if each is self.best:
            return f"best{verdict}"
        verdict = f", within the error{verdict}" if self.is_tie(each) else verdict
        verdict += f", {each.longer()}" if each.outcome.slower >= LONGER else ""
        best = each if self.best is None else self.best
        of_gpus = " GPUs" if self.objective == "gpus" and each.gpus != best.gpus else ""
        return f"{self.more(each):+.1%}{of_gpus}{verdict}"

    def _losses_text(self) -> str:
        many = sorted(self.losses, key=lambda each: -each.count)[:REASONS_SHOWN]
        shown = [each for each in self.losses if each in many]
        if rest := sum(each.count for each in self.losses if each not in many):
            shown.append(LossReason("others", "other reasons, all in --json", rest))
        return facts_text((f"{each.count:,} {each.kind}", each.why) for each in shown)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim best --json` prints."""
        best = self.best
        return {
            "title": self.title,
            "objective": self.objective,
            "best": None if best is None else self._object(best),
            "unsure": None if self.unsure is None else self._object(self.unsure),
            "unfinished": self.unfinished or None,
            "gap": self.gap,
            "by_fabric": dict(self.by_fabric),
            "settings": self.settings,
            "simulated": len(self.tried),
            "operations": self.operations,
            "not_reached": self.open_settings,
            "left_out": self.left_out,
            "tokens_per_step": self.sequences * self.sequence_length,
            "ten": [self._object(each) for each in self.ten],
            "tight": [self._object(each) for each in self.tight],
            "front": [self._object(each) for each in self.front],
            "ties": [dict(each.changes) for each in self.ties],
            "losses": [
                {"kind": each.kind, "why": each.why, "settings": each.count} for each in self.losses
            ],
        }

    def _object(self, each: TriedSetting) -> dict[str, object]:
        budget, goodput = self.budget(each), self.goodput_of(each.gpus)
        return {
            "settings": dict(each.changes),
            "gpus": each.gpus,
            "step_time_s": each.outcome.step_time_s,
            "peak_reserved_bytes": each.outcome.memory_bytes,
            "usable_memory_bytes": each.outcome.usable_bytes,
            "value": each.gpus if self.objective == "gpus" else each.value,
            "error": error_object(
                each.outcome.error, each.outcome.step_time_s, each.outcome.error_text
            ),
            "fit_probability": each.outcome.fit_probability,
            "published_took_times_as_long": each.outcome.slower,
            "leaves_no_memory": each.outcome.is_tight,
            "tie": None if each is self.best else self.is_tie(each),
            "budget": None if budget is None else budget.to_dict(),
            "goodput": None if goodput is None else goodput.to_dict(),
        }

    def _repr_html_(self) -> str:
        warning = [("unfinished", self.unfinished)] if self.unfinished else []
        return facts_html(self.title, [*warning, *self.facts()])

    def __repr__(self) -> str:
        name = None if self.best is None else self.best.name()
        return f"BestResult(title={self.title!r}, best={name!r}, gap={self.gap:.3f})"
