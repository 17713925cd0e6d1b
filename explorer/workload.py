"""The real model and its batch (torch; called only in the worker's forks, by the recorder and by the probe)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from explorer import vision
from explorer.adapters import attach
from explorer.catalog import Model, image_tokens, lengths
from explorer.catalog.hub import offline
from explorer.errors import BadInput, CouldNotRun, reason
from explorer.setup import Setup


def build_config(model: Model, setup: Setup) -> Any:
    """The transformers config of a setup's model. Raises BadInput where transformers refuses it."""
    from transformers import AutoConfig

    facts = {k: v for k, v in model.config.items() if k != "quantization_config"}
    image = setup.image_size
    if image is not None:
        if model.task == "image_text":
            facts = vision.config_for(model, facts, image)
        elif model.task == "contrastive" or "vision_config" in facts:
            facts["vision_config"] = {**(facts.get("vision_config") or {}), "image_size": image}
        else:
            facts["image_size"] = image
    try:
        config = AutoConfig.for_model(**facts)
    except Exception as error:  # transformers raises many kinds; each is about the config
        raise BadInput("model", f"transformers refuses the config: {reason(error)}") from None
    config.use_cache = config.get_text_config(decoder=True).use_cache = setup.use_cache
    if model.task == "seq2seq":
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    return config


def build_model(model: Model, setup: Setup, *, device: str, dtype: Any) -> Any:
    """The model with random weights on `device` in `dtype`, ready to train as the setup says.

    0-dimensional parameters become one element: DeepSpeed 0.19.8 cannot broadcast the former, and memory is the same.
    """
    built = _of_transformers(model, setup, device, dtype) if model.factory is None else _made(model, setup.micro_batch, lengths(setup, model).sequence, device, dtype)[0]
    _reshape_scalars(built)
    if model.in_4_bit:
        _quantize(built, model, setup, device, dtype)
    _freeze(built, setup.trainable)
    built.train()
    if setup.gradient_checkpointing is not False:
        _checkpoint(built, model, setup.gradient_checkpointing)
    if setup.lora is None:
        return built
    if setup.trainable != ("*",):
        raise BadInput("trainable", "and lora both say what trains; leave trainable out, and name modules that train whole in lora.modules_to_save")
    adapted = attach(built, setup.lora, device=device, dtype=dtype)
    if model.in_4_bit:
        from explorer.quantized import copy_outputs_under_adapters

        copy_outputs_under_adapters(adapted)
    return adapted


def _quantize(built: Any, model: Model, setup: Setup, device: str, dtype: Any) -> None:
    from explorer.quantized import quantize

    if setup.lora is None and setup.trainable == ("*",):
        raise BadInput("lora", "is null, and weights in 4 bit do not train; give adapters, such as {\"r\": 16}, or take quantization_config out of the model's config")
    quantize(built, model.config["quantization_config"], device=device, dtype=dtype)


def _of_transformers(model: Model, setup: Setup, device: str, dtype: Any) -> Any:
    import transformers

    model_class = getattr(transformers, model.model_class, None)
    if model_class is None:
        raise BadInput("model", f"transformers has no class {model.model_class}")
    built = _construct(model_class, build_config(model, setup), setup.attention, device, dtype)
    built.tie_weights()
    if model.config.get("tie_word_embeddings") is False:
        _untie_head(built)
    _give_weights(built, device)
    return built


def _untie_head(built: Any) -> None:
    """Give the head weights of its own, as checkpoints of T5 v1.1, mT5 and mT0 have them.

    transformers ties the head of every T5 until it loads a checkpoint whose two weights differ (modeling_utils.py, `tie_weights`);
    the embeddings of encoder and decoder stay one.
    """
    import torch

    head, words = built.get_output_embeddings(), built.get_input_embeddings()
    if head is None or words is None or head.weight is not words.weight:
        return
    head.weight = torch.nn.Parameter(torch.empty_like(words.weight))
    name = next(f"{path}.weight" for path, module in built.named_modules() if module is head)
    built.all_tied_weights_keys = {target: source for target, source in built.all_tied_weights_keys.items() if target != name}
    built._tied_weights_keys = {target: source for target, source in built._tied_weights_keys.items() if target != name}


def _made(model: Model, micro_batch: int, sequence: int | None, device: str, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """(model, batch) of a person's own function. Raises BadInput("factory", ...) where it fails, or returns something else."""
    import torch

    name = model.factory.reference
    module, _, function = name.partition(":")
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = getattr(importlib.import_module(module), function)(micro_batch=micro_batch, **({} if sequence is None else {"sequence": sequence}))
    except Exception as error:  # whatever a person's code raises
        raise BadInput("factory", f"{name} raised {type(error).__name__}: {reason(error)}") from None
    finally:
        torch.set_default_dtype(previous)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module) or not isinstance(made[1], Mapping):
        raise BadInput("factory", f"{name} returned something else than (a torch.nn.Module, a dictionary of its forward's arguments)")
    tensors = [t for t in made[1].values() if isinstance(t, torch.Tensor)]
    if not any(t.dim() and t.shape[0] == micro_batch for t in tensors):
        raise BadInput("factory", f"{name} returned a batch in which no tensor begins with micro_batch, {micro_batch}, samples")
    if any(t.device.type != torch.device(device).type for t in (*made[0].parameters(), *tensors)):
        raise BadInput("factory", f"{name} names a device; let torch's default device be, which is {device} here")
    return made[0].to(dtype), dict(made[1])


def _construct(model_class: Any, config: Any, attention: str, device: str, dtype: Any) -> Any:
    import torch

    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _no_init():
            return model_class._from_config(config, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        if attention == "flash_attention_2":
            raise CouldNotRun(f"attention: flash_attention_2 cannot run here ({reason(error)}); choose sdpa, which runs a fused kernel too") from None
        if attention != "sdpa" or "scaled_dot_product" not in str(error):
            raise BadInput("model", f"cannot be built: {reason(error)}") from None
        with torch.device(device), _no_init():
            return model_class._from_config(config, attn_implementation="eager")
    except (RuntimeError, TypeError, AssertionError, KeyError, IndexError, ZeroDivisionError, AttributeError) as error:
        if "out of memory" in str(error):
            raise
        raise BadInput("model", f"cannot be built: {reason(error)}") from None
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
    packed = {id(m.weight) for m in built.modules() if hasattr(m, "whole_numel")}
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(id(parameter) not in packed and any(fnmatch(name, pattern) for pattern in patterns))
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
    if model.factory is not None:
        return _made(model, at.micro_batch, at.sequence, device, dtype)[1]
    make = _BatchMaker(model, at.micro_batch, device, dtype, generator)
    batch = _BATCHES[model.task](make, at)
    if (setup.padding or at.pads) and "input_ids" in batch:
        batch["attention_mask"] = make.padded_mask(batch["input_ids"].shape)
    return batch


_USUAL_VOCABULARY = 32000
"""Ids are drawn below it: no memory depends on which."""


class _BatchMaker:
    def __init__(self, model: Model, size: int, device: str, dtype: Any, generator: Any) -> None:
        self.model, self.size, self.device, self.dtype, self.generator = model, size, device, dtype, generator

    def ids(self, length: int) -> Any:
        """int64 (batch, length)."""
        import torch

        vocabulary = self.model.vocab_size or _USUAL_VOCABULARY
        if self.device == "meta":
            return torch.empty(self.size, length, dtype=torch.int64, device="meta")
        return torch.randint(3, max(4, min(vocabulary, _USUAL_VOCABULARY)), (self.size, length), device=self.device, generator=self.generator)

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
    ids = make.ids(at.sequence)
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


def _image_text(make: _BatchMaker, at: Any) -> dict[str, Any]:
    return vision.batch(make.model, make.ids(at.sequence), image_tokens(make.model, at.patches), at.image_size, make.reals)


_BATCHES: dict[str, Callable[[_BatchMaker, Any], dict[str, Any]]] = {
    "contrastive": _contrastive, "image": _image, "causal": _text, "masked": _text, "seq2seq": _pairs, "speech": _speech,
    "image_text": _image_text,
}


def hub_config(argument: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Worker entry: the config of a hub id, as a dictionary, from this machine's cache where it is there. Remote code is never trusted."""
    from huggingface_hub import constants
    from transformers import AutoConfig

    constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = 5
    name = argument["name"]
    try:
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
        except OSError:
            if offline():
                raise
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub's and transformers' own kinds; each says what is wrong with the id or its config
        raise _no_hub_config(name, error) from None
    return {"config": config.to_dict()}


def _no_hub_config(name: str, error: BaseException) -> BadInput | CouldNotRun:
    """What to say of a failure, by the first cause that is known."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    kinds = {type(link).__name__ for link in chain}
    if "GatedRepoError" in kinds:
        return BadInput("model", f"{name!r} is a gated model: accept its terms on the hub and log in with `hf auth login`")
    if "RepositoryNotFoundError" in kinds:
        return BadInput("model", f"{name!r} is not on the Hugging Face hub, or is private")
    if any("Unrecognized model" in str(link) for link in chain):
        return BadInput("model", f"{name!r} has no config.json with a model_type on the Hugging Face hub")
    if any("trust_remote_code" in str(link) for link in chain):
        return BadInput("model", f"{name!r} needs code of its own to be run, which is never done here")
    return CouldNotRun(reason(error))
