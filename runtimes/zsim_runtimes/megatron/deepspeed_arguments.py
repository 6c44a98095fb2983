"""Arguments of Megatron-DeepSpeed: the model of Megatron-LM, trained by DeepSpeed's engine.

Their names and effects follow microsoft/Megatron-DeepSpeed (`megatron/arguments.py`) and
`deepspeed.add_config_arguments`. The configuration of DeepSpeed decides about ZeRO, clipping and
the loss scale.
"""

from zsim.runtimes.trainer_files.named_arguments import Arguments

WITHOUT_EFFECT = (
    *("cpu-optimizer", "deepspeed-activation-checkpointing", "no-pipeline-parallel"),
    *("use-pin-memory", "zero-allgather-bucket-size", "zero-contigious-gradients"),
    *("zero-reduce-bucket-size", "zero-reduce-scatter"),
    *("no-gradient-accumulation-fusion", "no-async-tensor-model-parallel-allreduce"),
)
"""Arguments that change nothing, since the configuration of DeepSpeed or the engine decides."""

ENGINE_DECIDES = ("train.clip_norm", "train.loss_scale.")
"""Prefixes of fields that the configuration of DeepSpeed sets, not arguments."""

ENGINE, CONFIG, NO_PIPELINE = "deepspeed", "deepspeed-config", "no-pipeline-parallel"


def takes_deepspeed(arguments: Arguments) -> bool:
    """Take the flag of DeepSpeed's engine; return True if it is given and can be followed.

    Raises:
        TrainerFileError: the configuration is missing, or the engine is that of pipelines.
    """
    if not arguments.flag(ENGINE):
        return False
    if CONFIG not in arguments.given:
        raise arguments.wrong(ENGINE, "needs --deepspeed_config FILE, which has its ZeRO stage")
    stages = arguments.given.get("pipeline-model-parallel-size", ["1"])
    if stages != ["1"]:
        why = f"{' '.join(stages)}: pipelines of DeepSpeed are not modelled; set it to 1"
        raise arguments.wrong("pipeline-model-parallel-size", why)
    if NO_PIPELINE not in arguments.given:
        why = (
            "without --no-pipeline-parallel, DeepSpeed's engine for pipelines trains the model, "
            "which is not modelled; add it"
        )
        raise arguments.wrong(ENGINE, why)
    return True


def set_deepspeed(arguments: Arguments) -> None:
    """Set the configuration of DeepSpeed and the stage, and leave to it what it decides."""
    for field in [each for each in arguments.origins if each.startswith(ENGINE_DECIDES)]:
        del arguments.origins[field]
    arguments.given.pop("hysteresis", None)
    arguments.set_field("zero.deepspeed_config", arguments.word(CONFIG, ""), CONFIG)
    arguments.set_field("zero.stage", arguments.whole("zero-stage"), "zero-stage")
    cuts = "partition-activations"
    arguments.set_field("activations.partition", arguments.flag(cuts) or None, cuts)
    if arguments.word("remote-device", "none") != "none":
        raise arguments.wrong("remote-device", "is not modelled, only none")
    arguments.drop(WITHOUT_EFFECT)
