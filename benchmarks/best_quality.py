"""Quality of the answers of `zsim best`: against exhaustive sweeps, long searches, published runs.

    python -m benchmarks.best_quality [exhaustive] [long] [published]

Without a name, all three. The figures do not depend on the machine, only the wall time does.

- exhaustive: in small spaces that are drawn, the answer is compared with the best of all settings.
- long: for real questions, the answer of the default search is compared with that of a search with
  several times the number of operations. It is skipped if the bounds of the default search
  prove already that no setting is better by more than the target.
- published: of groups of published runs of one model on equally many GPUs, the setting that zsim
  ranks first is compared with the fastest; of pairs that differ by more than a tenth, zsim must put
  the faster first (`zsim validate best`).
"""

import sys
from collections.abc import Mapping

import numpy as np

import zsim
from zsim_lab.answer.choice_validation import validate_best
from zsim_lab.verdict.setting_choice import NEAR
from zsim_plan.answer.best_question import Question, question_of
from zsim_plan.answer.best_result import BestResult
from zsim_plan.answer.best_search import OPERATIONS, best_of
from zsim_plan.answer.setting_trial import tried
from zsim_plan.search.space import SettingGroup

SEEDS, NEAR_EXHAUSTIVE = tuple(range(20)), 0.01
TIMES, NEAR_LONG = 4, 0.03
SHARE, PAIRS = 0.90, 0.85
WORKERS = None
"""One for each core."""

SMALL = ("model.layers=3", "model.sequence_length=256", "model.vocab_size=1000")
"""A model of the right width with few layers: it is simulated in little time."""

GPUS = ("8xh100", "4xa100", "4x4090", "16xv100", "16xh100")
RUNTIMES = ("fsdp1", "fsdp2", "megatron", "nanotron")

LORA = {"model.lora.rank": 16}
QUESTIONS: tuple[tuple[str, str, Mapping[str, object]], ...] = (
    ("llama3.1-8b", "8xh100", {}),
    ("llama3.1-70b", "128xh100", {}),
    ("llama2-13b", "dgx2", {}),
    ("qwen2.5-32b", "16xa100", {"model.sequence_length": 32_768}),
    ("llama3.1-8b", "4x4090", {**LORA, "cluster.host_memory": "64 GB"}),
    ("qwen3-8b", "8xl40s", LORA),
    ("gemma2-27b", "16xb200", {}),
    ("mistral-7b", "8xa100", {}),
    ("llama2-70b", "64xa100", {}),
    ("llama3.1-70b", "256xh200", {}),
)


def small_question(seed: int) -> Question:
    """Draw a question with few settings; some settings do not fit."""
    draw = np.random.default_rng(seed)
    runtime, gpus = str(draw.choice(RUNTIMES)), str(draw.choice(GPUS))
    tensor, checkpoints = draw.choice((1, 2)), draw.choice(("none", "full"))
    return question_of(
        "llama3.2-1b",
        gpus,
        (
            *SMALL,
            f"cluster.gpu_memory={draw.choice((4, 6, 8))} GB",
            f"activations.checkpointing={checkpoints}",
            f"parallel.tensor={tensor}",
        ),
        among=[runtime],
        batch_tokens=256 * int(gpus.partition("x")[0]) * int(draw.choice((1, 2))),
    )


def exhaustive(question: Question) -> float | None:
    """Return the least step time that is expected of settings that surely fit, else of any.

    Settings with offload count where none without surely fits. None if none fits.
    """
    found: list[tuple[bool, bool, bool, float]] = []
    for group in question.space().groups():
        if not isinstance(group, SettingGroup):
            continue
        if group.moves_states and any(not is_unsure for is_unsure, *_ in found):
            continue
        for number in range(len(group.knobs)):
            outcome = tried(question.scenario(group.setting(number)))
            if outcome.fits:
                value = outcome.step_time_s * outcome.slower
                unsure = not outcome.is_sure
                found.append((unsure, outcome.is_tight, group.moves_states, value))
    without = [each for each in found if not each[0] and not each[2]]
    least = min(without or found, key=lambda each: (*each[:2], each[3]), default=None)
    return None if least is None else least[3]


def excess(found: BestResult, least: float | None) -> float:
    """Return by which fraction the answer is worse than `least`; 0 if nothing fits in either."""
    if found.best is None or found.best.value is None or least is None:
        return 0.0 if found.best is None and least is None else float("inf")
    return found.best.value / least - 1


def _exhaustive() -> bool:
    """Print how much worse searches are than exhaustive sweeps; return True if none is."""
    worst = 0.0
    for seed in SEEDS:
        question = small_question(seed)
        found = best_of(question, workers=1)
        worst = max(worst, excess(found, exhaustive(question)))
        print(f"space {seed}: {found.settings} settings, worst so far {worst:+.2%}", flush=True)
    return worst <= NEAR_EXHAUSTIVE


def _long() -> bool:
    """Print how much worse default searches are than long ones; return True if all are near."""
    near = True
    for model, gpus, changes in QUESTIONS:
        found = zsim.best(model, gpus, changes, workers=WORKERS)
        text = f"{model} on {gpus}: {found.wall_time_s:.0f} s, gap {found.gap:.1%}"
        if found.gap > NEAR_LONG or found.best is None:
            longer = zsim.best(model, gpus, changes, operations=TIMES * OPERATIONS, workers=WORKERS)
            value = None if longer.best is None else longer.best.value
            worse = excess(found, value)
            near = near and worse <= NEAR_LONG
            text += f"; {worse:+.2%} to {TIMES} times the operations, {longer.wall_time_s:.0f} s"
        print(text, flush=True)
    return near


def _published() -> bool:
    """Print how well published runs are ranked; return True if targets are met."""
    found = validate_best()
    print(found.text())
    return found.good >= SHARE * len(found.choices) and found.ordered >= PAIRS * found.pairs


CHECKS = {
    "exhaustive": (_exhaustive, f"within {NEAR_EXHAUSTIVE:.0%} of all exhaustive sweeps"),
    "long": (_long, f"within {NEAR_LONG:.0%} of all long searches"),
    "published": (_published, f"{SHARE:.0%} of choices within {NEAR:.0%}, {PAIRS:.0%} of pairs"),
}


def main() -> int:
    """Print each comparison and whether its target is met; 1 where one is missed."""
    met = True
    for name in sys.argv[1:] or CHECKS:
        check, target = CHECKS[name]
        is_met = check()
        met = met and is_met
        print(f"{target}: {is_met}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
