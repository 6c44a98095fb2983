"""Megatron-LM's requirements for a pipeline with several chunks on each stage."""

from zsim.model.model import ModelError
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron


def need_interleaved(strategy: Strategy) -> None:
    """Raise ModelError unless micro-batches, stages and options are valid with several chunks.

    Raises:
        ModelError: they are not; Megatron-LM rejects them too.
    """
    count, micro_batches = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    if micro_batches % count:
        # Megatron-LM accepts a larger last group, with another group size
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
