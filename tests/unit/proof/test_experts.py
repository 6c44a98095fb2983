"""Runtimes without expert ranks: each rank gathers all experts of a block, and tokens stay."""

import pytest

import zsim

SETTINGS: dict[str, object] = {
    "model.layers": 3,
    "model.experts.count": 8,
    "model.experts.top_k": 2,
    "model.experts.intermediate_size": 48,
    "model.experts.shared_intermediate_size": 32,
    "model.experts.dense_layers": 1,
    "activations.checkpointing": "full",
}
"""One dense block, then two with experts."""

LATENT: dict[str, object] = {
    "model.attention_heads": 4,
    "model.key_value_heads": 4,
    "model.latent.key_value_rank": 16,
    "model.latent.query_rank": 24,
    "model.latent.rope_size": 8,
}
DEFAULTS: dict[str, object] = {"zero.bucket_elements": 500_000_000}
RUNTIMES: dict[str, dict[str, object]] = {
    "stage 0": {"zero.stage": 0},
    "stage 1": {"zero.stage": 1},
    "stage 2": {"zero.stage": 2},
    "stage 3": {"zero.stage": 3},
    "fsdp1": {"zero.stage": 3, "zero.emulate": "fsdp1"} | DEFAULTS,
    "fsdp2": {"zero.stage": 3, "zero.emulate": "fsdp2"} | DEFAULTS,
    "deepspeed": {"zero.stage": 3, "zero.emulate": "deepspeed"} | DEFAULTS,
    "megatron": {"zero.stage": 1, "zero.emulate": "megatron"} | DEFAULTS,
    "nanotron": {"zero.stage": 1, "zero.emulate": "nanotron"} | DEFAULTS,
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_steps_with_experts_and_further_tokens_are_proved(name: str) -> None:
    settings = SETTINGS | LATENT | {"model.mtp_layers": 1} | RUNTIMES[name]
    answer = zsim.check(zsim.load("tiny_llama", settings))
    assert not answer.findings, answer.text()


@pytest.mark.parametrize("name", ["megatron", "nanotron", "fsdp2"])
def test_pipelines_of_blocks_with_experts_are_proved(name: str) -> None:
    settings = SETTINGS | RUNTIMES[name] | {"model.layers": 4, "parallel.pipeline": 2}
    answer = zsim.check(zsim.load("tiny_llama", settings))
    assert not answer.findings, answer.text()


def test_an_expert_layer_takes_longer_if_each_expert_runs_alone() -> None:
    times = [
        zsim.run(
            zsim.load(
                "llama2_7b",
                {
                    "model.layers": 1,
                    "model.experts.count": 64,
                    "model.experts.top_k": 8,
                    "model.experts.intermediate_size": 512,
                    "model.experts.kernels": kernels,
                },
            )
        ).step_time_s
        for kernels in ("grouped", "loop")
    ]
    assert times[0] < times[1]
