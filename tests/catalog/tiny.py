"""A tiny config of every family in the catalog: what the real ones are, at a few thousand parameters."""

from __future__ import annotations

from typing import Any

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
_VISION = {**_TEXT, "image_size": 32, "patch_size": 8}

TINY: dict[str, dict[str, Any]] = {
    "CLIP": {"model_type": "clip", "projection_dim": 16, "text_config": {**_TEXT, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 127}, "vision_config": _VISION},
    "SigLIP": {"model_type": "siglip", "text_config": {**_TEXT, "vocab_size": 128, "max_position_embeddings": 16, "projection_size": 32}, "vision_config": _VISION},
    "ViT": {"model_type": "vit", "architectures": ["ViTForImageClassification"], **_VISION},
    "Whisper": {
        "model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "vocab_size": 128, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 32, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2,
    },
    "BERT": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_TEXT, "vocab_size": 128, "max_position_embeddings": 64},
    "T5": {"model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "pad_token_id": 0, "decoder_start_token_id": 0},
    "GPT-2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "OPT": {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "GPT-NeoX": {"model_type": "gpt_neox", **_TEXT, "vocab_size": 128, "max_position_embeddings": 64},
    "Llama": {"model_type": "llama", **_DECODER},
    "Qwen2.5": {"model_type": "qwen2", **_DECODER},
    "Qwen3": {"model_type": "qwen3", **_DECODER, "head_dim": 8},
    "Mistral": {"model_type": "mistral", **_DECODER},
    "Mixtral": {"model_type": "mixtral", **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma-2": {"model_type": "gemma2", **_DECODER, "head_dim": 8, "sliding_window": 32},
    "InternVL": {"model_type": "internvl", "image_token_id": 127, "text_config": {"model_type": "qwen2", **_DECODER}, "vision_config": {**_VISION, "model_type": "internvl_vision"}},
}
"""Family → config, as a person would paste it."""
