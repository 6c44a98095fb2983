"""The part of a nanotron configuration that a setting determines."""

from zsim.runtimes.config import ConfigQuestion


def write(asked: ConfigQuestion) -> str:
    """Return the part of a configuration that a setting determines."""
    options = asked.options
    mode = str(options.get("tp_mode", "all_reduce")).upper()
    gather = str(options.get("tp_recompute_allgather", True)).lower()
    return "\n".join(
        [
            "optimizer:",
            f"  zero_stage: {asked.changes['zero.stage']}",
            "parallelism:",
            f"  dp: {asked.number('parallel.data')}",
            f"  pp: {asked.number('parallel.pipeline')}",
            "  pp_engine: 1f1b",
            f"  tp: {asked.number('parallel.tensor')}",
            f"  tp_mode: {mode}",
            f"  tp_recompute_allgather: {gather}",
            f"  recompute_layer: {str(asked.checkpointing == 'full').lower()}",
            "tokens:",
            f"  sequence_length: {asked.sequence_length}",
            f"  micro_batch_size: {asked.number('train.micro_batch_size')}",
            "  batch_accumulation_per_replica: "
            f"{asked.number('train.gradient_accumulation_steps')}",
            "",
        ]
    )
