"""Which optimizer DeepSpeed or the Trainer builds, and what it holds. No torch.

Three tables: what DeepSpeed's JSON may name (runtime/engine.py, `_configure_basic_optimizer`), what `optim` of the Trainer's arguments
may be (transformers/trainer_optimizer.py), and what accelerate makes of the latter under offload (accelerate/utils/deepspeed.py,
`map_pytorch_optim_to_deepspeed`). States and temporaries were read in torch/optim, deepspeed/ops and transformers/optimization.py;
under ZeRO an optimizer sees one flat fp32 tensor per parameter group or sub-group, so nothing is factored or blocked by shape.
bitsandbytes' were read in its optim/optimizer.py (`Optimizer1State`, `Optimizer2State`), and are the tensors that 0.49.2 makes on the CPU; no step was measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.optimizer import Kernel, Optimizer
from explorer.dsconfig.parameters import check_parameters
from explorer.errors import BadInput, shown


@dataclass(slots=True)
class Choice:
    """An optimizer and what there is to say of it."""

    optimizer: Optimizer
    groups: Literal["one", "decay"] = "one"
    """"decay": the Trainer's two, parameters that decay and parameters that do not."""
    findings: list[Finding] = field(default_factory=list)
    not_modelled: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose(config: Mapping[str, Any], trainer: Mapping[str, Any] | None, *, stage: int, offloaded: bool, remade: bool = True) -> Choice:
    """The optimizer of a resolved DeepSpeed config: its own, else the Trainer's, else AdamW. Raises BadInput where it would be refused.

    `remade`: it is made for the model's whole parameters on the GPU first, and then given fp32 masters (not stage 0 in fp32, nor under zero.Init).
    """
    absent = "optimizer" not in config
    if absent and trainer is not None:
        return _trainers(config, trainer, stage, offloaded, remade)
    choice = _deepspeeds({"type": "AdamW"} if absent else config["optimizer"], stage, offloaded, bool(config.get("zero_allow_untested_optimizer")), remade)
    if trainer is not None and trainer.get("optim"):
        choice.findings.append(Finding(id="argument-unused", key="trainer.optim", text=f"is {trainer['optim']}, and the optimizer that the DeepSpeed config names is taken"))
    if absent:
        choice.notes.append("no optimizer in the DeepSpeed config: AdamW is assumed")
    return choice


# --- torch.optim

_TORCH_STATES = {"Adam": 2, "AdamW": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "ASGD": 1, "Rprop": 2, "Adafactor": 1}
_KNOWN_TEMPORARIES = {"Adam", "AdamW", "SGD", "Adagrad", "RMSprop"}
"""Whose code has been read; of the others only the states are known."""


def _torch(name: str, params: Mapping[str, Any], *, offloaded: bool, left_behind: bool = False) -> Optimizer:
    """A class of torch.optim with its parameters; on a GPU it takes foreach where neither fused nor foreach is asked for (`_default_to_fused_or_foreach`)."""
    kernel: Kernel = "cpu" if offloaded else "fused" if params.get("fused") else "single" if params.get("foreach") is False else "foreach"
    return Optimizer(
        name=name.lower(),
        kernel=kernel,
        moments=_TORCH_STATES[name] + _extra_states(name, params),
        implementation=f"torch.optim.{name}",
        foreach_temporaries=_temporaries(name, kernel, params, bool(params.get("weight_decay", 1e-2 if name == "AdamW" else 0))),
        undecayed_temporaries=_temporaries(name, kernel, params, False),
        step_scalars=1 if kernel == "fused" and name != "SGD" else 0,
        factored=name == "Adafactor",
        states_at_init=name == "Adagrad",
        states_left_behind=1 if name == "Adagrad" and left_behind and not offloaded else 0,
    )


def _extra_states(name: str, params: Mapping[str, Any]) -> int:
    """SGD's momentum, Adam's largest second moment, RMSprop's momentum and mean gradient."""
    wanted = {"SGD": ("momentum",), "Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("momentum", "centered")}
    return sum(1 for key in wanted.get(name, ()) if params.get(key))


def _temporaries(name: str, kernel: Kernel, params: Mapping[str, Any], decays: bool) -> int:
    """fp32 temporaries alive together, tensor for tensor, in torch/optim's `_multi_tensor_*` and `_single_tensor_*`."""
    if kernel in ("fused", "cpu"):
        return 0
    copied = int(decays or bool(params.get("maximize")))
    """A gradient with the decay added, or negated, is a copy."""
    match name, kernel:
        case ("Adam" | "AdamW"), "foreach":
            return 1  # the square root of the second moment; the gradient's copy is gone by then
        case ("Adam" | "AdamW"), _:
            held = int(bool(params.get("maximize")) or (name == "Adam" and decays))
            return held + 2  # the root, and the root divided
        case "SGD", "foreach":
            return copied
        case "SGD", _:
            return copied + int(bool(params.get("nesterov")))
        case "Adagrad", "foreach":
            return 2  # the root, and the gradient times the rate: in place where it is a copy already
        case ("Adagrad" | "RMSprop"), _:
            return 1 + copied
    return 0


# --- named in DeepSpeed's JSON

_DEEPSPEED = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
"""`DEEPSPEED_OPTIMIZERS` (runtime/config.py), in any case; every other name is looked up in torch.optim as it is written."""
_ZERO_TESTED = {"adam", "adamw", "adagrad", "lion", "muon"}
"""`ZERO_SUPPORTED_OPTIMIZERS` (runtime/zero/utils.py)."""
_CANNOT_STEP = {"LBFGS": "calls a closure, which DeepSpeed does not give it", "SparseAdam": "takes sparse gradients only"}
_SUGGESTED = ("AdamW", "Adam", "Lion", "Adagrad", "Lamb", "Muon", "SGD", "RMSprop")


def _deepspeeds(section: Any, stage: int, offloaded: bool, untested_allowed: bool, remade: bool) -> Choice:
    field_ = "deepspeed.optimizer"
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise BadInput(field_, "must be an object with a \"type\", such as {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-5}}")
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        raise BadInput(f"{field_}.params", f"is {shown(params)}; give an object")
    if "max_grad_norm" in params:
        raise BadInput(f"{field_}.params.max_grad_norm", "is refused by DeepSpeed; write \"gradient_clipping\" at the top of the config instead")
    written = section["type"]
    name = written.lower() if written.lower() in _DEEPSPEED else written
    if name not in _DEEPSPEED and name not in _TORCH_STATES:
        raise BadInput(f"{field_}.type", _unknown(written))
    choice = Choice(_deepspeed_class(name, params, offloaded, remade))
    if not name.startswith("mu"):  # of mup's classes and Muon's halves, which pick what they know
        check_parameters(params, choice.optimizer.implementation, f"{field_}.params", adam=name in ("adam", "adamw"))
    if stage and name not in _ZERO_TESTED and not untested_allowed:
        choice.findings.append(Finding(id="untested-optimizer", key="optimizer.type", text=f"DeepSpeed refuses {written} with ZeRO until \"zero_allow_untested_optimizer\": true is added; answered as if it were there"))
    if name not in _DEEPSPEED and name not in _KNOWN_TEMPORARIES:
        choice.not_modelled.append(Finding(id="optimizer-not-modelled", key="optimizer.type", text=f"torch.optim.{name}'s states are counted, what it needs beside them during the step is not"))
    if name in ("muon", "muadam", "muadamw", "musgd"):
        choice.not_modelled.append(Finding(id="optimizer-not-modelled", key="optimizer.type", text=f"{written} is taken as {choice.optimizer.implementation}: its own states and temporaries are not modelled"))
    return choice


def in_deepspeed(name: str) -> str | None:
    """The `type` that DeepSpeed's JSON has for an optimizer's name in any case; None where it has none."""
    known = {**{n.lower(): n for n in _TORCH_STATES}, **{n: n for n in _DEEPSPEED}, **{n.lower(): n for n in _SUGGESTED}}
    return known.get(name.lower()) if name.lower() != "adafactor" else None


def in_trainer(name: str) -> str | None:
    """The `optim` that the Trainer has for an optimizer's name in any case; None where it has none."""
    plain = name.lower().replace("-", "_")
    return plain if plain in {*_OPTIM, "adafactor", *_BITSANDBYTES, *_STRANGE} else None


def _unknown(written: str) -> str:
    if written in _CANNOT_STEP:
        return f"is {shown(written)}, which {_CANNOT_STEP[written]}; choose AdamW, say"
    same = next((n for n in _TORCH_STATES if n.lower() == written.lower()), None)
    if same is not None:
        return f"is {shown(written)}, which DeepSpeed looks up in torch.optim as it is written; write {shown(same)}"
    near = difflib.get_close_matches(written[:100], _SUGGESTED, 1, 0.6)
    hint = f"did you mean {shown(near[0])}?" if near else f"choose one of {', '.join(_SUGGESTED)}"
    return f"is {shown(written)}, which neither DeepSpeed nor torch.optim has; {hint}"


def _deepspeed_class(name: str, params: Mapping[str, Any], offloaded: bool, remade: bool) -> Optimizer:
    match name:
        case "adam" | "adamw" | "muadam" | "muadamw" | "muon":
            decoupled = name != "adam" or bool(params.get("adam_w_mode", True))  # "Adam" too is AdamW unless it says otherwise
            if params.get("torch_adam") or name.startswith("mu"):
                return replace(_torch("AdamW" if decoupled else "Adam", params, offloaded=offloaded), name=name)
            if params.get("amsgrad"):
                raise BadInput("deepspeed.optimizer.params.amsgrad", f"is not supported by DeepSpeed's {'CPUAdam' if offloaded else 'FusedAdam'}; add \"torch_adam\": true or leave it out")
            return _on_host(name, "DeepSpeedCPUAdam", 2) if offloaded else _fused(name, "FusedAdam", 2)
        case "lion":
            # DeepSpeedCPULion makes a second state that it never reads (ops/lion/cpu_lion.py).
            return _on_host(name, "DeepSpeedCPULion", 2) if offloaded else _fused(name, "FusedLion", 1)
        case "lamb":
            if offloaded:
                raise BadInput("deepspeed.optimizer.type", "is Lamb, which DeepSpeed has for the GPU only; choose AdamW, or take offload_optimizer out")
            return _fused(name, "FusedLamb", 2)
        case "adagrad":
            return _on_host(name, "DeepSpeedCPUAdagrad", 1) if offloaded else _torch("Adagrad", params, offloaded=False, left_behind=remade)
        case "musgd":
            return replace(_torch("SGD", params, offloaded=offloaded), name=name)
    return _torch(name, params, offloaded=offloaded)


def _fused(name: str, implementation: str, moments: int) -> Optimizer:
    return Optimizer(name=name, kernel="fused", moments=moments, implementation=implementation)


def _on_host(name: str, implementation: str, moments: int) -> Optimizer:
    return Optimizer(name=name, kernel="cpu", moments=moments, implementation=implementation)


# --- the Trainer's own

_OPTIM = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
_OPTIM_DEFAULT = "adamw_torch_fused"
"""From torch 2.8 on (transformers/training_args.py)."""
_STRANGE = {
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit", "adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused", "stable_adamw", "grokadamw"), 2),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), 3),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"), 2),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw"), 2), "schedule_free_sgd": 1, "lomo": 0, "adalomo": 1,
}
"""Of packages beyond torch and transformers, with the fp32 states they are taken to have."""
_BITSANDBYTES: dict[str, tuple[str, int, Literal[8, 32]]] = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), ("AdamW", 2, 8)), "paged_adamw_32bit": ("AdamW", 2, 32),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("Lion", 1, 8)), **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), ("Lion", 1, 32)),
    "rmsprop_bnb_8bit": ("RMSprop", 1, 8), **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), ("RMSprop", 1, 32)),
}
"""The Trainer's names of bitsandbytes' optimizers: class, states, and bits of a state (transformers/trainer_optimizer.py, `_get_bitsandbytes_optimizer`)."""


def _trainers(config: Mapping[str, Any], trainer: Mapping[str, Any], stage: int, offloaded: bool, remade: bool) -> Choice:
    """`Trainer.create_optimizer`, whose two groups differ in weight decay; accelerate allows it under ZeRO without being asked."""
    optim = str(trainer.get("optim", _OPTIM_DEFAULT))
    if optim not in _OPTIM and optim not in _BITSANDBYTES and optim not in _STRANGE and optim != "adafactor":
        near = difflib.get_close_matches(optim[:100], [*_OPTIM, "adafactor", *_BITSANDBYTES, *_STRANGE], 1, 0.5)
        raise BadInput("trainer.optim", f"is {shown(optim)}, which the Trainer does not know" + (f"; did you mean {shown(near[0])}?" if near else "; choose adamw_torch_fused, say"))
    if optim == "adagrad" and stage:
        raise BadInput("trainer.optim", "is adagrad, which fails under ZeRO: DeepSpeed makes Adagrad anew with one parameter group where the Trainer has two; name Adagrad in the DeepSpeed config, or choose another")
    if offloaded and config.get("zero_force_ds_cpu_optimizer", True):
        return _mapped(optim)
    if optim in _BITSANDBYTES:
        return _bitsandbytes(optim, offloaded, own_parameters=stage == 0 and not remade)
    if optim in _STRANGE:
        optimizer = Optimizer(name=optim, kernel="cpu" if offloaded else "fused", moments=_STRANGE[optim], implementation=optim)
        return Choice(optimizer, "decay", not_modelled=[Finding(id="optimizer-not-modelled", key="trainer.optim", text=f"{optim} is not modelled: taken as {_STRANGE[optim]} fp32 states a parameter and no temporaries")])
    if optim == "adafactor":
        return Choice(_adafactor(offloaded), "decay", not_modelled=[] if stage else [Finding(id="optimizer-not-modelled", key="trainer.optim", text="Adafactor's means over a matrix's columns need scratch in the step that is not counted: at stage 0 the step takes more for it (52 MB were measured for BERT), which is seldom the peak")])
    return Choice(_trainers_torch(optim, trainer, offloaded), "decay")


def _bitsandbytes(optim: str, offloaded: bool, own_parameters: bool) -> Choice:
    """Its kernels update in place, with nothing beside the states. `own_parameters`: it is given the model's parameters themselves, and no masters."""
    name, moments, bits = _BITSANDBYTES[optim]
    optimizer = Optimizer(name=optim, kernel="cpu" if offloaded else "fused", moments=moments, state_bits=bits, implementation=f"bitsandbytes.optim.{name}")
    choice = Choice(optimizer, "decay", notes=["bitsandbytes' states are derived from its source: no step with them was measured"])
    if optim.startswith("paged_"):
        choice.not_modelled.append(_unfollowed(optim, "keeps its states in CUDA's managed memory, outside PyTorch's allocator, which the driver moves to the host where the card is full: memory is at most what is said"))
    if bits == 8 and own_parameters:
        choice.not_modelled.append(_unfollowed(optim, "is told by the Trainer to keep embeddings' states in fp32, and without masters it does: memory is at least what is said"))
    if bits == 8 and offloaded:
        choice.not_modelled.append(_unfollowed(optim, "has small states on the host too: host memory is at most what is said"))
    return choice


def _unfollowed(optim: str, text: str) -> Finding:
    return Finding(id="optimizer-not-modelled", key="trainer.optim", text=f"{optim} {text}")


def _trainers_torch(optim: str, trainer: Mapping[str, Any], offloaded: bool) -> Optimizer:
    params = _optim_args(trainer) if optim in ("sgd", "rmsprop") else {}
    params = {**params, "weight_decay": trainer.get("weight_decay", 0.0), "fused": optim == "adamw_torch_fused"}
    return replace(_torch(_OPTIM[optim], params, offloaded=offloaded), name="adamw" if optim.startswith("adamw") else optim)


def _optim_args(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """`optim_args`, "momentum=0.9,nesterov=true" (transformers/trainer_optimizer.py, `_parse_optim_args`)."""
    found: dict[str, Any] = {}
    text = str(trainer.get("optim_args") or "").replace(" ", "")
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise BadInput("trainer.optim_args", f"has {shown(part)}; write key=value, separated by commas")
        if key in ("nesterov", "centered"):
            found[key] = value.lower() in ("true", "1", "yes")
        elif key == "momentum":
            try:
                found[key] = float(value)
            except ValueError:
                raise BadInput("trainer.optim_args", f"has momentum={shown(value)}; give a number") from None
    return found


def _adafactor(offloaded: bool) -> Optimizer:
    """transformers/optimization.py: factored where masters keep their parameters' shapes (stage 0), a flat one has one dimension; two tensors beside it at once (`rsqrt`, and the squared gradient it replaces)."""
    temporaries = 0 if offloaded else 2
    return Optimizer(name="adafactor", kernel="cpu" if offloaded else "single", moments=1, factored=True, implementation="transformers.Adafactor", foreach_temporaries=temporaries, undecayed_temporaries=temporaries)


def _mapped(optim: str) -> Choice:
    """Under offload accelerate replaces the Trainer's optimizer by one of DeepSpeed's for the CPU, in the same two groups."""
    if optim == "adafactor":
        raise BadInput("trainer.optim", "is adafactor, which accelerate replaces under offload by DeepSpeed's CPUAdam, and that cannot read its eps; choose adamw_torch_fused, or take offload_optimizer out")
    choice = Choice(_on_host("adamw" if "adamw" in optim else optim, "DeepSpeedCPUAdam", 2), "decay")
    if "adamw" not in optim:
        choice.findings.append(Finding(id="optimizer-replaced", key="trainer.optim", text=f"is {optim}, which accelerate replaces under offload by DeepSpeed's CPUAdam with its two moments"))
    return choice
