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

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
_ENCODER = {**_TEXT, "vocab_size": 128, "max_position_embeddings": 64}

_QWEN_VL_IDS = {"image_token_id": 127, "video_token_id": 126, "vision_start_token_id": 125, "vision_end_token_id": 124}

TINY_TYPES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"model_type": "qwen2_moe", **_DECODER, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **_DECODER, **_MOE, "head_dim": 8},
    "smollm3": {"model_type": "smollm3", **_DECODER, "pad_token_id": 0},
    "gemma": {"model_type": "gemma", **_DECODER, "head_dim": 8},
    "gemma3_text": {"model_type": "gemma3_text", **_DECODER, "head_dim": 8, "sliding_window": 32},
    "phi": {"model_type": "phi", **_DECODER, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3", **_DECODER, "pad_token_id": 0},
    "olmo": {"model_type": "olmo", **_DECODER},
    "olmo2": {"model_type": "olmo2", **_DECODER},
    "olmoe": {"model_type": "olmoe", **_DECODER, "num_experts": 4, "num_experts_per_tok": 2},
    "granite": {"model_type": "granite", **_DECODER},
    "falcon": {"model_type": "falcon", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True, "parallel_attn": True, "bias": False},
    "gpt_oss": {"model_type": "gpt_oss", **_DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "deepseek_v2": {
        "model_type": "deepseek_v2", **_DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "starcoder2": {"model_type": "starcoder2", **_DECODER, "sliding_window": 32, "bos_token_id": 0, "eos_token_id": 0},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT},
    "bloom": {"model_type": "bloom", "vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"model_type": "mpt", "vocab_size": 128, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gptj": {"model_type": "gptj", **_GPT, "rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neo": {"model_type": "gpt_neo", "vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 16, "max_position_embeddings": 64},
    "stablelm": {"model_type": "stablelm", **_DECODER},
    "cohere": {"model_type": "cohere", **_DECODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "glm": {"model_type": "glm", **_DECODER, "head_dim": 8, "pad_token_id": 0, "eos_token_id": [1]},
    "roberta": {"model_type": "roberta", **_ENCODER},
    "xlm-roberta": {"model_type": "xlm-roberta", **_ENCODER},
    "deberta-v2": {
        "model_type": "deberta-v2", **_ENCODER, "type_vocab_size": 0, "relative_attention": True, "max_relative_positions": -1, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    },
    "modernbert": {"model_type": "modernbert", **_ENCODER, "local_attention": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "distilbert": {"model_type": "distilbert", "vocab_size": 128, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    "electra": {"model_type": "electra", **_ENCODER, "embedding_size": 32},
    "mt5": {"model_type": "mt5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {
        "model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "vocab_size": 128, "max_position_embeddings": 64,
    },
    "llava": {"model_type": "llava", "image_token_index": 127, "text_config": {"model_type": "llama", **_DECODER, "num_hidden_layers": 4}, "vision_config": {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3}},
    "paligemma": {
        "model_type": "paligemma", "image_token_index": 127, "projection_dim": 32, "text_config": {"model_type": "gemma", **_DECODER, "head_dim": 8},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
    },
    "gemma3": {
        "model_type": "gemma3", "image_token_index": 127, "mm_tokens_per_image": 4, "text_config": {"model_type": "gemma3_text", **_DECODER, "head_dim": 8, "sliding_window": 32},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl", **_QWEN_VL_IDS, "text_config": {"model_type": "qwen2_vl_text", **_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        "vision_config": {"model_type": "qwen2_vl_vision", "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "image_size": 32},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", **_QWEN_VL_IDS, "text_config": {"model_type": "qwen2_5_vl_text", **_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        "vision_config": {
            "model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "num_heads": 4, "patch_size": 4, "image_size": 32, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "dinov2": {"model_type": "dinov2", "architectures": ["Dinov2ForImageClassification"], **_VISION},
}
"""Model type → config, of the catalog's further model types."""
