"""Models of which some parameters are frozen, as Hypothesis draws them."""

import fnmatch
from dataclasses import replace
from fnmatch import fnmatchcase

from drawn import chains, in_groups, models, zero_strategies
from drawn_emulated import emulated_jobs
from hypothesis import strategies as st

from zsim.model.architecture import LoRA
from zsim.model.model import Model, Segment, Value
from zsim.model.transformer import transformer
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2

Job = tuple[Model, Strategy]
PATTERNS = (
    "embedding*",
    "block0.*",
    "block[01].*",
    "*.bias",
    "*.weight",
    "*.ln*",
    "*.down.*",
    "head.ln*",
)


@st.composite
def adapted(draw: st.DrawFn, strategy: Strategy) -> Model:
    """A small transformer with adapters, or with frozen parameters."""
    plain = draw(models(strategy))
    shape, names = plain.architecture, [parameter.name for parameter in plain.parameters]
    assert shape is not None
    if strategy.parallel.tensor == 1 and draw(st.booleans()):
        targets = st.lists(st.sampled_from(shape.linear_layers), max_size=3, unique=True)
        lora = LoRA(rank=draw(st.integers(1, 3)), targets=tuple(draw(targets)))
        shape = replace(shape, lora=lora)
    else:
        found = [each for each in PATTERNS if 0 < len(fnmatch.filter(names, each)) < len(names)]
        some = draw(st.lists(st.sampled_from(found), min_size=1, max_size=2, unique=True))
        whole = all(any(fnmatchcase(name, each) for each in some) for name in names)
        shape = replace(shape, frozen=tuple(some[:1] if whole else some))
    return transformer(
        shape,
        micro_batch_size=plain.micro_batch_size,
        tensor=plain.tensor,
        precision=strategy.train.precision,
    )


@st.composite
def partly_frozen(draw: st.DrawFn, strategy: Strategy) -> Model:
    """Units in a row with any parameters, any of them frozen, one that several share as well."""
    plain = draw(chains(strategy))
    names = [each.name for each in plain.parameters]
    frozen = draw(st.sets(st.sampled_from(names), min_size=1)) if names else set[str]()
    if len(frozen) == len(names):
        return plain
    return with_frozen(plain, frozen)


def with_frozen(model: Model, frozen: set[str]) -> Model:
    """The model with some parameters frozen: what is before all others has no gradient."""
    units = []
    sloped: set[str] = set()
    for unit in model.units:
        segments: list[Segment] = []
        for segment in unit.segments:
            trains = not frozen.issuperset(segment.parameters)
            if trains or not sloped.isdisjoint(segment.inputs):
                sloped |= {value.name for value in segment.outputs}
            outputs: tuple[Value, ...] = tuple(
                replace(value, requires_gradient=value.name in sloped) for value in segment.outputs
            )
            again = any(value.requires_gradient for value in outputs)
            kept = segment.saved_bytes if again else 0
            segments.append(replace(segment, outputs=outputs, saved_bytes=kept))
        parameters = tuple(replace(each, frozen=each.name in frozen) for each in unit.parameters)
        units.append(replace(unit, parameters=parameters, segments=tuple(segments)))
    return replace(model, units=tuple(units))


def any_model(strategy: Strategy) -> st.SearchStrategy[Model]:
    """A model with frozen parameters, of either kind."""
    drawn = st.one_of(adapted(strategy), partly_frozen(strategy))
    return drawn.filter(lambda model: bool(model.frozen and model.trained_count))


@st.composite
def frozen_jobs(draw: st.DrawFn) -> Job:
    """A model with frozen parameters, and one of zsim's own strategies."""
    strategy = draw(zero_strategies(max_data=4))
    model = draw(any_model(strategy))
    return model, draw(in_groups(model, strategy))


@st.composite
def frozen_emulated_jobs(draw: st.DrawFn) -> Job:
    """A model with frozen parameters, and a strategy that emulates a runtime that takes them."""
    runtimes = emulated_jobs().filter(
        lambda job: isinstance(job[1].zero.emulate, FSDP2 | DeepSpeed)
    )
    _, strategy = draw(runtimes)
    model = draw(any_model(strategy))
    return model, draw(in_groups(model, strategy.but({"train.groups": ()})))
