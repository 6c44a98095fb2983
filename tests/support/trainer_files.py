"""Configurations of trainers that are right, beside DeepSpeed's."""

from typing import Any

Tree = Any
"""What JSON and TOML stand for: dictionaries, lists, and what is in them."""

TRAINER_FILES: tuple[tuple[str, str, Tree, Tree], ...] = (
    (
        "torchtitan_config",
        "tt.toml",
        # An A100 has no FP8.
        {"train": {}, "cluster": {"topology": "dgx_h100_infiniband"}},
        {
            "model": {"name": "llama3", "flavor": "mine", "converters": ["float8"]},
            "training": {"local_batch_size": 1, "global_batch_size": 4, "seq_len": 16},
            "parallelism": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 1},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
            "compile": {"enable": True, "components": ["model", "loss"]},
            "quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}},
        },
    ),
    (
        "accelerate_config",
        "a.yaml",
        {"parallel": {}, "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 1}},
        {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_processes": 2,
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_backward_prefetch": "BACKWARD_POST",
                "fsdp_activation_checkpointing": True,
            },
        },
    ),
    (
        "nanotron_config",
        "nt.yaml",
        {"model": {}, "parallel": {}, "train": {}},
        {
            "model": {
                "dtype": "bfloat16",
                "model_config": {
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_attention_heads": 2,
                    "num_hidden_layers": 2,
                    "vocab_size": 64,
                },
            },
            "optimizer": {"zero_stage": 1, "clip_grad": 1.0},
            "parallelism": {"dp": 2, "tp": 1, "pp": 1, "pp_engine": "1f1b"},
            "tokens": {"sequence_length": 16, "micro_batch_size": 1},
        },
    ),
    (
        "foundry_config",
        "f.yaml",
        {"model": {}, "train": {}},
        {
            "max_seq_len": 16,
            "model": {
                "name": "mpt_causal_lm",
                "d_model": 16,
                "n_heads": 2,
                "n_layers": 2,
                "vocab_size": 64,
                "attn_config": {"attn_impl": "flash", "rope": True},
            },
            "optimizer": {"name": "decoupled_adamw", "lr": 1e-4, "betas": [0.9, 0.95]},
            "global_train_batch_size": 4,
            "device_train_microbatch_size": 1,
            "precision": "amp_bf16",
            "fsdp_config": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE"},
        },
    ),
    (
        "axolotl_config",
        "x.yaml",
        {"train": {}},
        {
            "base_model": "me/mine",
            "sequence_len": 16,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "bf16": "auto",
            "optimizer": "adamw_torch",
            "gradient_checkpointing": True,
            "fsdp_version": 2,
            "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        },
    ),
    (
        "litgpt_config",
        "l.yaml",
        {"train": {}},
        {
            "checkpoint_dir": "checkpoints/me/mine",
            "precision": "bf16-true",
            "devices": 2,
            "lora_r": 4,
            "lora_dropout": 0.05,
            "lora_head": True,
            "train": {"micro_batch_size": 1, "global_batch_size": 4, "max_seq_length": 16},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4}},
        },
    ),
    (
        "nemo_config",
        "n.yaml",
        {"model": {"vocab_size": 128}, "train": {}},
        {
            "trainer": {"precision": "bf16-mixed", "gradient_clip_val": 1.0},
            "model": {
                "num_layers": 2,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "encoder_seq_length": 16,
                "max_position_embeddings": "${.encoder_seq_length}",
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "optim": {"name": "mcore_distributed_optim", "betas": [0.9, 0.98]},
            },
        },
    ),
)
"""Files of trainers, each with the key of `[zero]` that names it, and the rest of the scenario."""
