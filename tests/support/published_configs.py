"""Configurations of published models, as their `config.json` has them, with their sizes."""

Config = dict[str, object]

LLAMA: Config = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GPT2: Config = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEOX: Config = {
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "rotary_pct": 0.25,
    "vocab_size": 50304,
}
MPT: Config = {
    "model_type": "mpt",
    "attn_config": {"alibi": True, "attn_impl": "torch", "attn_type": "multihead_attention"},
    "d_model": 4096,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "vocab_size": 50432,
}
QWEN2: Config = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "max_window_layers": 36,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA2: Config = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
PHI2 = NEOX | {
    "model_type": "phi",
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 51200,
}
OLMO2 = LLAMA | {"model_type": "olmo2", "vocab_size": 100352}
OPT: Config = {
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 50272,
    "word_embed_proj_dim": 4096,
}
FALCON: Config = {
    "model_type": "falcon",
    "bias": False,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
LLAMA3 = LLAMA | {
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PUBLISHED: dict[str, tuple[Config, int]] = {
    # Radford et al. 2019; the counts that transformers gives for the four sizes of GPT-2.
    "gpt2": (GPT2, 124_439_808),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
    # Biderman et al. 2023, "Pythia", table 1 and its repository: parameters in all.
    "pythia-70m": (NEOX, 70_426_624),
    "pythia-6.9b": (
        NEOX
        | {
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
        },
        6_857_302_016,
    ),
    "pythia-12b": (
        NEOX
        | {
            "hidden_size": 5120,
            "intermediate_size": 20480,
            "num_attention_heads": 40,
            "num_hidden_layers": 36,
            "vocab_size": 50688,
        },
        11_846_072_320,
    ),
    # MosaicML, model card of mpt-7b: 6.7B; 50432 x 4096 + 32 (12 x 4096^2 + 2 x 4096) + 4096.
    "mpt-7b": (MPT, 6_649_286_656),
    # MosaicML, llm-foundry, scripts/train/benchmarking at 4952183: mpt-70b, its column of
    # parameters; that configuration has learned positions and biases.
    "mpt-70b of the benchmark": (
        MPT
        | {
            "attn_config": {"alibi": False},
            "d_model": 8192,
            "n_heads": 64,
            "n_layers": 80,
            "no_bias": False,
            "vocab_size": 50368,
        },
        64_862_437_376,
    ),
    # Weights published by Meta, Mistral AI and Qwen: elements of their safetensors, all told.
    "llama-2-7b": (LLAMA, 6_738_415_616),
    "llama-3-8b": (LLAMA3, 8_030_261_248),
    "llama-3-70b": (
        LLAMA3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
        70_553_706_496,
    ),
    "llama-3.1-405b": (
        LLAMA3
        | {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_hidden_layers": 126,
        },
        405_853_388_800,
    ),
    "mistral-7b-v0.1": (
        LLAMA3
        | {
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "qwen3-8b": (QWEN3, 8_190_735_360),
    "gemma-2b": (
        GEMMA2
        | {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
        },
        2_506_172_416,
    ),
    "gemma2-9b": (GEMMA2, 9_241_705_984),
    "gemma3-1b": (
        GEMMA2
        | {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
    "phi-2": (PHI2, 2_779_683_840),
    "phi-3-mini": (
        LLAMA
        | {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "sliding_window": 2047,
            "vocab_size": 32064,
        },
        3_821_079_552,
    ),
    "olmo-7b": (
        LLAMA | {"model_type": "olmo", "max_position_embeddings": 2048, "vocab_size": 50304},
        6_888_095_744,
    ),
    "olmo2-7b": (OLMO2, 7_298_617_344),
    # peft's example of OPT 6.7B in 8 bits: all parameters, less those of its adapters.
    "opt-6.7b": (OPT, 6_666_862_592 - 8_388_608),
    # Less the projection, which is the embedding and stands in the files a second time.
    "falcon-7b": (FALCON, 7_217_189_760 - 65024 * 4544),
    "falcon-40b": (
        FALCON
        | {
            "hidden_size": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
        },
        41_835_970_560 - 65024 * 8192,
    ),
    "qwen2-7b": (QWEN2, 7_615_616_512),
    "qwen2.5-0.5b": (
        QWEN2
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
}
