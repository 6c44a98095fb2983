"""Settings of FSDP2 as torchtitan's file, read back as the same strategy."""

import tomllib
from pathlib import Path

import pytest

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.scenario import load
from zsim.mistake import MistakeError
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.lookup import config_text
from zsim.scenario.changes import changed

TRAIN: dict[str, object] = {
    "precision": "bf16",
    "clip_norm": 1.0,
    # torchtitan's defaults
    "learning_rate": 8e-4,
    "beta2": 0.95,
    "weight_decay": 0.1,
}
TABLES = {
    "title": "read back",
    "model": {"name": "llama3.1-8b", "sequence_length": 2048, "attention": "flash2"},
    **gpu_fleet("16xh100").tables,
}
SETTING: dict[str, object] = {
    "zero.emulate": "fsdp2",
    "zero.stage": 3,
    "parallel.data": 16,
    "parallel.tensor": 1,
    "parallel.replicate": 1,
    "activations.checkpointing": "none",
    "train.micro_batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.global_batch_size": 64,
}

STAGES: dict[str, object] = {
    "parallel.pipeline": 4,
    "parallel.data": 4,
    "train.gradient_accumulation_steps": 8,
}
"""With a pipeline, whose stages keep the logits of a micro-batch until its backward."""


def asked(
    setting: dict[str, object], *, model: str = "llama3.1-8b", train: dict[str, object] = TRAIN
) -> ConfigQuestion:
    return ConfigQuestion(
        changes=setting,
        precision=str(train["precision"]),
        sequences=64,
        sequence_length=2048,
        clip_norm=1.0,
        model=model,
        train=train,
    )


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    ("changes", "train"),
    [
        ({}, {}),
        ({"activations.checkpointing": "operations"}, {}),
        ({"activations.checkpointing": "full", "zero.fsdp2.reshard_after_forward": False}, {}),
        ({"parallel.tensor": 8, "parallel.data": 2, "train.micro_batch_size": 16}, {}),
        (
            {
                "parallel.tensor": 8,
                "parallel.data": 2,
                "train.micro_batch_size": 16,
                "zero.fsdp2.enable_async_tensor_parallel": True,
            },
            {"compile": True},
        ),
        ({"parallel.replicate": 2, "parallel.data": 8}, {"compile": True, "loss": "fused"}),
        ({"zero.fsdp2.offload_policy": "cpu"}, {"compile": True, "float8": "rowwise"}),
        ({"zero.fsdp2.enable_fsdp_float8_all_gather": True}, {"float8": "tensorwise"}),
        ({}, {"precision": "fp32"}),
        (STAGES, {"holds_logits": True}),
        (
            STAGES
            | {
                "zero.fsdp2.pipeline_schedule": "Interleaved1F1B",
                "zero.fsdp2.last_stage_less_layers": 2,
                "zero.fsdp2.reshard_after_forward": False,
            },
            {"holds_logits": True},
        ),
        (
            STAGES
            | {
                "zero.fsdp2.pipeline_schedule": "InterleavedZeroBubble",
                "zero.fsdp2.reshard_after_forward": False,
                "activations.checkpointing": "none",
            },
            {"holds_logits": True},
        ),
        (
            {
                "parallel.context": 2,
                "parallel.context_exchange": "ring",
                "train.micro_batch_size": 4,
            },
            {},
        ),
    ],
)
def test_a_setting_is_read_back_as_the_same_strategy(
    tmp_path: Path, changes: dict[str, object], train: dict[str, object]
) -> None:
    setting = SETTING | changes
    path = tmp_path / "run.toml"
    path.write_text(config_text(asked(setting, train=TRAIN | train), suffix=".toml"), "utf-8")
    # torchtitan reduces gradients in fp32 alone
    wanted = changed({**TABLES, "train": TRAIN | train}, setting)
    wanted = changed(wanted, {"zero.fsdp2.reduce_dtype": "fp32"})
    read = {**TABLES, "model": {}, "train": {}, "zero": {"torchtitan_config": str(path)}}
    one, other = load(read), load(wanted)
    assert one.strategy == other.strategy
    assert one.model.units == other.model.units


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"zero.emulate": "deepspeed"}, "torchtitan trains with fsdp2, not deepspeed"),
        ({"zero.fsdp2.reshard_after_forward": 8}, "torchtitan cannot keep shards over 8 ranks"),
        ({"zero.fsdp2.enable_sequence_parallel": False}, "tensor axis always cuts tokens"),
        ({"activations.checkpointing": "selective"}, "torchtitan has no checkpointing selective"),
        ({"zero.fsdp2.pipeline_stages_per_rank": 4}, "layers of a stage, not stages of a rank"),
    ],
)
def test_what_torchtitan_cannot_do_is_one_line(changes: dict[str, object], why: str) -> None:
    with pytest.raises(MistakeError, match=why):
        config_text(asked(SETTING | changes), suffix=".toml")


def test_a_model_without_a_flavor_and_what_is_not_set_are_said_in_comments() -> None:
    text = config_text(
        asked({**SETTING, "zero.fsdp2.forward_prefetch": 1}, model="gpt2"), suffix=".toml"
    )
    assert "# torchtitan does not set blocks gathered ahead" in text
    assert "# No flavor of torchtitan is this model" in text
    assert tomllib.loads(text)["model"] == {}


def test_tokens_that_8_bit_layers_gather_as_they_are_are_refused() -> None:
    changes = {"parallel.tensor": 8, "zero.fsdp2.enable_float8_tensorwise_tp": False}
    train = TRAIN | {"float8": "tensorwise"}
    with pytest.raises(MistakeError, match="tensor ranks gather tokens in 8 bits"):
        config_text(asked(SETTING | changes, train=train), suffix=".toml")
    assert "converters" in config_text(
        asked(SETTING | {"parallel.tensor": 8}, train=train), suffix=".toml"
    )


def test_expert_ranks_are_read_back_as_the_same_strategy(tmp_path: Path) -> None:
    name = "qwen3-30b-a3b"
    setting = SETTING | {"parallel.expert": 8, "parallel.expert_tensor": 1}
    path = tmp_path / "run.toml"
    path.write_text(config_text(asked(setting, model=name), suffix=".toml"), "utf-8")
    shape = {"name": name, "sequence_length": 2048, "attention": "flash2"}
    wanted = changed({**TABLES, "model": shape, "train": TRAIN}, setting)
    wanted = changed(wanted, {"zero.fsdp2.reduce_dtype": "fp32"})
    read = {**TABLES, "model": {}, "train": {}, "zero": {"torchtitan_config": str(path)}}
    one, other = load(read), load(wanted)
    assert one.strategy.parallel.expert == 8
    assert one.strategy.expert_data == other.strategy.expert_data == 2
    assert one.model.units == other.model.units


def test_expert_ranks_are_not_written_as_code() -> None:
    setting = SETTING | {"parallel.expert": 8}
    with pytest.raises(MistakeError, match=r"8 expert ranks need torchtitan; name a file that "):
        config_text(asked(setting, model="qwen3-30b-a3b"))
