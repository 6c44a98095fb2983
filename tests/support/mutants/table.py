"""How many mutants of each operator are wrong, by strategy, and how many of those are found."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from emulated_strategies import CHECKPOINTED, EMULATED
from emulated_strategies import strategy as emulating

from mutants import OPERATORS, Mutant, Operator
from mutants.verdict import EFFECTIVE, Court, Kind
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import Finding, check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import Keep

SHAPE = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)

MOVED = "checkpoints on the host"
"""The column of models with so many blocks that a stream of copies keeps some and moves others."""


def strategies() -> dict[str, list[Strategy]]:
    """What mutants are made of, by column of the table: zsim's own stages, and every runtime."""
    found: dict[str, list[Strategy]] = {}
    for stage in range(4):
        found[f"stage {stage}"] = [
            Strategy(
                parallel=Parallel(data=2),
                zero=Zero(stage=stage, bucket_elements=40),
                train=Train(gradient_accumulation_steps=2, precision=Precision.FP16, clip_norm=1.0),
            ),
            Strategy(
                parallel=Parallel(data=2, tensor=2),
                zero=Zero(stage=stage, bucket_elements=25, reductions_in_flight=2),
                activations=Activations(checkpointing=Checkpointing.FULL, partition=True),
                train=Train(optimizer=SGD()),
            ),
            Strategy(
                parallel=Parallel(data=3),
                zero=Zero(
                    stage=stage,
                    reduce_once=True,
                    bucket_elements=70,
                    prefetch_units=0,
                    keep_after_forward=Keep.EVERYTHING,
                    host_ahead_units=2,
                ),
                train=Train(gradient_accumulation_steps=2, precision=Precision.BF16),
            ),
            Strategy(
                parallel=Parallel(data=2, replicate=2),
                zero=Zero(stage=stage, bucket_elements=200, reductions_in_flight=0),
                train=Train(gradient_accumulation_steps=2, clip_norm=1.0),
            ),
            Strategy(
                parallel=Parallel(data=2, tensor=2),
                zero=Zero(stage=stage, bucket_elements=30, gathered_elements=0),
                train=Train(precision=Precision.FP16),
            ),
            Strategy(
                parallel=Parallel(data=2, tensor=1 + stage % 2),
                zero=Zero(stage=stage, bucket_elements=40, contiguous=stage > 1),
                activations=Activations(checkpointing=Checkpointing.FULL, partition=True),
                offload=Offload(checkpoints=MemoryTier.HOST),
                train=Train(gradient_accumulation_steps=2),
            ),
        ]
    for name, named in EMULATED.items():
        made = [
            emulating(named, data=2, replicate=2, micro_batches=2, clip_norm=1.0),
            emulating(named, data=2, precision=Precision.FP16),
        ]
        if not any(made):
            made = [emulating(named, data=4, micro_batches=2, clip_norm=1.0)]
        found[name] = [each for each in made if each is not None]
    moved = [
        emulating(named, data=2, micro_batches=2, checkpointing=Checkpointing.FULL)
        for named in CHECKPOINTED.values()
    ]
    found[MOVED] = [each for each in moved if each is not None]
    return found


@dataclass
class Cell:
    """One operator on one column.

    `sites` are all mutants that there are, of which `kinds` counts those that were judged; of those
    that are wrong, `caught` have a finding and `named` one that names what was changed.
    """

    operator: str
    column: str
    sites: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter[Kind])
    caught: int = 0
    named: int = 0
    missed: list[str] = field(default_factory=list[str])

    @property
    def effective(self) -> int:
        """Mutants that are wrong."""
        return sum(self.kinds[kind] for kind in EFFECTIVE)

    @property
    def is_exhausted(self) -> bool:
        """Whether every mutant that there is was judged."""
        return self.kinds.total() == self.sites


@dataclass(frozen=True)
class Case:
    """A schedule that is right, and who judges its mutants."""

    label: str
    model: Model
    schedule: Schedule
    court: Court


def cases(column: str, among: list[Strategy]) -> list[Case]:
    """The schedules of one column."""
    found: list[Case] = []
    shape = replace(SHAPE, layers=3) if column == MOVED else SHAPE
    for strategy in among:
        model = gpt(
            shape,
            micro_batch_size=1,
            tensor=strategy.parallel.tensor,
            precision=strategy.train.precision,
        )
        made = make_schedule(model, strategy)
        found.append(Case(column, model, made, Court(made, model, strategy)))
    return found


def names_it(finding: Finding, mutant: Mutant, operator: Operator) -> bool:
    """Whether a finding is of a family that the operator may break, and says where."""
    text = "\n".join((finding.operation, finding.why, *finding.witness))
    return finding.invariant in operator.invariants and any(place in text for place in mutant.where)


def cell(
    operator: Operator, column: str, among: list[Case], *, wanted: int, tries: int, seed: int
) -> Cell:
    """Judge mutants in a drawn order until `wanted` of them are wrong, but at most `tries`."""
    found = Cell(operator.name, column)
    pairs = [(case, mutant) for case in among for mutant in operator.sites(case.schedule)]
    found.sites = len(pairs)
    order = np.random.default_rng(seed).permutation(len(pairs))
    for place in order[:tries].tolist():
        case, mutant = pairs[place]
        verdict = case.court.judge(mutant)
        found.kinds[verdict.kind] += 1
        if verdict.kind in EFFECTIVE:
            assert verdict.schedule is not None
            findings = check(verdict.schedule, case.model)
            found.caught += bool(findings)
            found.named += any(names_it(finding, mutant, operator) for finding in findings)
            if not findings:
                found.missed.append(f"{mutant.where}: {verdict.kind}, {verdict.why}")
        if found.effective == wanted:
            break
    return found


def column(name: str, *, wanted: int, tries: int, seed: int = 0) -> Iterator[Cell]:
    """Every operator on one column."""
    among = cases(name, strategies()[name])
    for operator in OPERATORS:
        yield cell(operator, name, among, wanted=wanted, tries=tries, seed=seed)


def lines(cells: list[Cell]) -> Iterator[str]:
    """The table."""
    yield (
        f"{'operator':34}{'sites':>6}{'judged':>7}{'refused':>8}{'harmless':>9}{'undecided':>10}"
        f"{'wrong':>7}{'caught':>7}{'named':>7}"
    )
    for each in cells:
        kinds = each.kinds
        yield (
            f"{each.operator:34}{each.sites:>6}{kinds.total():>7}{kinds[Kind.REFUSED]:>8}"
            f"{kinds[Kind.HARMLESS]:>9}{kinds[Kind.UNDECIDED]:>10}{each.effective:>7}"
            f"{each.caught:>7}{each.named:>7}"
        )
        yield from (f"    missed {missed}" for missed in each.missed[:3])
    wrong, caught = sum(each.effective for each in cells), sum(each.caught for each in cells)
    named = sum(each.named for each in cells)
    yield f"{'all':34}{'':>40}{wrong:>7}{caught:>7}{named:>7}"
