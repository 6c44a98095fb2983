"""docs/reference/not_modelled.md, from the code: `python tests/support/refusals_page.py`.

Sections between marks are made from refusals of zsim and zsim_torch; all else is written by hand.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import torch
from generated_sections import made, table
from refusals import (
    AXES,
    PIPELINE,
    Setting,
    job_of,
    model_or_line,
    refusals_of,
    settings_of,
    tables_with,
)
from torch import nn

from zsim.backend.backend import RefusedError
from zsim.backend.chakra_document import REFUSED as COLLECTIVES
from zsim.files.installed import model_catalogue
from zsim.model.model import Model, ModelError
from zsim.runtimes.lookup import runtimes
from zsim.scenario.hugging_face_architectures import READERS
from zsim.scenario.hugging_face_architectures import REFUSED as TYPES
from zsim.strategy.strategy import Strategy
from zsim_torch.admission import refusal
from zsim_torch.module.module_loss import loss_of
from zsim_torch.module_schedule import planned_module, schedule_of
from zsim_torch.supervise.process_group import DeviceChoice

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "not_modelled.md"
COMMAND = "python tests/support/refusals_page.py"


def shown(setting: Setting) -> str:
    """Return a setting as `--set` takes it, or the name of its table."""
    key, value = setting
    if isinstance(value, dict):
        (name, value), *_ = value.items()
        key = f"{key}.{name}"
    if isinstance(value, list):
        return f"`{key}`"
    return f"`{key}={str(value).lower() if isinstance(value, bool) else value}`"


def of_runtime(runtime: str | None) -> str:
    """Return the table of the settings that a runtime refuses, alone or with others."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in refusals_of(runtime):
        others = found[shown(each.setting), each.line]
        others += [] if each.other is None else [shown(each.other)]
    rows = [(setting, ", ".join(others), f"`{line}`") for (setting, line), others in found.items()]
    return table(("setting", "with", "line"), rows)


def on_real_ranks() -> str:
    """Return the table of the settings that are simulated, but not run for built transformers."""
    plain, found = job_of(), dict[str, str]()
    assert plain is not None
    for runtime in (None, *runtimes()):
        for setting in settings_of(runtime):
            model = model_or_line(tables_with(runtime, setting))
            if isinstance(model, Model):
                line = _refused(replace(plain, model=model))
                if line is not None:
                    found.setdefault(line, shown(setting))
    for pair in combinations(AXES, 2):
        job = job_of(*pair, runtime="fsdp2" if PIPELINE in pair else None)
        line = None if job is None else _refused(job)
        if line is not None:
            found.setdefault(line, " and ".join(shown(each) for each in pair))
    return table(("setting", "line"), ((setting, f"`{line}`") for line, setting in found.items()))


_refused = partial(refusal, device=DeviceChoice.CPU, torchrun=None)


class Chain(nn.Module):
    """A module with a forward, whose units are found."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        for block in self.blocks:
            value = block(value)
        return value.sum()


class Head(nn.Module):
    """The last unit of a module whose units are named: it gets the batch too."""

    def forward(self, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return (value - target).square().sum()


def of_modules() -> str:
    """Return the table of the axes that a module of one's own is not trained along."""
    found: dict[str, tuple[str, set[str]]] = {}
    for runtime in (None, *runtimes()):
        for axis in AXES:
            strategy = _strategy(runtime, axis)
            for units, make in (("found", _found), ("named", _named)):
                line = None if strategy is None else make(strategy)
                if line is not None:
                    found.setdefault(line, (shown(axis), set()))[1].add(units)
    rows = [(axis, ", ".join(sorted(how)), f"`{line}`") for line, (axis, how) in found.items()]
    return table(("setting", "units", "line"), rows)


def _strategy(runtime: str | None, axis: Setting) -> Strategy | None:
    """Return the strategy of a runtime with an axis of two ranks; None if it is refused."""
    job = job_of(axis, ("train.precision", "fp32"), runtime=runtime)
    return None if job is None else job.schedule.contract.strategy


def _found(strategy: Strategy) -> str | None:
    """Return why a module whose units are found is not trained by `strategy`, or None."""
    module, batch = Chain(), torch.ones(2, 8)
    planned = planned_module(module, strategy, None, batch, loss=loss_of)
    assert planned is not None
    return _line(lambda: schedule_of(module, strategy, planned, batch, None, None))


def _named(strategy: Strategy) -> str | None:
    """Return why a module whose units are named is not trained by `strategy`, or None."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Head())
    batch = torch.ones(2, 8)
    return _line(lambda: schedule_of(module, strategy, list("0123"), batch, None, None))


def _line(make: Callable[[], object]) -> str | None:
    try:
        make()
    except (RefusedError, ModelError) as error:
        return str(error)
    return None


def of_models() -> str:
    """Return the table of models that are refused by name, with the reason."""
    rows = [
        (", ".join(f"`{each}`" for each in refused.names), refused.why)
        for family in model_catalogue().families
        for refused in family.refused
    ]
    rows += [(", ".join(f"`{each}`" for each in names), why) for why, names in TYPES.items()]
    return table(("names, or `model_type` of a `config.json`", "reason"), rows)


def of_files() -> str:
    """Return a list of the files that zsim reads in part."""
    return (
        f"- `model.hf_config` reads the `model_type`s {', '.join(READERS)}, and no other.\n"
        f"- Chakra traces with the collectives {', '.join(COLLECTIVES.values())} are refused.\n"
    )


@cache
def makers() -> dict[str, Callable[[], str]]:
    """Return the function that makes each section of the page, by its name."""
    return {
        "zsim": partial(of_runtime, None),
        **{name: partial(of_runtime, name) for name in runtimes()},
        "real ranks": on_real_ranks,
        "modules": of_modules,
        "models": of_models,
        "files": of_files,
    }


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text("utf-8"), makers()), "utf-8")
