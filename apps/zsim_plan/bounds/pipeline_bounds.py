"""Lower bound of the step time of a pipeline, from the order of its tasks and messages.

It is tighter than the bound of `step_bounds`, and takes longer to compute. Stages wait for each
other's messages during the whole step, not only in its first and last tasks.
"""

from zsim.closed_form.by_model import kept_stages
from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage
from zsim.runtimes.lookup import part
from zsim.runtimes.registry import copied_bytes, runtime_of
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.rank_speeds import RankSpeeds
from zsim_plan.bounds.step_bounds import LinkCut, RankClock


def pipeline_s(
    model: Model,
    strategy: Strategy,
    speeds: RankSpeeds,
    cut: LinkCut,
    *,
    few: int,
    turn: int,
) -> float:
    """Return a lower bound of the seconds of a step; 0 if the order of the runtime is not known.

    Like forecasts, it extrapolates a step from one of `few` micro-batches and one of a `turn` less.
    """
    steps = strategy.train.gradient_accumulation_steps
    if steps <= few:
        return _seconds(model, strategy, speeds, cut)
    whole_s, less_s = (
        _seconds(model, accumulating(strategy, count), speeds, cut) for count in (few, few - turn)
    )
    return whole_s + (steps - few) * (whole_s - less_s) / turn


def accumulating(strategy: Strategy, steps: int) -> Strategy:
    """Return the strategy with `steps` micro-batches in a step."""
    train = strategy.train.model_copy(update={"gradient_accumulation_steps": steps})
    return strategy.model_copy(update={"train": train})


def _seconds(model: Model, strategy: Strategy, speeds: RankSpeeds, cut: LinkCut) -> float:
    clock, made = RankClock(strategy=strategy, speeds=speeds), kept_stages(model, strategy)
    steps, rate = strategy.train.gradient_accumulation_steps, speeds.copied_bytes_per_s
    known: dict[tuple[int, int, bool], float] = {}
    for stage in made:
        for number, chunk in enumerate(stage.chunks):
            forward_s = clock.of_forward(chunk.model).seconds
            copied_s = copied_bytes(chunk.model, strategy).compute / rate / steps
            backward_s = clock.work(chunk.model).seconds - forward_s + copied_s
            known[stage.index, number, True] = forward_s
            known[stage.index, number, False] = backward_s

    def tasks(stage: int, chunk: int, is_forward: bool) -> float:  # noqa: FBT001 (a key)
        return known[stage, chunk, is_forward]

    def messages(stage: int, chunk: int, is_forward: bool) -> float:  # noqa: FBT001 (a key)
        return _message_s(made[stage], chunk, strategy, cut, is_forward=is_forward)

    pace = runtime_of(strategy).pace
    if pace is None:
        return 0.0
    return part(pace, name="pace")(strategy, len(made[0].chunks), tasks, messages)


def _message_s(
    stage: Stage, chunk: int, strategy: Strategy, cut: LinkCut, *, is_forward: bool
) -> float:
    """Return the least seconds of the message with the output of a chunk, or with its gradient.

    All ranks of a stage send at the same time, and share the links of their domain.
    """
    own = stage.chunks[chunk]
    value = own.sent if is_forward else own.given
    if value is None:
        return 0.0
    ranks, runtime = strategy.parallel.tensor, strategy.zero.emulate
    is_cut = runtime is not None and runtime.cuts_messages(tensor=ranks)
    size = value.size_bytes
    if is_cut and value.elements % ranks == 0:
        size //= ranks
    count, domain = strategy.parallel.pipeline, cut.gpus_per_domain
    to, of_stage = (stage.index + (1 if is_forward else -1)) % count, strategy.ranks // count
    if of_stage >= domain:
        return domain * size / cut.domain
    if strategy.ranks > domain and domain % of_stage:
        return 0.0  # only some of the ranks send to another domain
    is_near = stage.index * of_stage // domain == to * of_stage // domain
    return size / cut.gpu if is_near else of_stage * size / cut.domain
