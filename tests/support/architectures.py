"""Small models of transformers and peft with random weights, each with a batch: what a user has."""

import os
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn


class _Transformers:
    """The package, imported when a model is made: not by each process that collects tests."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (configurations are typed by keyword)
        return getattr(import_module("transformers"), name)


hf: Any = _Transformers()

Batch = dict[str, Any]
Made = tuple[nn.Module, Callable[[int], Batch]]

SMALL: Final = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NO_DROPOUT: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(seed: int, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(4, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> Batch:
    """Tokens to continue; the second row is padded."""
    found = tokens(seed)
    mask = torch.ones_like(found)
    mask[1, 4:] = 0
    return {
        "input_ids": found,
        "attention_mask": mask,
        "labels": found.masked_fill(mask == 0, -100),
    }


def unmasked(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def translation(seed: int) -> Batch:
    return text(seed) | {"labels": tokens(seed + 100, length=5)}


def pictures(seed: int) -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def classes(seed: int) -> Batch:
    return {"pixel_values": pictures(seed), "labels": torch.tensor([0, 1])}


def captions(seed: int) -> Batch:
    return text(seed) | {"pixel_values": pictures(seed), "return_loss": True}


def speech(seed: int) -> Batch:
    sound = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(seed))
    return {"input_features": sound, "labels": tokens(seed, length=5)}


def llama() -> Made:
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False)
    return hf.LlamaForCausalLM(config), text


def llama_tied() -> Made:
    config = hf.LlamaConfig(**SMALL, tie_word_embeddings=True, use_cache=False)
    return hf.LlamaForCausalLM(config), text


def llama_lora() -> Made:
    config = hf.LlamaConfig(**SMALL, use_cache=False)
    peft: Any = import_module("peft")  # two seconds; only here
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft asks transformers 5 in words of transformers 4
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(hf.LlamaForCausalLM(config), lora), text


def qwen3() -> Made:
    config = hf.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, use_cache=False)
    return hf.Qwen3ForCausalLM(config), text


def mistral() -> Made:
    config = hf.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4, use_cache=False)
    return hf.MistralForCausalLM(config), text


def gemma() -> Made:
    config = hf.Gemma2Config(
        **SMALL, num_key_value_heads=1, head_dim=8, sliding_window=4, use_cache=False
    )
    return hf.Gemma2ForCausalLM(config), text


def gpt2() -> Made:
    config = hf.GPT2Config(
        vocab_size=48, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), text


def gpt_neox() -> Made:
    config = hf.GPTNeoXConfig(**SMALL, use_cache=False)
    return hf.GPTNeoXForCausalLM(config), text


def phi() -> Made:
    config = hf.PhiConfig(**SMALL, use_cache=False)
    return hf.PhiForCausalLM(config), text


def opt() -> Made:
    config = hf.OPTConfig(
        vocab_size=48, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, word_embed_proj_dim=16, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return hf.OPTForCausalLM(config), text


def bert() -> Made:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, **NO_DROPOUT)), text


def albert() -> Made:
    config = hf.AlbertConfig(
        **SMALL, embedding_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return hf.AlbertForMaskedLM(config), text


def t5() -> Made:
    config = hf.T5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), translation


def bart() -> Made:
    config = hf.BartConfig(
        vocab_size=48, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), translation


def vit() -> Made:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        image_size=32, patch_size=8, num_labels=3,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), classes


def clip() -> Made:
    text_part = {**SMALL, "max_position_embeddings": 8, "eos_token_id": 47}
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = hf.CLIPConfig(text_config=text_part, vision_config=vision, projection_dim=8)
    return hf.CLIPModel(config), lambda seed: {
        key: value for key, value in captions(seed).items() if key != "labels"
    }


def whisper() -> Made:
    config = hf.WhisperConfig(
        vocab_size=48, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=6, max_target_positions=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, use_cache=False,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), speech


def mixtral() -> Made:
    config = hf.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=1, use_cache=False
    )
    return hf.MixtralForCausalLM(config), text


def mixtral_with_router_loss() -> Made:
    config = hf.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=4, output_router_logits=True,
        use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config), text


def llama_with_cache() -> Made:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), text


def llama_with_checkpoints() -> Made:
    module = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, use_cache=False))
    module.activation_checkpointing_enable()
    return module, text


def opt_with_layer_drop() -> Made:
    config = hf.OPTConfig(
        vocab_size=48, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, word_embed_proj_dim=16, layerdrop=0.5, use_cache=False,
    )  # fmt: skip
    return hf.OPTForCausalLM(config), text


def mamba() -> Made:
    config = hf.MambaConfig(
        vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return hf.MambaForCausalLM(config), unmasked


def rwkv() -> Made:
    config = hf.RwkvConfig(
        vocab_size=48, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2,
        context_length=8, use_cache=False,
    )  # fmt: skip
    return hf.RwkvForCausalLM(config), unmasked


def resnet() -> Made:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return hf.ResNetForImageClassification(config), classes


def resnet_without_labels() -> Made:
    return resnet()[0], lambda seed: {"pixel_values": pictures(seed)}


def convnext() -> Made:
    config = hf.ConvNextConfig(
        num_stages=2, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3, drop_path_rate=0.0
    )
    return hf.ConvNextForImageClassification(config), classes


ARCHITECTURES: Mapping[str, Callable[[], Made]] = {
    "Llama": llama,
    "Llama, tied": llama_tied,
    "Llama, LoRA": llama_lora,
    "Qwen3": qwen3,
    "Mistral": mistral,
    "Gemma 2": gemma,
    "GPT-2": gpt2,
    "GPT-NeoX": gpt_neox,
    "Phi": phi,
    "OPT": opt,
    "BERT": bert,
    "ALBERT": albert,
    "T5": t5,
    "BART": bart,
    "ViT": vit,
    "CLIP": clip,
    "Whisper": whisper,
    "Mixtral": mixtral,
    "Mixtral with the loss of its routers": mixtral_with_router_loss,
    "Mamba": mamba,
    "RWKV": rwkv,
    "ResNet": resnet,
    "ConvNeXt": convnext,
}

REFUSED: Mapping[str, Callable[[], Made]] = {
    "Llama that keeps keys and values": llama_with_cache,
    "Llama that checkpoints by itself": llama_with_checkpoints,
    "ResNet without labels": resnet_without_labels,
    "OPT that drops layers": opt_with_layer_drop,
}
"""What zsim does not follow."""

SUMMED_APART = frozenset(["T5", "BART", "Whisper", "Mixtral with the loss of its routers"])
"""Encoder states are read twice in each block of a decoder, and logits of routers by their loss:
their gradients add up by units."""
