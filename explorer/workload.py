"""The real model and its batch (torch; called only in the worker's forks, by the recorder and by the probe)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from explorer.catalog import Model, lengths
from explorer.errors import BadInput, CouldNotRun
from explorer.setup import Setup


def build_config(model: Model, setup: Setup) -> Any:
    """The transformers config of a setup's model. Raises BadInput where transformers refuses it."""
    from transformers import AutoConfig

    facts = {k: v for k, v in model.config.items()}
    image = setup.image_size
    if image is not None:
        if model.task == "contrastive":
            facts["vision_config"] = {**(facts.get("vision_config") or {}), "image_size": image}
        else:
            facts["image_size"] = image
    try:
        config = AutoConfig.for_model(**facts)
    except Exception as error:  # transformers raises many kinds; each is about the config
        raise BadInput("model", f"transformers refuses the config: {_first_line(error)}") from None
    config.use_cache = setup.use_cache
    if model.task == "seq2seq":
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    return config


def build_model(model: Model, setup: Setup, *, device: str, dtype: Any) -> Any:
    """The model with random weights on `device` in `dtype`, ready to train as the setup says.

    0-dimensional parameters become one element: DeepSpeed 0.19.8 cannot broadcast the former, and memory is the same.
    """
    import transformers

    model_class = getattr(transformers, model.model_class, None)
    if model_class is None:
        raise BadInput("model", f"transformers has no class {model.model_class}")
    config = build_config(model, setup)
    built = _construct(model_class, config, setup.attention, device, dtype)
    built.tie_weights()
    _give_weights(built, device)
    _reshape_scalars(built)
    _freeze(built, setup.trainable)
    built.train()
    if setup.gradient_checkpointing is not False:
        _checkpoint(built, model, setup.gradient_checkpointing)
    return built


def _construct(model_class: Any, config: Any, attention: str, device: str, dtype: Any) -> Any:
    import torch

    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _no_init():
            return model_class._from_config(config, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        if attention != "sdpa" or "scaled_dot_product" not in str(error):
            raise BadInput("model", f"cannot be built: {_first_line(error)}") from None
        with torch.device(device), _no_init():
            return model_class._from_config(config, attn_implementation="eager")
    except (RuntimeError, TypeError, AssertionError, KeyError, IndexError, ZeroDivisionError, AttributeError) as error:
        if "out of memory" in str(error):
            raise
        raise BadInput("model", f"cannot be built: {_first_line(error)}") from None
    finally:
        torch.set_default_dtype(previous)


def _no_init() -> Any:
    """Skip transformers' own weight initialisation: a gigabyte of normal numbers takes seconds on a CPU."""
    from transformers import initialization

    return initialization.no_init_weights()


def _give_weights(built: Any, device: str) -> None:
    """Small weights and unit scales, so that the loss and its gradients are finite."""
    import torch

    if device == "meta":
        return
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.uniform_(-0.02, 0.02) if device != "cpu" else _fill_cpu(parameter)


def _fill_cpu(parameter: Any) -> None:
    """A short random pattern repeated: fast, and no two rows are alike."""
    import torch

    flat = parameter.view(-1)
    pattern = torch.empty(min(flat.numel(), 1_000_003), dtype=parameter.dtype).uniform_(-0.02, 0.02)
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def _reshape_scalars(built: Any) -> None:
    import torch

    for name, parameter in list(built.named_parameters()):
        if parameter.dim() == 0:
            owner, _, last = name.rpartition(".")
            setattr(built.get_submodule(owner), last, torch.nn.Parameter(parameter.data.reshape(1), requires_grad=parameter.requires_grad))


def _freeze(built: Any, patterns: tuple[str, ...]) -> None:
    if patterns == ("*",):
        return
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in patterns))
    if not any(p.requires_grad for p in built.parameters()):
        raise BadInput("trainable", f"matches no parameter: {', '.join(patterns)}")


def _checkpoint(built: Any, model: Model, asked: bool | Mapping[str, Any]) -> None:
    arguments = {"use_reentrant": False} if asked is True else dict(asked)
    try:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except ValueError:
        raise BadInput("gradient_checkpointing", f"{model.name} does not support it in transformers; set it to false") from None
    if arguments.get("use_reentrant"):
        built.enable_input_require_grads()


def make_batch(model: Model, setup: Setup, *, device: str, dtype: Any, generator: Any = None) -> dict[str, Any]:
    """A full-length batch with labels, in the model's dtype; random ids, so that the loss is finite. On "meta", shapes only."""
    at = lengths(setup, model)
    make = _BatchMaker(model, at.micro_batch, device, dtype, generator)
    batch = _BATCHES[model.task](make, at)
    if setup.padding and "input_ids" in batch:
        batch["attention_mask"] = make.padded_mask(batch["input_ids"].shape)
    return batch


class _BatchMaker:
    def __init__(self, model: Model, size: int, device: str, dtype: Any, generator: Any) -> None:
        self.model, self.size, self.device, self.dtype, self.generator = model, size, device, dtype, generator

    def ids(self, length: int, section: str | None = None) -> Any:
        """int64 (batch, length)."""
        import torch

        config = self.model.config.get(section) or {} if section else self.model.config
        vocabulary = config.get("vocab_size", 32000 if self.model.model_type in ("siglip", "llama") else 30522)
        if self.device == "meta":
            return torch.empty(self.size, length, dtype=torch.int64, device="meta")
        return torch.randint(3, max(4, min(vocabulary, 32000)), (self.size, length), device=self.device, generator=self.generator)

    def reals(self, *shape: int) -> Any:
        import torch

        if self.device == "meta":
            return torch.empty(self.size, *shape, dtype=self.dtype, device="meta")
        return torch.randn(self.size, *shape, device=self.device, generator=self.generator).to(self.dtype)

    def padded_mask(self, shape: Any) -> Any:
        import torch

        mask = torch.ones(shape, dtype=torch.int64, device=self.device)
        mask[:, -1] = 0
        return mask


def _contrastive(make: _BatchMaker, at: Any) -> dict[str, Any]:
    ids = make.ids(at.sequence, "text_config")
    return {"input_ids": ids, "pixel_values": make.reals(3, at.image_size, at.image_size), "return_loss": True}


def _image(make: _BatchMaker, at: Any) -> dict[str, Any]:
    labels = make.ids(1)[:, 0].clone() % 2 if make.device != "meta" else make.ids(1)[:, 0].clone()
    return {"pixel_values": make.reals(3, at.image_size, at.image_size), "labels": labels}


def _text(make: _BatchMaker, at: Any) -> dict[str, Any]:
    ids = make.ids(at.sequence)
    return {"input_ids": ids, "labels": ids.clone()}


def _pairs(make: _BatchMaker, at: Any) -> dict[str, Any]:
    return {"input_ids": make.ids(at.sequence), "labels": make.ids(at.target_sequence)}


def _speech(make: _BatchMaker, at: Any) -> dict[str, Any]:
    config = make.model.config
    frames = 2 * config.get("max_source_positions", 1500)
    return {"input_features": make.reals(config.get("num_mel_bins", 80), frames), "labels": make.ids(at.target_sequence)}


_BATCHES: dict[str, Callable[[_BatchMaker, Any], dict[str, Any]]] = {
    "contrastive": _contrastive, "image": _image, "causal": _text, "masked": _text, "seq2seq": _pairs, "speech": _speech,
}


def hub_config(argument: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Worker entry: the config of a hub id, as a dictionary; remote code is never trusted."""
    from transformers import AutoConfig

    try:
        return {"config": AutoConfig.from_pretrained(argument["name"], trust_remote_code=False).to_dict()}
    except Exception as error:
        raise CouldNotRun(f"the hub gave no config for {argument['name']!r}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
