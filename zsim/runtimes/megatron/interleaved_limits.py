"""What Megatron-LM asks of a pipeline with several chunks on each stage."""

from zsim.model.model import ModelError
from zsim.runtimes.megatron.options import Megatron
from zsim.strategy.strategy import Strategy


def need_interleaved(strategy: Strategy) -> None:
    """Return if micro-batches and stages go with several chunks.

    Raises:
        ModelError: they do not; Megatron-LM refuses them too.
    """
    count, micro_batches = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    if micro_batches % count:
        # upstream takes a last group that is larger, with another group size
        raise ModelError(
            f"train.gradient_accumulation_steps: {micro_batches} must be a multiple of "
            f"parallel.pipeline = {count} with several chunks of layers on a stage"
        )
    options = strategy.options(Megatron)
    if count == 2 and not options.overlap_p2p_comm:
        # validate_args: a batch would have several sends between the same two ranks
        raise ModelError(
            "zero.megatron.overlap_p2p_comm: false needs parallel.pipeline > 2 with several chunks "
            "of layers on a stage"
        )
    if options.overlap_p2p_comm and options.cuts_messages(tensor=strategy.parallel.tensor):
        raise ModelError(
            "zero.megatron.scatter_gather_tensors_in_pipeline: true needs overlap_p2p_comm = false "
            "with several chunks of layers on a stage"
        )
