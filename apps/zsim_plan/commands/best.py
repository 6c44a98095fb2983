"""`zsim best MODEL --gpus 128xh100`."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from zsim.cli.option import (
    Code,
    Json,
    Price,
    Prices,
    Reliable,
    Settings,
    Tokens,
    at_least,
    completed,
)
from zsim.cli.printing import Output, answer_before, outputs, print_answer
from zsim.cli.progress_bar import progress
from zsim.mistake import MistakeError

if TYPE_CHECKING:
    from zsim.cli.progress_bar import Lines
    from zsim_plan.answer.best_question import BestOptions
    from zsim_plan.answer.best_result import BestResult
    from zsim_plan.answer.best_search import SearchOptions
    from zsim_plan.answer.cluster_choice import ClusterChoice

Model = Annotated[
    str,
    typer.Argument(
        help="A model by name (zsim list models), or a config.json of Hugging Face.",
        show_default=False,
        autocompletion=completed("model_names"),
    ),
]


Gpus = Annotated[
    str,
    typer.Option(
        metavar="GPUS", help="GPUs, or nodes: 128xh100, dgx2, 8xmine.toml.", show_default=False
    ),
]
Or = Annotated[
    list[str] | None,
    typer.Option(
        "--or",
        metavar="GPUS",
        help="Compare with these GPUs. A quote has its price: 64xb200@4.20. Many are allowed.",
    ),
]
Within = Annotated[
    str | None, typer.Option(metavar="TIME", help='Time that these may take: "30 days".')
]
Batch = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="Tokens of a step: 4M is 4 x 2^20. Default: 4M, or more."),
]
Length = Annotated[
    str | None,
    typer.Option("--sequence", metavar="TOKENS", help="Tokens of a sequence: 32k is 32 x 2^10."),
]
Objective = Annotated[
    str, typer.Option(metavar="WHAT", help="The least time, cost, energy or gpus.")
]
Runtime = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Choose among these runtimes. Many are allowed."),
]
Fabric = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Choose among these fabrics between nodes (zsim list fabrics). Many are allowed.",
        autocompletion=completed("fabric_names"),
    ),
]
LENGTH_KEY = "model.sequence_length"
"""Key of a scenario that --sequence sets."""

OPERATIONS = 3_000_000
"""Default limit on simulated operations; the same as in `zsim_plan.answer.best_search`."""

SearchOperations = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=at_least(1),
        help="Simulate no other setting after this many operations of schedules.",
    ),
]


def _no_seconds(given: str | None) -> None:
    """Reject the former option --search-time.

    Raises:
        MistakeError: the option is given.
    """
    if given is not None:
        raise MistakeError(
            "--search-time: seconds depend on the machine and no longer limit a search; use "
            f"--search-operations N (default: {OPERATIONS:,})"
        )


SearchTime = Annotated[str | None, typer.Option(hidden=True, callback=_no_seconds)]
Workers = Annotated[
    int | None,
    typer.Option(metavar="N", parser=at_least(1), help="Processes. Default: all cores."),
]
Scheduler = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Dask scheduler whose workers simulate settings."),
]
Save = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the best setting as a scenario: .toml."),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write it as the configuration of its runtime (.toml is torchtitan's), and next to it "
        "a script that starts it: .sh for torchrun, .sbatch for Slurm.",
    ),
]
Report = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write a page about the answer: .html.")
]
Picture = Annotated[
    str | None, typer.Option(metavar="FILE", help="Draw the settings: .svg, .png or .pdf.")
]
Figure = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What --picture draws time against: memory or cost. Default: memory.",
    ),
]


def best(
    model: Model,
    gpus: Gpus,
    or_gpus: Or = None,
    tokens: Tokens = None,
    within: Within = None,
    batch: Batch = None,
    sequence: Length = None,
    objective: Objective = "time",
    price: Price = None,
    prices: Prices = None,
    reliability: Reliable = None,
    runtime: Runtime = None,
    fabric: Fabric = None,
    settings: Settings = None,
    search_operations: SearchOperations = OPERATIONS,
    search_time: SearchTime = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    save: Save = None,
    config: Config = None,
    report: Report = None,
    picture: Picture = None,
    figure: Figure = None,
    json: Json = False,
) -> Code:
    """Find the best setting for a model on GPUs."""
    from zsim.api.training_budget import batch_of, duration_of, tokens_of

    del search_time  # its callback rejects it
    _need_files(save, config, report, (picture, figure), or_gpus)
    settings = _with_length(settings, sequence)
    many = {"--set": settings, "--runtime": runtime, "--fabric": fabric}
    many |= {"--reliability": reliability, "--or": or_gpus}
    once = {"--tokens": tokens, "--within": within, "--batch": batch, "--prices": prices}
    once["--price"] = f"{price:g}" if price is not None else None
    once["--objective"] = objective if objective != "time" else None
    once["--search-operations"] = _other_than(OPERATIONS, search_operations)
    with progress(f"the best setting of {model}") as update:
        found = _search(
            model,
            [gpus, *(or_gpus or ())],
            settings,
            tokens=tokens_of(tokens),
            within_s=duration_of(within, "--within"),
            batch_tokens=batch_of(batch),
            objective=objective,
            price=price,
            prices=prices,
            reliability=reliability,
            among=runtime or (),
            fabrics=fabric or (),
            operations=search_operations,
            search=_search_options(workers, scheduler, update),
        )
    command = _command(model, gpus, many, once)
    _print(found, (save, config, report, picture), figure, command, as_json=json)
    return Code.INTERRUPTED if found.is_interrupted else Code(found.best is None)


def _print(
    found: "BestResult | ClusterChoice",
    names: tuple[str | None, str | None, str | None, str | None],
    figure: str | None,
    command: str,
    *,
    as_json: bool,
) -> None:
    """Print the answer, and write it to files: a scenario, a configuration, a page, a picture."""
    save, config, report, picture = names
    files = outputs((report, partial(found.report, command=command)))
    if found.best is not None:
        files += outputs((save, found.save), (config, found.save_config))
        files += _drawing(found, picture, figure)
    with answer_before(files):
        print_answer(found, as_json=as_json)


def _with_length(settings: list[str] | None, sequence: str | None) -> list[str] | None:
    """Return `settings` with the sequence length of --sequence, if it is given."""
    from zsim.api.training_budget import batch_of

    length = batch_of(sequence, "--sequence", "32k or 32768")
    if length is None:
        return settings
    given = settings or []
    if any(each.partition("=")[0].strip() == LENGTH_KEY for each in given):
        raise MistakeError(f"--sequence: cannot be combined with --set {LENGTH_KEY}; remove one")
    return [*given, f"{LENGTH_KEY}={length}"]


def _need_files(
    save: str | None,
    config: str | None,
    report: str | None,
    drawn: tuple[str | None, str | None],
    or_gpus: list[str] | None,
) -> None:
    _need_outputs(save, config, report)
    _need_picture(*drawn)
    _need_one_cluster(or_gpus, drawn[0])


def _need_one_cluster(or_gpus: list[str] | None, picture: str | None) -> None:
    if or_gpus and picture is not None:
        raise MistakeError("--picture: draws the settings of one cluster; remove --or")


def _drawing(
    found: "BestResult | ClusterChoice", picture: str | None, figure: str | None
) -> list[Output]:
    from zsim_plan.answer.best_result import BestResult

    if not isinstance(found, BestResult):
        return []
    draw = found.picture if figure is None else partial(found.picture, figure=figure)
    return outputs((picture, draw))


def _search_options(workers: int | None, scheduler: str | None, lines: "Lines") -> "SearchOptions":
    if workers is not None and scheduler is not None:
        raise MistakeError(f"--workers: {workers} cannot be combined with --scheduler; remove one")
    return {
        "workers": workers,
        "scheduler": scheduler,
        "progress": lines,
        "note": lines.note,
        "may_interrupt": True,
    }


def _search(
    model: str,
    clusters: list[str],
    settings: list[str] | None,
    *,
    operations: int,
    search: "SearchOptions",
    **options: "Unpack[BestOptions]",
) -> "BestResult | ClusterChoice":
    """Return the best setting on one cluster, or the comparison of several."""
    from zsim_plan.answer.best_search import best as best_of
    from zsim_plan.answer.cluster_choice import best_clusters, quoted

    if len(clusters) > 1:
        return best_clusters(
            model, clusters, settings, operations=operations, search=search, **options
        )
    gpus, price = quoted(clusters[0])
    if price is not None:
        if options.get("price") is not None or options.get("prices") is not None:
            raise MistakeError("--price, --prices: the price after @ is one; remove one")
        options["price"] = price
    return best_of(model, gpus, settings, operations=operations, **search, **options)


def _need_outputs(save: str | None, config: str | None, report: str | None) -> None:
    from zsim.api.output import FileKind, need_output

    need_output("--save", save, FileKind.ANY)
    need_output("--config", config, FileKind.ANY)
    need_output("--report", report, FileKind.PAGE)


def _need_picture(picture: str | None, figure: str | None) -> None:
    from zsim.api.output import need_picture
    from zsim_plan.answer.best_report import BEST_FIGURES

    need_picture(picture, figure, BEST_FIGURES)


def _other_than(default: int, number: int) -> str | None:
    return None if number == default else str(number)


def _command(
    model: str,
    gpus: str,
    many: Mapping[str, Sequence[str] | None],
    once: Mapping[str, object],
) -> str:
    """Return the command line of this search: options of `many` may repeat, those of `once` not."""
    asked = [(name, each) for name, values in many.items() for each in values or ()]
    asked += [(name, str(value)) for name, value in once.items() if value is not None]
    return shlex.join(["zsim", "best", model, "--gpus", gpus, *chain(*asked)])
