"""Checks of a pasted config: sizes must be sizes, or transformers builds nonsense, or fails far from the key that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.catalog.kinds import Kind
from explorer.errors import BadInput, nearest, shown

_MOST = 1 << 31
"""No size in a config is larger."""
_SECTIONS = ("text_config", "vision_config")
_SIZES = frozenset((
    "hidden_size", "n_embd", "d_model", "d_ff", "d_kv", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "vocab_size", "patch_size", "image_size", "num_mel_bins",
    "n_layer", "n_layers", "num_layers", "num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "n_head", "n_heads", "num_heads", "num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads", "head_dim",
    "n_positions", "max_position_embeddings", "max_source_positions", "max_target_positions", "max_encoder_position_embeddings", "max_decoder_position_embeddings",
    "context_length", "max_seq_len", "model_max_length", "num_experts", "num_local_experts", "num_experts_per_tok",
))
"""Above 0 wherever a config gives them; null is the class's own default, and a list is a size per layer, which transformers judges."""
_ONE_OF = frozenset((
    "vocab_size", "num_mel_bins", "n_positions", "max_position_embeddings", "max_source_positions", "max_target_positions", "max_encoder_position_embeddings", "max_decoder_position_embeddings",
    "context_length", "max_seq_len", "model_max_length",
))
"""Of these a model has one, whatever its layers."""
_MOST_LAYERS = 4096
"""Each is built, so many take minutes. DeepNet (arXiv:2203.00555), the deepest Transformer published, has 1,000; Llama 3.1 405B has 126."""
_LAYERS = ("layer", "layers", "depth", "depths", "blocks")
"""How the name of a number of layers ends, whatever the class; some may be 0 or below, counted from the end."""
_WIDEST = 1 << 20
"""PaLM 540B's feed-forward is 73,728 wide (arXiv:2204.02311), Llama 3.1 405B's 53,248."""
_MOST_WORDS = 1 << 24
"""XLM-V, the largest vocabulary of a language model published, has 901,629 (arXiv:2301.10472)."""
_LARGEST = dict.fromkeys(("hidden_size", "n_embd", "d_model", "d_ff", "d_kv", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "head_dim"), _WIDEST) | {"vocab_size": _MOST_WORDS}
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
_HEAD_WIDTHS = ("head_dim", "d_kv")


ACTIVATIONS = frozenset((
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu",
    "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
))
"""transformers' `ACT2FN`."""
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
ROPES = frozenset(("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "axial", "su", "xdrope"))
"""transformers' `ROPE_INIT_FUNCTIONS`, and names that some models and old files have."""


def check(config: Mapping[str, Any], kind: Kind) -> None:
    """Raises BadInput("model", ...) naming the key that cannot be."""
    _check_part(config, "", kind.free_heads)
    _check_quantization(config.get("quantization_config"))


def _check_quantization(section: Any) -> None:
    """Weights in 4 bit by bitsandbytes are followed; of any other kind the estimate would be of whole weights."""
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise BadInput("model", f"the config's quantization_config is {shown(section)}; it must be an object")
    method = section.get("quant_method", "bitsandbytes")
    in_4_bit = section.get("load_in_4bit", section.get("_load_in_4bit"))
    if method != "bitsandbytes" or not in_4_bit:
        what = f"{shown(method)} in 8 bit" if method == "bitsandbytes" and section.get("load_in_8bit") else shown(method)
        raise BadInput("model", f"the config's quantization_config is of {what}, and only bitsandbytes in 4 bit (\"load_in_4bit\": true) is followed here; take quantization_config out for the model with whole weights")


def _check_part(config: Mapping[str, Any], where: str, free_heads: bool) -> None:
    for key, value in config.items():
        path = where + key
        if key in _SECTIONS and not isinstance(value, Mapping | None):
            raise BadInput("model", f"the config's {path} is {shown(value)}; it must be an object")
        if key in _ACTIVATION_KEYS and isinstance(value, str) and value not in ACTIVATIONS:
            raise BadInput("model", f"the config's {path} is {shown(value)}, which transformers does not have{nearest(value, ACTIVATIONS) or '; choose gelu, relu or silu, say'}")
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            _check_rope(path, value)
        if key.endswith(_LAYERS):
            _check_most(path, value, _MOST_LAYERS)
        if key in _SIZES:
            _check_size(path, value, key in _ONE_OF)
            _check_most(path, value, _LARGEST.get(key, _MOST))
        elif isinstance(value, Mapping):
            _check_part(value, path + ".", free_heads)
    _check_heads(config, where, free_heads)


def _check_rope(path: str, section: Mapping[str, Any]) -> None:
    rope = section.get("rope_type", section.get("type", "default"))
    if not isinstance(rope, str) or rope not in ROPES:
        raise BadInput("model", f"the config's {path}.rope_type is {shown(rope)}; choose one of {', '.join(sorted(ROPES))}")


def _check_size(path: str, value: Any, single: bool) -> None:
    if value is None or isinstance(value, list) and not single:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput("model", f"the config's {path} is {shown(value)}; it must be a whole number")
    if not 0 < value < _MOST:
        raise BadInput("model", f"the config's {path} is {shown(value)}; it must be above 0 and below 2^31")


def _check_most(path: str, value: Any, most: int) -> None:
    if any(isinstance(size, int) and size > most for size in (value if isinstance(value, list) else [value])):
        raise BadInput("model", f"the config's {path} is {shown(value)}, beyond every model there is; give {most:,} at most")


def _check_heads(config: Mapping[str, Any], where: str, free_heads: bool) -> None:
    width, heads, shared = _first(config, _WIDTHS), _first(config, _HEADS), _first(config, ("num_key_value_heads",))
    if width and heads and width % heads and not free_heads and not _first(config, _HEAD_WIDTHS):
        raise BadInput("model", f"the config's {where}hidden size {width} is not divisible by its {heads} attention heads")
    if heads and shared and heads % shared:
        raise BadInput("model", f"the config's {where}num_attention_heads {heads} is not a multiple of its num_key_value_heads {shared}")


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)

