"""Arguments of Megatron-LM for CUDA graphs, of several versions, as options of the runtime."""

from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim.strategy.cuda_graphs import GraphImpl, GraphScope

IMPL, SCOPE = "cuda-graph-impl", "cuda-graph-scope"
OLD_FLAGS = {"enable-cuda-graph": "local", "external-cuda-graph": "transformer_engine"}
"""Flags of versions before 2026, and their implementation of today."""

WITHOUT_EFFECT = (
    *("te-rng-tracker", "cuda-graph-warmup-steps", "cuda-graph-use-single-mempool"),
    *("cuda-graph-retain-backward-graph", "no-cuda-graph-use-single-mempool"),
)
"""Arguments of graphs that change neither time nor memory of a training step."""

OF_EXPERTS = ("moe", "moe_router", "moe_preprocess", "mamba")
INFERENCE = "full_iteration_inference"


def graph_options(arguments: Arguments) -> dict[str, tuple[str, object]]:
    """Return the options for CUDA graphs, each with the argument that sets it.

    Raises:
        TrainerFileError: arguments contradict each other, or name a module that is not modelled.
    """
    arguments.drop(WITHOUT_EFFECT)
    if "cuda-graph-modules" in arguments.given:
        arguments.rename("cuda-graph-modules", SCOPE)
    origin, impl = IMPL, arguments.word(IMPL, "", tuple(GraphImpl))
    for name, meaning in OLD_FLAGS.items():
        if arguments.flag(name):
            if impl:
                raise arguments.wrong(name, f"contradicts --{origin}: allowed is one of the two")
            origin, impl = name, meaning
    scopes = [each for text in arguments.given.pop(SCOPE, []) for each in text.split(",")]
    for scope in scopes:
        if scope in (*OF_EXPERTS, INFERENCE):
            raise arguments.wrong(SCOPE, f"{scope!r} is not modelled, only that of dense blocks")
        if scope not in tuple(GraphScope):
            raise arguments.wrong(SCOPE, f"{scope!r} must be {' or '.join(GraphScope)}")
    if impl in ("", GraphImpl.NONE):
        return {}
    options: dict[str, tuple[str, object]] = {"cuda_graph_impl": (origin, impl)}
    if scopes:
        options["cuda_graph_scope"] = (SCOPE, scopes)
    return options
